"""A simulated run: every request ends once, its times add up, and the same seed tells the same story."""

from __future__ import annotations

import gc
import math
from dataclasses import astuple, replace

import pytest
from virtual_cluster import cluster, cost_model

from baton.capacity import workload
from baton.capacity.cost import Jitter
from baton.capacity.events import RoleChanges, WorkerDrains, WorkerFails
from baton.capacity.outcome import End, RequestOutcome, RunOutcome
from baton.capacity.simulate import SetupError, simulate
from baton.capacity.workload import Arrival
from baton.proto.messages import Role
from baton.router.config import RouterSettings
from baton.scheduler.plan import Step


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


EVENTS = (
    WorkerFails(1.0, "decode-0", back_after_s=2.0),
    RoleChanges(2.0, "prefill-1", Role.DECODE, change_s=0.1),
    WorkerDrains(3.0, "decode-1"),
    WorkerFails(4.0, "prefill-0", back_after_s=1.0),
)
IN_HASTE = RouterSettings(request_timeout_s=1.5)
LISTENED_TO = {
    "co-located, with chunks": (cluster(colocated=2, max_num_batched_tokens=48), "chat", 0.2, ()),
    "co-located, preempting": (cluster(colocated=1, num_blocks=130), "random:100/900", 1.0, ()),
    "1P1D, preempting": (cluster(1, 1, num_blocks=130), "random:100/900", 1.0, ()),
    "sessions": (cluster(1, 1), "long-chat", 0.05, ()),
    "events": (cluster(2, 3), "chat", 0.3, EVENTS),
    "deadlines": (cluster(1, 1, router=IN_HASTE), "chat", 0.3, ()),
}


@pytest.mark.parametrize(("setup", "mix", "scale", "events"), LISTENED_TO.values(), ids=LISTENED_TO)
def test_nothing_comes_out_differently_when_every_chunk_is_seen(setup, mix, scale, events) -> None:
    arrivals = workload.requests(mix, 40, rate=20.0, seed=4, scale_lengths=scale)
    cost = replace(cost_model(), jitter=Jitter((0.8, 1.0, 1.5), (0.9, 1.2)))
    steps: list[Step] = []
    told: list[list[RequestOutcome]] = [[], []]
    unheard = simulate(setup, cost, arrivals, 1, events, told[0].append)
    heard = simulate(setup, cost, arrivals, 1, events, told[1].append, lambda name, step, now: steps.append(step))
    assert not any(step.num_in_stride for step in steps)
    assert repr(told[0]) == repr(told[1])
    assert (unheard.duration_s, unheard.pools, unheard.role_changes) == (
        heard.duration_s,
        heard.pools,
        heard.role_changes,
    )
    assert unheard.itl.counts == heard.itl.counts
    assert any(pool.preemptions for pool in unheard.pools) == (mix == "random:100/900")


def test_a_run_leaves_the_garbage_collector_as_it_was() -> None:
    before = gc.get_threshold()
    run(SHAPES["1P1D"], workload.requests("chat", 3, rate=1.0, scale_lengths=0.1))
    with pytest.raises(SetupError):
        run(cluster(colocated=1), [Arrival(1.0, 0, 1, 0)])
    assert gc.get_threshold() == before
