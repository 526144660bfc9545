"""What befalls a simulated cluster: workers fail, drain, change roles, and no request is lost or altered by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_cluster import cluster, cost_model

from baton.capacity import workload
from baton.capacity.events import ClusterEvent, PoolResizes, RoleChanges, WorkerDrains, WorkerFails
from baton.capacity.outcome import End, RequestOutcome, RunOutcome
from baton.capacity.simulate import SetupError, _Cluster, _Run, simulate
from baton.capacity.workload import Arrival
from baton.proto.messages import Role
from baton.proto.settings import SchedulerSettings
from baton.router.config import RouterSettings

ARRIVALS = workload.requests("chat", 120, rate=12.0, seed=2, scale_lengths=0.2)


def run(setup, arrivals=ARRIVALS, events=()) -> tuple[list[RequestOutcome], RunOutcome]:
    """Also asserts that nothing is held when all is over, and that every worker's books agree."""
    outcomes: list[RequestOutcome] = []
    whole = _Cluster(setup, cost_model(), 1, None)
    ran = _Run(whole, iter(arrivals), events, outcomes.append)
    ran._expect_next()
    whole.loop.run()
    whole.loop.at(whole.loop.time() + 2 * setup.lease_s, whole.loop.stop)
    whole.loop.run()
    whole.loop.close()
    for seat in whole._seats.values():
        if seat.worker is not None:
            seat.worker.scheduler.check()
            load = seat.worker.scheduler.load()
            held = (load.running, load.waiting, load.receiving, load.exported, load.held_blocks, load.lent_blocks)
            assert held == (0,) * 6, (seat.worker_id, load)
            assert load.quarantined_blocks == 0
            assert not seat.worker._legs
    whole.router.book.check()
    assert whole.router.book.in_flight == 0
    outcome = RunOutcome(ran._last_end_s, whole.pools(), whole.itl, tuple(whole.role_changes))
    return sorted(outcomes, key=lambda each: each.number), outcome


def assert_all_finished(outcomes: list[RequestOutcome], arrivals=ARRIVALS) -> None:
    assert [outcome.number for outcome in outcomes] == list(range(len(arrivals)))
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        assert outcome.end is End.FINISHED, outcome
        assert outcome.output_tokens == arrival.output_tokens


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-1"])
def test_the_requests_of_a_worker_that_dies_go_on_elsewhere(worker_id: str) -> None:
    arrivals = workload.requests("chat", 120, rate=40.0, seed=2, scale_lengths=0.2)
    outcomes, _ = run(cluster(prefill=2, decode=2), arrivals, [WorkerFails(1.5, worker_id)])
    assert_all_finished(outcomes, arrivals)
    assert any(outcome.retries for outcome in outcomes)
    assert all(outcome.stages.retry > 0 for outcome in outcomes if outcome.retries)


def test_a_request_that_moves_keeps_the_time_of_its_first_token_and_shows_the_gap() -> None:
    arrival = Arrival(0.0, 100, 200, 0)
    (undisturbed,), _ = run(cluster(colocated=2), [arrival])
    (moved,), _ = run(cluster(colocated=2), [arrival], [WorkerFails(0.5, "colocated-0")])
    assert moved.retries == 1
    assert moved.ttft_s == undisturbed.ttft_s
    assert moved.e2e_s > undisturbed.e2e_s
    assert moved.worst_gap_s > undisturbed.worst_gap_s
    assert moved.recomputed_tokens > 0


def test_a_worker_that_is_back_serves_again() -> None:
    setup = cluster(prefill=1, decode=1)
    outcomes, result = run(setup, events=[WorkerFails(2.0, "decode-0", back_after_s=1.0)])
    assert_all_finished(outcomes)
    assert result.duration_s > 3.0


