"""The way of KV between virtual workers: lanes are shared evenly, chunks are read early, tokens are accounted for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_cluster import cluster, cost_model, ends_on

from baton.capacity.cost import RoutingCost, TransferCost
from baton.capacity.outcome import End, RequestOutcome, RunOutcome
from baton.capacity.simulate import simulate
from baton.capacity.virtual_handoff import Lane
from baton.capacity.virtual_loop import VirtualLoop
from baton.capacity.workload import Arrival
from baton.proto.messages import Role
from baton.router.config import RouterSettings


def ends_of(reads: list[tuple[float, float]]) -> list[float]:
    """When reads (start, seconds alone) end, by a lane."""
    loop = VirtualLoop()
    lane = Lane(loop)
    return ends_on(loop, [(start_s, partial(lane.read, alone_s)) for start_s, alone_s in reads])


def slow_ends_of(reads: list[tuple[float, float]]) -> list[float]:
    """The same, from one start or end to the next."""
    left, ends, now = [alone_s for _, alone_s in reads], [-1.0] * len(reads), 0.0
    while any(end < 0 for end in ends):
        active = [i for i, (start_s, _) in enumerate(reads) if start_s <= now and ends[i] < 0]
        starts = [start_s - now for start_s, _ in reads if start_s > now]
        finish = min((left[i] * len(active) for i in active), default=float("inf"))
        pause = min([finish, *starts])
        for i in active:
            left[i] -= pause / len(active)
        now += pause
        for i in active:
            if left[i] <= 1e-12:
                ends[i] = now
    return ends


def test_two_reads_at_once_take_twice_as_long_and_one_that_comes_later_waits_for_nobody() -> None:
    assert ends_of([(0.0, 1.0), (0.0, 1.0)]) == pytest.approx([2.0, 2.0])
    assert ends_of([(0.0, 2.0), (1.0, 0.5)]) == pytest.approx([2.5, 2.0])


times = st.integers(0, 40).map(lambda tick: tick / 8)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(times, st.integers(1, 40).map(lambda tick: tick / 16)), min_size=1, max_size=10))
def test_reads_of_a_lane_share_it_evenly(reads: list[tuple[float, float]]) -> None:
    assert ends_of(reads) == pytest.approx(slow_ends_of(reads))


def run(setup, arrivals, cost) -> tuple[list[RequestOutcome], RunOutcome]:
    outcomes: list[RequestOutcome] = []
    result = simulate(setup, cost, arrivals, 1, sink=outcomes.append)
    assert all(outcome.end is End.FINISHED for outcome in outcomes)
    return sorted(outcomes, key=lambda outcome: outcome.number), result


def test_chunks_are_read_while_the_prompt_is_still_computed() -> None:
    """1,600 tokens in 7 chunks of 256: six are read behind the computation of the next, only the last one is waited
    for. Each step takes 10 ms + 0.1 ms a token, each read 1 ms + 0.5 ms a block, a message 1 ms."""
    transfer = TransferCost(start_s=0.001, byte_s=0.0005 / 1600, control_s=0.002)
    setup = cluster(prefill=1, decode=1, kv_bytes_per_token=100)
    (outcome,), result = run(setup, [Arrival(0.0, 1600, 5, 0)], cost_model(transfer, RoutingCost()))
    assert outcome.ttft_s == pytest.approx(7 * 0.010 + 1600 * 1e-4)
    assert outcome.stages.handoff_wait == 0
    # The last chunk: 64 tokens, so 4 blocks, then the question and its answer.
    assert outcome.stages.handoff_transfer == pytest.approx(0.001 + 4 * 0.0005 + 0.002)
    decode = next(pool for pool in result.pools if pool.role is Role.DECODE)
    assert decode.handoff_bytes == 1600 * 100
    assert decode.handoff_s == pytest.approx(7 * 0.001 + 100 * 0.0005)


def test_a_busy_decode_worker_has_found_blocks_when_the_only_chunk_of_a_prompt_is_there() -> None:
    """It takes in what it hears between its steps of 10 ms, and the prompt's one step takes 10 ms + 16: it has heard of
    the beginning by then, so the read begins when the chunk's notice has come, half a round trip later."""
    transfer = TransferCost(start_s=0.001, byte_s=0.0, control_s=0.002)
    setup = cluster(prefill=1, decode=1, kv_bytes_per_token=100)
    arrivals = [Arrival(0.0, 16, 200, 0), Arrival(0.5, 160, 5, 1), Arrival(0.903, 160, 5, 2)]
    (_, *others), _ = run(setup, arrivals, cost_model(transfer, RoutingCost()))
    for outcome in others:
        assert outcome.stages.handoff_wait == pytest.approx(0.0, abs=1e-9)
        assert outcome.stages.handoff_transfer == pytest.approx(0.001 + 0.002)


def test_what_the_decode_worker_has_cached_is_not_read_again() -> None:
    setup = cluster(prefill=1, decode=1, kv_bytes_per_token=100)
    arrivals = [Arrival(0.0, 800, 5, session=1), Arrival(9.0, 1200, 5, session=1, prefix_tokens=800)]
    (first, second), result = run(setup, arrivals, cost_model())
    assert (first.cached_tokens, second.cached_tokens) == (0, 800)
    prefill, decode = result.pools
    assert prefill.prompt_tokens_computed == 1200
    assert decode.handoff_bytes == 1200 * 100


def test_a_lease_that_nobody_fetches_in_time_ends_and_the_request_is_tried_again() -> None:
    """Late binding with a decode worker that is full for longer than the lease."""
    setup = cluster(prefill=1, decode=1, max_num_seqs=1, router=RouterSettings(binding="late", max_retries=50))
    setup = replace(setup, lease_s=0.5)
    outcomes, _ = run(setup, [Arrival(0.0, 64, 400, 0), Arrival(0.1, 64, 5, 1)], cost_model())
    assert outcomes[0].retries == 0
    assert outcomes[1].retries > 0
