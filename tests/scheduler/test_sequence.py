"""The table of states."""

from __future__ import annotations

from itertools import product

import pytest

from baton.proto.messages import Leg, Request, Sampling
from baton.scheduler.sequence import ALLOWED_MOVES, IllegalMove, Sequence, State

# Row: from; column: to, in the order of State. The same table once more, so that a change must be meant.
TABLE = """
             expected waiting receiving landed running preempted exported finished aborted
  expected      -        x        -        -      -        -         -        -       x
  waiting       -        -        x        -      x        -         -        -       x
  receiving     -        -        -        x      -        -         -        x       x
  landed        -        -        -        -      x        x         -        -       x
  running       -        -        -        -      -        x         x        x       x
  preempted     -        -        -        -      x        -         -        -       x
  exported      -        -        -        -      -        -         -        x       x
  finished      -        -        -        -      -        -         -        -       -
  aborted       -        -        -        -      -        -         -        -       -
"""
HEADER, *ROWS = [line.split() for line in TABLE.strip().splitlines()]
ALLOWED = {(State(row[0]), State(HEADER[i])) for row in ROWS for i, mark in enumerate(row[1:]) if mark == "x"}


def sequence_in(state: State) -> Sequence:
    sequence = Sequence(Request("s", (1, 2, 3), 3, Sampling()), 0, 0.0)
    sequence.state = state
    return sequence


@pytest.mark.parametrize(("origin", "target"), list(product(State, State)), ids=lambda state: state.value)
def test_a_sequence_moves_where_the_table_allows_and_nowhere_else(origin, target):
    sequence = sequence_in(origin)
    if (origin, target) in ALLOWED:
        sequence.move_to(target)
        assert sequence.state is target
    else:
        with pytest.raises(IllegalMove):
            sequence.move_to(target)
        assert sequence.state is origin


def test_the_table_has_a_row_for_every_state():
    assert set(ALLOWED_MOVES) == set(State)


def test_every_state_but_the_last_two_may_be_aborted():
    assert {origin for origin, target in ALLOWED if target is State.ABORTED} == set(State) - {
        State.FINISHED,
        State.ABORTED,
    }


@pytest.mark.parametrize(("leg", "state"), [(Leg.DECODE, State.EXPECTED), (Leg.PREFILL, State.WAITING)])
def test_a_decode_leg_starts_expected_and_others_waiting(leg, state):
    assert Sequence(Request("s", (1,), 1, Sampling(), leg=leg), 0, 0.0).state is state
