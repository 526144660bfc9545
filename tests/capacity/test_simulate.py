"""A simulated run: every request ends once, its times add up, and the same seed tells the same story."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
from virtual_cluster import cluster, cost_model

from baton.capacity import workload
from baton.capacity.outcome import End, RequestOutcome, RunOutcome
from baton.capacity.simulate import simulate


def run(setup, arrivals, seed=1, events=(), cost=None) -> tuple[list[RequestOutcome], RunOutcome]:
    outcomes: list[RequestOutcome] = []
    result = simulate(setup, cost or cost_model(), arrivals, seed, events, outcomes.append)
    return sorted(outcomes, key=lambda outcome: outcome.number), result


SHAPES = {"co-located": cluster(colocated=2), "1P1D": cluster(prefill=1, decode=1), "2P3D": cluster(2, 3)}
every_shape = pytest.mark.parametrize("setup", SHAPES.values(), ids=SHAPES)


@every_shape
def test_every_request_ends_once_with_all_its_tokens_and_stages_that_add_up(setup) -> None:
    arrivals = workload.requests("chat", 120, rate=8.0, seed=3, scale_lengths=0.2)
    outcomes, result = run(setup, arrivals)
    assert [outcome.number for outcome in outcomes] == list(range(120))
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        assert outcome.end is End.FINISHED
        assert outcome.output_tokens == arrival.output_tokens
        assert outcome.arrived_s == arrival.time_s
        assert sum(astuple(outcome.stages)) == pytest.approx(outcome.e2e_s)
        assert 0 < outcome.ttft_s <= outcome.e2e_s
        assert outcome.worst_gap_s <= outcome.e2e_s - outcome.ttft_s + 1e-9
    assert result.itl.total == sum(outcome.output_tokens - 1 for outcome in outcomes)
    assert result.duration_s == pytest.approx(max(o.arrived_s + o.e2e_s for o in outcomes), abs=0.01)
    assert sum(pool.tokens_generated for pool in result.pools) == sum(arrival.output_tokens for arrival in arrivals)


@every_shape
def test_the_same_seed_tells_the_same_story(setup) -> None:
    arrivals = workload.requests("code", 100, rate=20.0, seed=5, scale_lengths=0.3)
    first, second = run(setup, arrivals), run(setup, arrivals)
    # NaN, where no token came, is not equal to itself.
    assert repr(first[0]) == repr(second[0])
    assert first[1].pools == second[1].pools
    assert first[1].itl.counts == second[1].itl.counts
    assert math.isfinite(first[1].duration_s)
