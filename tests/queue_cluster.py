"""A cluster that is small enough to be known by heart: two lines of servers, one for prompts and one for outputs.

A prompt token takes a millisecond, an output token ten, whatever else is going on. So the capacity of each line is its
servers over the time of a request, and a sweep must find it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from baton.capacity.outcome import End, Histogram, PoolOutcome, RequestOutcome, RunOutcome, Stages
from baton.capacity.summary import Recorder, Summary
from baton.capacity.sweep import Point
from baton.proto.messages import Role

PROMPT_TOKEN_S, OUTPUT_TOKEN_S = 0.001, 0.010


def measure(point: Point) -> Summary:
    recorder = Recorder(point.slo)
    run = RunOutcome(0.0, (), Histogram())
    for outcome in outcomes(point):
        recorder.add(outcome)
        run = RunOutcome(max(run.duration_s, outcome.arrived_s + outcome.e2e_s), pools(point), run.itl)
        run.itl.add(OUTPUT_TOKEN_S, outcome.output_tokens - 1)
    return recorder.summary(run)


def outcomes(point: Point) -> Iterator[RequestOutcome]:
    sizes = {pool.role: pool.size for pool in point.setup.pools}
    readers = [0.0] * (sizes.get(Role.PREFILL) or sizes[Role.COLOCATED])
    writers = readers if Role.COLOCATED in sizes else [0.0] * sizes[Role.DECODE]
    for number, arrival in enumerate(point.traffic.arrivals(point.setup.max_model_len)):
        free_s = heapq.heappop(readers)
        started = max(free_s, arrival.time_s)
        first = started + arrival.prompt_tokens * PROMPT_TOKEN_S
        decode_s = (arrival.output_tokens - 1) * OUTPUT_TOKEN_S
        begun = first
        if writers is readers:
            heapq.heappush(readers, first + decode_s)
        else:
            heapq.heappush(readers, first)
            begun = max(heapq.heappop(writers), first)
            heapq.heappush(writers, begun + decode_s)
        yield RequestOutcome(
            number=number,
            arrived_s=arrival.time_s,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens,
            end=End.FINISHED,
            ttft_s=first - arrival.time_s,
            e2e_s=begun + decode_s - arrival.time_s,
            worst_gap_s=OUTPUT_TOKEN_S,
            stages=Stages(
                prefill_queue=started - arrival.time_s,
                prefill_compute=first - started,
                decode_admission=begun - first,
                decode=decode_s,
            ),
        )


def pools(point: Point) -> tuple[PoolOutcome, ...]:
    return tuple(PoolOutcome(pool.role.value, pool.role, pool.size) for pool in point.setup.pools)
