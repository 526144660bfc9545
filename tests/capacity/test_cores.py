"""Processes that share cores: work slows down when there is more of it than cores, none is lost, and ends move."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_cluster import cluster, cost_model, ends_on

from baton.capacity import workload
from baton.capacity.cores import Cores, CoreSpeed, shared_cores
from baton.capacity.cost import CoreCost, Jitter
from baton.capacity.events import RoleChanges, WorkerDrains, WorkerFails
from baton.capacity.outcome import End, RequestOutcome, RunOutcome
from baton.capacity.simulate import SetupError, simulate
from baton.capacity.virtual_loop import VirtualLoop
from baton.capacity.workload import Arrival
from baton.proto.messages import Role
from baton.scheduler.plan import Step

Task = tuple[float, float, int]
"""Start, seconds alone, threads."""


def cores_of(loop: VirtualLoop, cores: float, crowded_speed: float = 1.0) -> Cores:
    return Cores(loop, cores, replace(cost_model(), cores=CoreCost(crowded_speed=crowded_speed)))


def ends_of(tasks: list[Task], cores: float, crowded_speed: float = 1.0) -> list[float]:
    loop = VirtualLoop()
    machine = cores_of(loop, cores, crowded_speed)
    return ends_on(loop, [(start_s, partial(machine.run, alone_s, threads)) for start_s, alone_s, threads in tasks])


def slow_ends_of(tasks: list[Task], cores: float, crowded_speed: float) -> list[float]:
    """The same, from one start or end to the next."""
    speed = CoreSpeed(cores, crowded_speed)
    left = [alone_s * speed.on_own_cores(threads) for _, alone_s, threads in tasks]
    ends, now = [-1.0] * len(tasks), 0.0
    while any(end < 0 for end in ends):
        active = [i for i, task in enumerate(tasks) if task[0] <= now and ends[i] < 0]
        pace = speed.at(sum(tasks[i][2] for i in active)) if active else 1.0
        starts = [task[0] - now for task in tasks if task[0] > now]
        pause = min([*(left[i] / pace for i in active), *starts])
        for i in active:
            left[i] -= pause * pace
        now += pause
        for i in active:
            if left[i] <= 1e-12:
                ends[i] = now
    return ends


times = st.integers(0, 40).map(lambda tick: tick / 8)
tasks_at_times = st.lists(
    st.tuples(times, st.integers(1, 40).map(lambda tick: tick / 16), st.integers(1, 3)), min_size=1, max_size=8
)
numbers_of_cores = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 8.0])


def test_two_at_once_on_one_core_take_twice_as_long_and_two_on_two_cores_do_not() -> None:
    assert ends_of([(0.0, 1.0, 1), (0.0, 1.0, 1)], 1.0) == pytest.approx([2.0, 2.0])
    assert ends_of([(0.0, 1.0, 1), (0.0, 1.0, 1)], 2.0) == pytest.approx([1.0, 1.0])
    assert ends_of([(0.0, 1.0, 2), (0.0, 1.0, 1)], 2.0) == pytest.approx([1.5, 1.5])


def test_an_end_moves_back_when_another_begins_and_forward_again_when_it_ends() -> None:
    # Alone until 1, half as fast until the other has had its half second at 2, alone again for the rest.
    assert ends_of([(0.0, 2.0, 1), (1.0, 0.5, 1)], 1.0) == pytest.approx([2.5, 2.0])


def test_a_busy_neighbour_slows_a_core_that_one_has_for_oneself() -> None:
    assert ends_of([(0.0, 1.0, 1)], 2.0, 0.8) == pytest.approx([1.0])
    assert ends_of([(0.0, 0.8, 1), (0.0, 0.8, 1)], 2.0, 0.8) == pytest.approx([1.0, 1.0])
    # Two threads that belong together were measured together.
    assert ends_of([(0.0, 1.0, 2)], 2.0, 0.8) == pytest.approx([1.0])


@settings(max_examples=200, deadline=None)
@given(tasks_at_times, numbers_of_cores, st.sampled_from([1.0, 0.7]))
def test_all_that_computes_shares_the_cores_fairly(tasks: list[Task], cores: float, crowded_speed: float) -> None:
    assert ends_of(tasks, cores, crowded_speed) == pytest.approx(slow_ends_of(tasks, cores, crowded_speed))


@settings(max_examples=200, deadline=None)
@given(tasks_at_times, numbers_of_cores)
def test_no_work_is_lost_or_made(tasks: list[Task], cores: float) -> None:
    """While so much is wanted that all cores are busy, they do `cores` seconds of work a second: the last end is when
    the work of the busy time is done."""
    together = [(0.0, alone_s, max(threads, int(cores) + 1)) for _, alone_s, threads in tasks]
    work_s = sum(alone_s * threads for _, alone_s, threads in together)
    assert max(ends_of(together, cores)) == pytest.approx(work_s / cores)


@settings(max_examples=100, deadline=None)
@given(tasks_at_times)
def test_with_a_core_for_each_thread_nothing_waits(tasks: list[Task]) -> None:
    assert ends_of(tasks, 24.0) == pytest.approx([start_s + alone_s for start_s, alone_s, _ in tasks])


def test_work_of_a_process_that_dies_leaves_its_core_to_others() -> None:
    loop, ends = VirtualLoop(), []
    machine = cores_of(loop, 1.0)
    dying = machine.run(5.0, 1, lambda: ends.append(-1.0))
    machine.run(2.0, 1, lambda: (ends.append(loop.time()), loop.stop()))
    loop.at(1.0, lambda: (machine.drop(dying), machine.drop(dying)))
    loop.run()
    assert ends == pytest.approx([2.5])


def test_router_and_client_do_one_thing_at_a_time_each_whatever_piles_up() -> None:
    loop, ends = VirtualLoop(), []
    machine = cores_of(loop, 1.0)
    for _ in range(10):
        machine.spend(0.3)
    machine.run(1.0, 1, lambda: ends.append(loop.time()))
    loop.at(4.0, lambda: machine.run(0.5, 1, lambda: (ends.append(loop.time()), loop.stop())))
    loop.run()
    # A third of the core until it has its second at 3.0, when 2.0 of 3.0 s are said; all is at 4.0.
    assert ends == pytest.approx([3.0, 4.5])


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_machine_is_shared_where_workers_router_and_client_want_more_threads_than_it_has_cores(
    num_cores: int, threads: int
) -> None:
    assert shared_cores(num_cores, threads) == (num_cores if threads + 2 > num_cores else None)


# --- clusters -------------------------------------------------------------------------------------------------------

BUSY = CoreCost(request_cpu_s=0.004, step_cpu_s=0.001, token_cpu_s=0.0007, crowded_speed=0.8)
SCATTER = Jitter((0.7, 0.9, 1.0, 1.1, 1.7), (0.8, 1.0, 1.5))
SHAPES = {"co-located": cluster(colocated=2), "1P1D": cluster(prefill=1, decode=1), "2P3D": cluster(2, 3)}
every_shape = pytest.mark.parametrize("setup", SHAPES.values(), ids=SHAPES)


def run(setup, arrivals, cost, seed=1, events=()) -> tuple[list[RequestOutcome], RunOutcome]:
    outcomes: list[RequestOutcome] = []
    result = simulate(setup, cost, arrivals, seed, events, outcomes.append)
    return sorted(outcomes, key=lambda outcome: outcome.number), result


@every_shape
def test_with_a_core_for_everybody_the_outcome_is_that_of_cores_of_their_own(setup) -> None:
    arrivals = workload.requests("chat", 120, rate=8.0, seed=3, scale_lengths=0.2)
    cost = replace(cost_model(), cores=replace(BUSY, crowded_speed=1.0), jitter=SCATTER)
    apart, of_apart = run(setup, arrivals, cost)
    together, of_together = run(replace(setup, shared_cores=1000.0), arrivals, cost)
    for one, other in zip(apart, together, strict=True):
        assert (one.output_tokens, one.end, one.cached_tokens) == (other.output_tokens, other.end, other.cached_tokens)
        assert (one.ttft_s, one.e2e_s, one.worst_gap_s) == pytest.approx((other.ttft_s, other.e2e_s, other.worst_gap_s))
    for pool, twin in zip(of_apart.pools, of_together.pools, strict=True):
        assert pool.steps == twin.steps
        assert pool.busy_s == pytest.approx(twin.busy_s)


def test_two_busy_workers_on_one_core_take_twice_as_long_for_each_step() -> None:
    """Both decode all the time, one sequence each: 10.1 ms a step alone."""
    cost, times = cost_model(), {"colocated-0": [], "colocated-1": []}

    def listener(worker_id: str, step: Step, now: float) -> None:
        if step.work().decode_sequences:
            times[worker_id].append(now)

    arrivals = [Arrival(0.0, 8, 200, 0), Arrival(0.0, 8, 200, 1)]
    simulate(replace(cluster(colocated=2), shared_cores=1.0), cost, arrivals, 1, listener=listener)
    for starts in times.values():
        gaps = [after - before for before, after in pairwise(starts[2:101])]
        assert gaps == pytest.approx([2 * 0.0101] * 98)


@every_shape
def test_fewer_cores_never_make_a_run_shorter_and_every_request_still_ends_with_its_tokens(setup) -> None:
    arrivals = workload.requests("chat", 100, rate=8.0, seed=4, scale_lengths=0.2)
    cost = replace(cost_model(), cores=BUSY)
    means = []
    for cores in (None, 4.0, 2.0, 1.0):
        outcomes, _ = run(replace(setup, shared_cores=cores), arrivals, cost)
        assert [outcome.output_tokens for outcome in outcomes] == [arrival.output_tokens for arrival in arrivals]
        assert all(outcome.end is End.FINISHED for outcome in outcomes)
        assert all(sum(astuple(outcome.stages)) == pytest.approx(outcome.e2e_s) for outcome in outcomes)
        means.append(sum(outcome.e2e_s for outcome in outcomes))
    assert means == sorted(means)


def test_router_and_client_take_time_from_the_steps() -> None:
    """A lone sequence on one core: each step of 10.1 ms shares it with 2 ms that the step before had to say."""
    cost = replace(cost_model(), cores=CoreCost(step_cpu_s=0.0015, token_cpu_s=0.0005))
    setup = replace(cluster(colocated=1), shared_cores=1.0)
    (outcome,), _ = run(setup, [Arrival(0.0, 8, 101, 0)], cost)
    assert outcome.tpot_s == pytest.approx(0.0101 + 0.002)


def test_what_a_request_gives_router_and_client_to_do_takes_time_from_its_first_step() -> None:
    setup = replace(cluster(colocated=1), shared_cores=1.0)
    arrivals = [Arrival(0.0, 256, 1, 0)]
    (idle,), _ = run(setup, arrivals, cost_model())
    # It is in the worker's inbox 2 ms after its arrival, when 1 ms of 3 is left.
    (busy,), _ = run(setup, arrivals, replace(cost_model(), cores=CoreCost(request_cpu_s=0.003)))
    assert busy.ttft_s == pytest.approx(idle.ttft_s + 0.001)


def test_a_worker_that_dies_within_a_step_leaves_the_cores_to_the_other() -> None:
    """Two prompts of 35.6 ms each begin together; 10 ms later, of which each had half, one is alone."""
    setup = replace(cluster(colocated=2), shared_cores=1.0)
    arrivals = [Arrival(0.0, 256, 1, number) for number in range(2)]
    outcomes, _ = run(setup, arrivals, cost_model(), events=(WorkerFails(0.012, "colocated-0"),))
    assert min(outcome.ttft_s for outcome in outcomes) == pytest.approx(0.012 + (0.0356 - 0.005) + 0.003)
    assert sorted(outcome.retries for outcome in outcomes) == [0, 1]


def test_the_same_seed_tells_the_same_story_with_workers_that_die_and_change_on_shared_cores() -> None:
    events = (
        WorkerFails(1.0, "decode-0", back_after_s=2.0),
        RoleChanges(2.0, "prefill-1", Role.DECODE, change_s=0.1),
        WorkerDrains(3.0, "decode-1"),
        WorkerFails(4.0, "prefill-0", back_after_s=1.0),
    )
    arrivals = workload.requests("code", 100, rate=20.0, seed=5, scale_lengths=0.3)
    cost = replace(cost_model(), cores=BUSY, jitter=SCATTER)
    setup = replace(cluster(2, 3), shared_cores=2.0)
    first, second = (run(setup, arrivals, cost, 3, events) for _ in range(2))
    assert repr(first[0]) == repr(second[0])
    assert first[1].pools == second[1].pools
    assert len(first[0]) == 100
    other = run(setup, arrivals, cost, 4, events)
    assert repr(first[0]) != repr(other[0])


@pytest.mark.parametrize("cores", [0.0, -1.0, float("inf"), float("nan")])
def test_a_machine_without_cores_is_refused(cores: float) -> None:
    with pytest.raises(SetupError, match=rf"shared_cores is {cores}, must be above 0 and finite"):
        simulate(replace(cluster(colocated=1), shared_cores=cores), cost_model(), [], 1)
