"""A load of requests against a running server, and what came of it.

Owns: prompts of random tokens, sending at the planned times, the measurements of each request and their summary, by the
definitions that vLLM uses:

    TTFT  first token's arrival minus send          TPOT  (E2E - TTFT) / (output tokens - 1), only above one token
    E2E   last token's arrival minus send           ITL   each gap between two token messages, of all requests
    goodput  requests a second that met every objective that was set       attainment  the share of requests that did

A request is sent when it begins to ask for a connection. What arrives without tokens (an account of usage, an end) is
no token message.

Refuses to know: where the plan comes from (`baton.capacity.workload` by way of the command line), what kind of server
answers, and how results are shown.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from baton.client.errors import BatonError


class Piece(Protocol):
    """A stretch of a prompt. Stretches of one name begin with the same tokens, as far as the shorter goes."""

    @property
    def name(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


class Planned(Protocol):
    """When to send a request of which size, and what its prompt is made of."""

    @property
    def time_s(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def pieces(self) -> Iterable[Piece]: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a plan must be fitted to. Prompts are made of the ids in `token_ids`, which are all ordinary words."""

    name: str
    max_model_len: int
    token_ids: range


@dataclass(frozen=True, slots=True)
class Message:
    """What one message of a stream tells. `num_tokens`: output tokens so far, as the server counts, which may correct
    itself at the end. `has_tokens`: some of them are in this message."""

    num_tokens: int
    has_tokens: bool


class Server(Protocol):
    async def model(self) -> ServedModel: ...

    def stream(self, prompt: Sequence[int], output_tokens: int, seed: int) -> AsyncIterator[Message]:
        """Asks for exactly that many tokens. Raises a BatonError."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to send."""

    time_s: float
    prompt: Sequence[int]
    output_tokens: int
    is_clipped: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured of one request, in seconds since the start. `error` is a status name; empty: all went well.

    `number`: its position in the plan.
    """

    planned_s: float
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    token_times_s: tuple[float, ...]
    ended_s: float
    error: str = ""
    message: str = ""
    is_other_length: bool = False
    number: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (_percentile(ordered, fraction) for fraction in (0.5, 0.9, 0.99))
        return cls(statistics.fmean(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Objectives:
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, sample: Sample) -> bool:
        """A request of one token has no TPOT, and so meets any."""
        tpot_s = sample.tpot_s
        return (self.ttft_ms is None or sample.ttft_s * 1e3 <= self.ttft_ms) and (
            self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Rates are over `duration_s`, from the first request's send to the last one's end. Latencies are in seconds.

    `goodput_per_s` and `attainment` are None without an objective, the latter also without a request. A request that
    failed met none.
    """

    num_requests: int
    num_finished: int
    num_clipped: int
    num_other_length: int
    duration_s: float
    offered_rate: float | None
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None
    goodput_per_s: float | None
    attainment: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    errors: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def jobs(plan: Sequence[Planned], model: ServedModel, seed: int) -> list[Job]:
    """Prompts of random tokens for a plan. What is longer than the model allows is cut, the output last."""
    return [_job(planned, model, seed) for planned in plan]


def _job(planned: Planned, model: ServedModel, seed: int) -> Job:
    output_tokens = min(planned.output_tokens, max(model.max_model_len // 2, 1))
    prompt_tokens = min(planned.prompt_tokens, model.max_model_len - output_tokens)
    prompt: list[int] = []
    for piece in planned.pieces:
        prompt += _words(f"{seed}/{piece.name}", min(piece.num_tokens, prompt_tokens - len(prompt)), model.token_ids)
    is_clipped = (prompt_tokens, output_tokens) != (planned.prompt_tokens, planned.output_tokens)
    return Job(planned.time_s, prompt, output_tokens, is_clipped)


def _words(seed: str, number: int, token_ids: range) -> list[int]:
    """The first `number` of an endless row of words that depends on the seed alone."""
    return random.Random(seed).choices(token_ids, k=number)


async def run(
    server: Server,
    work: Sequence[Job],
    *,
    concurrency: int | None = None,
    seed: int = 0,
    progress: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """Sends every job at its time, or as soon after it as `concurrency` allows; the samples in order of their end.

    When it is cancelled it stops sending, ends what is in progress and returns what it has.
    """
    samples: list[Sample] = []
    slots = asyncio.Semaphore(concurrency if concurrency is not None else max(len(work), 1))
    started = time.monotonic()

    async def send(number: int, job: Job) -> None:
        try:
            sample = await _measure(server, job, number, seed, started)
        finally:
            slots.release()
        samples.append(sample)
        progress(sample)

    try:
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(work):
                await asyncio.sleep(max(started + job.time_s - time.monotonic(), 0.0))
                await slots.acquire()
                group.create_task(send(number, job))
    except asyncio.CancelledError:
        pass
    return samples


async def _measure(server: Server, job: Job, number: int, seed: int, started: float) -> Sample:
    times: list[float] = []
    num_tokens = 0
    error: BatonError | None = None
    sent_s = time.monotonic() - started
    try:
        async for message in server.stream(job.prompt, job.output_tokens, seed + number):
            num_tokens = message.num_tokens
            if message.has_tokens:
                times.append(time.monotonic() - started)
    except BatonError as failure:
        error = failure
    if error is None and not times:
        error = BatonError("no token came", "EMPTY")
    return Sample(
        planned_s=job.time_s,
        sent_s=sent_s,
        prompt_tokens=len(job.prompt),
        output_tokens=num_tokens,
        token_times_s=tuple(times),
        ended_s=time.monotonic() - started,
        error=error.code if error is not None else "",
        message=error.message if error is not None else "",
        is_other_length=num_tokens != job.output_tokens,
        number=number,
    )


def summarize(work: Sequence[Job], samples: Sequence[Sample], objectives: Objectives) -> Report:
    """The report on those samples. Failed requests count in rates only as failures."""
    finished = [sample for sample in samples if not sample.error]
    start_s = min((sample.sent_s for sample in samples), default=0.0)
    duration_s = max((sample.ended_s for sample in samples), default=0.0) - start_s
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    planned_s = work[-1].time_s if work else 0.0
    good = sum(objectives.met_by(sample) for sample in finished)
    has_objectives = objectives != Objectives()
    prompt_tokens = sum(sample.prompt_tokens for sample in finished)
    output_tokens = sum(sample.output_tokens for sample in finished)
    gaps = (after - before for sample in finished for before, after in pairwise(sample.token_times_s))
    return Report(
        num_requests=len(work),
        num_finished=len(finished),
        num_clipped=sum(job.is_clipped for job in work),
        num_other_length=sum(sample.is_other_length for sample in finished),
        duration_s=duration_s,
        offered_rate=len(work) / planned_s if planned_s > 0 else None,
        requests_per_s=len(finished) * per_second,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tokens_per_s=prompt_tokens * per_second,
        output_tokens_per_s=output_tokens * per_second,
        slo_ttft_ms=objectives.ttft_ms,
        slo_tpot_ms=objectives.tpot_ms,
        goodput_per_s=good * per_second if has_objectives else None,
        attainment=good / len(samples) if has_objectives and samples else None,
        ttft=Distribution.of(sample.ttft_s for sample in finished),
        tpot=Distribution.of(sample.tpot_s for sample in finished if sample.tpot_s is not None),
        itl=Distribution.of(gaps),
        e2e=Distribution.of(sample.e2e_s for sample in finished),
        errors=dict(Counter(sample.error for sample in samples if sample.error)),
    )


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    """Linear between the two nearest ranks, as numpy and vLLM do."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
