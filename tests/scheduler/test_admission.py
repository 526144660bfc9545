"""Who is taken in, and who is given blocks when."""

from __future__ import annotations

import pytest

from baton.proto.messages import FailureKind, Leg
from baton.scheduler.scheduler import Refusal
from baton.scheduler.sequence import State


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"prompt": 0}, "0"),
        ({"prompt": 90, "max_tokens": 11}, "max_model_len 100"),
        ({"prompt": 30, "max_tokens": 11}, "11 blocks, the pool has 10"),
        ({"prompt": 30, "max_tokens": 11, "leg": Leg.DECODE}, "11 blocks, the pool has 10"),
        ({"prompt": 41, "leg": Leg.PREFILL}, "11 blocks, the pool has 10"),
        ({"prompt": 101, "leg": Leg.PREFILL}, "max_model_len 100"),
        ({"prompt": 8, "num_prompt_tokens": 9}, "9"),
        ({"prompt": 8, "num_prompt_tokens": 4, "max_tokens": 4}, "max_tokens 4"),
    ],
)
def test_what_can_never_run_is_refused_at_once_with_the_numbers(driver, fields, numbers):
    d = driver(num_blocks=10, max_model_len=100)
    outcome = d.offer("a", **fields)
    assert isinstance(outcome, Refusal)
    assert outcome.kind is FailureKind.REFUSED
    assert numbers in outcome.message
    d.assert_at_rest()


def test_a_prefill_leg_needs_room_for_its_tokens_only(driver):
    d = driver(num_blocks=10, max_model_len=40)
    d.add("a", 40, leg=Leg.PREFILL, max_tokens=1000)
    d.step()
    assert d.emitted == {"a": [7]}


def test_a_sequence_id_is_refused_while_it_is_in_use_and_taken_afterwards(driver):
    d = driver()
    d.add("a", 4, max_tokens=1)
    assert isinstance(d.offer("a", 4), Refusal)
    d.run_until_idle()
    d.add("a", 4)


def test_a_sequence_id_is_refused_while_its_pulls_have_not_settled(driver):
    d = driver()
    d.receive("a", 4)
    d.plan()
    d.abort("a")
    assert isinstance(d.offer("a", 4), Refusal)


def test_a_prompt_is_admitted_only_with_blocks_for_all_of_it(driver):
    d = driver(num_blocks=10, max_num_batched_tokens=8, role="prefill")
    first, second = d.add("a", 24, leg=Leg.PREFILL), d.add("b", 20, leg=Leg.PREFILL)
    for _ in range(3):
        d.step()
    assert (first.state, second.state) == (State.EXPORTED, State.WAITING)
    d.step()
    assert second.state is State.WAITING
    assert d.scheduler.release("a", d.now())
    d.step()
    assert second.state is State.RUNNING


def test_prefill_legs_are_never_preempted_however_tight_the_pool(driver):
    d = driver(num_blocks=10, max_num_batched_tokens=8)
    for number in range(6):
        d.add(str(number), 13 + number, leg=Leg.PREFILL)
    for _ in range(30):
        for event in d.commit(d.plan()):
            if event.sequence.state is State.EXPORTED:
                d.scheduler.release(event.sequence.sequence_id, d.now())
    assert len(d.emitted) == 6
    assert d.scheduler.counters.preemptions_recompute == 0


def test_a_waiting_sequence_that_does_not_fit_is_not_overtaken(driver):
    d = driver(num_blocks=10)
    d.add("a", 20)
    d.step()
    big, small = d.add("big", 20), d.add("small", 4)
    d.step()
    assert (big.state, small.state) == (State.WAITING, State.WAITING)


def test_one_that_grows_is_admitted_only_if_everyone_in_flight_can_grow_too(driver):
    d = driver(num_blocks=10)
    d.add("a", 15)
    d.step()
    # 4 of 10 blocks are held; 15 tokens and one more need 4, and 2 must stay for each in flight.
    fits, not_now = d.add("b", 15), d.add("c", 3)
    d.plan()
    assert (fits.state, not_now.state) == (State.RUNNING, State.WAITING)


def test_a_hand_off_is_reserved_only_once_it_is_announced(driver):
    d = driver()
    sequence = d.add("a", 8, leg=Leg.DECODE)
    assert d.plan().reserved == []
    assert d.scheduler.announce("a")
    assert d.plan().reserved == [sequence]
    assert sequence.state is State.RECEIVING
    assert len(sequence.block_ids) == 3


def test_late_and_unknown_announcements_are_ignored(driver):
    d = driver()
    d.receive("a", 8)
    assert not d.scheduler.announce("a")
    assert not d.scheduler.announce("nobody")


def test_blocks_are_reserved_for_hand_offs_though_the_budget_is_spent(driver):
    d = driver(max_num_batched_tokens=1)
    d.add("running", 1)
    d.step()
    sequences = [d.receive(name, 8) for name in "abc"]
    step = d.plan()
    assert step.num_tokens == 1
    assert step.reserved == sequences


def test_a_landed_hand_off_runs_before_anything_new_is_admitted(driver, chunks_of):
    d = driver(max_num_batched_tokens=1, policy="priority")
    landed = d.receive("landed", 8, priority=5)
    d.plan()
    d.add("new", 8, priority=0)
    d.land("landed")
    assert landed.state is State.LANDED
    assert chunks_of(d.plan()) == {"landed": (8, 9)}
    assert landed.state is State.RUNNING


def test_nothing_is_reserved_for_a_hand_off_that_would_keep_others_from_growing(driver):
    d = driver(num_blocks=10)
    d.receive("a", 15)
    d.receive("b", 15)
    d.receive("c", 4)
    assert [sequence.sequence_id for sequence in d.plan().reserved] == ["a", "b"]