def test_without_a_worker_of_a_role_requests_fail_when_its_time_of_grace_is_over() -> None:
    setup = cluster(prefill=1, decode=1, router=RouterSettings(no_worker_grace_s=0.5))
    outcomes, _ = run(setup, events=[WorkerFails(2.0, "decode-0")])
    ends = {outcome.end for outcome in outcomes}
    assert ends == {End.FINISHED, End.FAILED}
    failed = [outcome for outcome in outcomes if outcome.end is End.FAILED]
    assert all("worker" in outcome.reason for outcome in failed)
    assert all(outcome.output_tokens < ARRIVALS[outcome.number].output_tokens for outcome in failed)


def test_a_drained_worker_ends_its_requests_and_nobody_tries_again() -> None:
    outcomes, _ = run(
        cluster(prefill=2, decode=2), events=[WorkerDrains(4.0, "decode-0"), WorkerDrains(4.0, "prefill-1")]
    )
    assert_all_finished(outcomes)
    assert not any(outcome.retries for outcome in outcomes)


def test_what_a_drained_worker_has_not_ended_in_time_moves() -> None:
    setup = cluster(prefill=1, decode=2, router=RouterSettings(drain_timeout_s=0.1))
    outcomes, _ = run(setup, events=[WorkerDrains(4.0, "decode-0")])
    assert_all_finished(outcomes)
    assert any(outcome.retries for outcome in outcomes)


def test_a_worker_that_changes_its_role_serves_in_the_other() -> None:
    setup = cluster(prefill=3, decode=1)
    change = RoleChanges(2.0, "prefill-2", Role.DECODE, change_s=0.25)
    outcomes, result = run(setup, events=[change])
    assert_all_finished(outcomes)
    (told,) = result.role_changes
    assert (told.worker_id, told.before, told.after, told.at_s) == ("prefill-2", Role.PREFILL, Role.DECODE, 2.0)
    assert told.total_s == pytest.approx(told.drain_s + 0.25)
    changed = next(pool for pool in result.pools if pool.name == "prefill as decode")
    assert changed.workers == 1
    assert changed.tokens_generated > 0
    assert changed.handoff_bytes > 0


def test_a_pool_that_grows_and_shrinks_loses_nothing() -> None:
    setup = cluster(prefill=1, decode=1)
    events = [
        PoolResizes(1.0, "prefill", 3, start_s=0.5),
        PoolResizes(1.0, "decode", 2),
        PoolResizes(6.0, "prefill", 1),
    ]
    outcomes, result = run(setup, events=events)
    assert_all_finished(outcomes)
    assert {pool.name: pool.workers for pool in result.pools} == {"prefill": 1, "decode": 2}


ids = st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1", "colocated-0"])
instants = st.integers(0, 900).map(lambda tick: tick / 100)
befallings: st.SearchStrategy[ClusterEvent] = st.one_of(
    st.builds(WorkerFails, instants, ids, st.sampled_from([0.0, 0.4, 2.0])),
    st.builds(RoleChanges, instants, ids, st.sampled_from(Role), st.sampled_from([0.0, 0.3])),
    st.builds(PoolResizes, instants, st.sampled_from(["prefill", "decode"]), st.integers(1, 3)),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(befallings, max_size=4), st.booleans())
def test_whatever_befalls_every_request_ends_once_and_nothing_stays_held(
    events: list[ClusterEvent], late: bool
) -> None:
    """One co-located worker always remains, or comes back, unless its role changes; requests may then fail."""
    router = RouterSettings(binding="late" if late else "early", drain_timeout_s=0.5, no_worker_grace_s=3.0)
    arrivals = ARRIVALS[:60]
    outcomes, _ = run(cluster(2, 2, 1, router=router), arrivals, events)
    assert [outcome.number for outcome in outcomes] == list(range(len(arrivals)))
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        if outcome.end is End.FINISHED:
            assert outcome.output_tokens == arrival.output_tokens
        else:
            assert outcome.end is End.FAILED
            assert outcome.output_tokens < arrival.output_tokens


