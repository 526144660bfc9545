"""How fast a worker is, from reports that come at any rate, with restarts and silences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.proto.messages import LoadReport, Role, WorkerCounters
from baton.router.pace import SPACING_S, WINDOW_S, Paces


def report(tokens: int, incarnation: str = "a", age_s: float = 0.0, **counters: int) -> LoadReport:
    return LoadReport(
        "w", incarnation, Role.DECODE, age_s=age_s, counters=WorkerCounters(tokens_generated=tokens, **counters)
    )


@given(
    gaps_s=st.lists(st.floats(0.001, 2.0), min_size=20, max_size=200),
    rate=st.integers(0, 100_000),
)
def test_a_steady_worker_has_its_rate_however_often_it_reports(gaps_s: list[float], rate: int) -> None:
    paces, now = Paces(), 100.0
    for gap_s in gaps_s:
        now += gap_s
        paces.report(report(int(rate * now)), now)
    pace = paces.pace("w")
    if sum(gaps_s[1:]) < SPACING_S:
        assert pace is None
    else:
        assert pace is not None
        assert pace.tokens_per_s == pytest.approx(rate, abs=2 / pace.window_s)
        assert SPACING_S <= pace.window_s <= WINDOW_S + max(gaps_s)


def test_a_rate_fades_within_the_window() -> None:
    paces = Paces()
    for step in range(20):
        paces.report(report(1000 * step), now=step * 0.5)
    for step in range(20, 40):
        paces.report(report(19000), now=step * 0.5)
    assert paces.pace("w").tokens_per_s == 0


def test_a_restarted_worker_starts_anew() -> None:
    paces = Paces()
    paces.report(report(1000), now=0.0)
    paces.report(report(2000), now=1.0)
    paces.report(report(0, "b"), now=2.0)
    assert paces.pace("w") is None
    paces.report(report(10, "b"), now=3.0)
    assert paces.pace("w").tokens_per_s == 10


def test_the_time_is_that_of_the_figures_not_of_their_arrival() -> None:
    paces = Paces()
    paces.report(report(0), now=0.0)
    paces.report(report(100, age_s=3.0), now=4.0)
    assert paces.pace("w").tokens_per_s == 100


def test_the_budget_share_is_of_what_steps_had_room_for() -> None:
    paces = Paces()
    paces.report(report(0, budget_tokens_used=50, budget_tokens_offered=100), now=0.0)
    paces.report(report(0, budget_tokens_used=75, budget_tokens_offered=200), now=1.0)
    assert paces.pace("w").budget_share == 0.25
    paces.report(report(0, "b"), now=2.0)
    paces.report(report(0, "b"), now=3.0)
    assert paces.pace("w").budget_share == 0.0


def test_who_is_gone_or_unknown_has_no_pace() -> None:
    paces = Paces()
    paces.report(report(0), now=0.0)
    paces.report(report(9), now=1.0)
    paces.drop("w")
    paces.drop("never there")
    assert paces.pace("w") is None