def test_a_deadline_ends_a_request_with_the_tokens_that_had_come() -> None:
    setup = cluster(prefill=1, decode=1, router=RouterSettings(request_timeout_s=1.0))
    (outcome,), result = run(setup, [Arrival(0.0, 64, 500, 0)])
    assert outcome.end is End.DEADLINE
    assert 50 < outcome.output_tokens < 500
    assert outcome.e2e_s == pytest.approx(1.0, abs=0.02)
    assert result.duration_s == 1.0


def test_a_full_queue_and_a_prompt_that_never_fits_are_refused() -> None:
    setup = cluster(colocated=1, router=RouterSettings(max_queued_requests=3))
    arrivals = [Arrival(0.0, 200, 20, number) for number in range(30)] + [Arrival(60.0, 8000, 900, 99)]
    outcomes, _ = run(setup, arrivals)
    refused = [outcome for outcome in outcomes if outcome.end is End.REFUSED]
    assert len(refused) > 5
    assert "requests are waiting" in refused[0].reason
    assert "max_model_len 8192" in outcomes[-1].reason
    assert refused[0].output_tokens == 0
    assert refused[0].ttft_s != refused[0].ttft_s


IMPOSSIBLE = {
    "pairs": (replace(cluster(1, 1), pools=cluster(1, 1).pools[:1]), "1 prefill workers and no decode worker"),
    "nobody": (replace(cluster(1, 1), pools=()), "no pool has a worker"),
    "size": (cluster(colocated=-1), "pool colocated: size is -1, must be at least 0"),
    "blocks": (cluster(colocated=1, num_blocks=0), "num_blocks is 0, must be at least 1"),
    "length": (replace(cluster(colocated=1), max_model_len=0), "max_model_len is 0"),
    "policy": (cluster(colocated=1, router=RouterSettings(policy="best")), "no placement policy 'best'"),
}


@pytest.mark.parametrize(("setup", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_cluster_that_cannot_be_is_refused_by_name_value_and_bound(setup, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(setup, cost_model(), ARRIVALS, 1)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (WorkerFails(1.0, "decode-9"), "worker_id is 'decode-9', there are colocated-0"),
        (WorkerFails(-1.0, "colocated-0"), "at_s is -1.0, must be at least 0"),
        (WorkerFails(1.0, "colocated-0", float("nan")), "back_after_s is nan"),
        (RoleChanges(1.0, "colocated-0", Role.DECODE, -2.0), "change_s is -2.0"),
        (PoolResizes(1.0, "decode", 2), "pool is 'decode', there are colocated"),
        (PoolResizes(1.0, "colocated", -2), "size is -2"),
    ],
)
def test_an_event_that_cannot_be_is_refused(event: ClusterEvent, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        simulate(cluster(colocated=1), cost_model(), ARRIVALS, 1, [event])


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ([Arrival(2.0, 10, 1, 0), Arrival(1.0, 10, 1, 1)], "arrival 1: time_s is 1.0, must be .* at least"),
        ([Arrival(float("nan"), 10, 1, 0)], "arrival 0: time_s is nan"),
        ([Arrival(0.0, 0, 1, 0)], "arrival 0: 0 prompt and 1 output tokens"),
    ],
)
def test_an_arrival_that_cannot_be_ends_the_run(arrivals: list[Arrival], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        simulate(cluster(colocated=1), cost_model(), arrivals, 1)


def test_nothing_to_do_takes_no_time() -> None:
    result = simulate(cluster(1, 1), cost_model(), [], 1)
    assert result.duration_s == 0
    assert [pool.steps for pool in result.pools] == [0, 0]


def test_settings_of_the_scheduler_reach_it() -> None:
    setup = cluster(colocated=1)
    narrow = replace(setup.pools[0], scheduler=SchedulerSettings(max_num_batched_tokens=32, max_num_seqs=64))
    steps = [
        simulate(replace(setup, pools=(pool,)), cost_model(), [Arrival(0, 320, 1, 0)], 1).pools[0].steps
        for pool in (setup.pools[0], narrow)
    ]
    assert steps == [2, 10]
