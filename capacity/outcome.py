"""What came of a run: of each request, of each pool, of the whole. Simulated and live runs tell it in the same words.

Owns: the records that backends make and that `sweep`, `plan` and `report` read, and what an objective (`Slo`) means.
Refuses to know: how a run was made.

    TTFT  first token's arrival minus send          TPOT  (E2E - TTFT) / (output tokens - 1), only above one token
    E2E   last token's arrival minus send           ITL   each gap between two token messages, of all requests
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from baton.proto.messages import Role
from baton.proto.value import value


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds; infinite: no bound."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


class End(StrEnum):
    FINISHED = "finished"
    REFUSED = "refused"
    DEADLINE = "deadline"
    FAILED = "failed"


@value
class Stages:
    """Seconds of each stage of one request, as in the timeline that clients get; they add up to its E2E."""

    router_wait: float = 0.0
    prefill_queue: float = 0.0
    prefill_compute: float = 0.0
    handoff_wait: float = 0.0
    handoff_transfer: float = 0.0
    decode_admission: float = 0.0
    decode: float = 0.0
    retry: float = 0.0


@value
class RequestOutcome:
    """One request. `number` is its position among the arrivals; times count from the start of the run, in seconds.

    `output_tokens` are those that came. `ttft_s` and `e2e_s` are NaN if no token came. `worst_gap_s`: the longest time
    between two of its token messages.
    """

    number: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    end: End
    ttft_s: float = math.nan
    e2e_s: float = math.nan
    worst_gap_s: float = 0.0
    stages: Stages = field(default_factory=Stages)
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    retries: int = 0
    reason: str = ""

    @property
    def tpot_s(self) -> float:
        """NaN for fewer than two tokens."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    def meets(self, slo: Slo) -> bool:
        """Whether it finished within both bounds. A TPOT that is not there is met."""
        if self.end is not End.FINISHED or not self.ttft_s <= slo.ttft_s:
            return False
        return self.output_tokens < 2 or self.tpot_s <= slo.tpot_s


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """One pool over the whole run. `busy_s` sums the time in steps over its workers.

    `kv_usage` and `queued_tokens` are means over time: the share of blocks held, and prompt tokens that wait.
    `handoff_bytes` were pulled in `handoff_s` of transfer time, both summed over hand-offs.
    """

    name: str
    role: Role
    workers: int
    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    tokens_recomputed: int = 0
    preemptions: int = 0
    kv_usage: float = 0.0
    queued_tokens: float = 0.0
    handoff_bytes: int = 0
    handoff_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A whole run. `duration_s` ends with the last request's end; `itl` pools all gaps between token messages."""

    duration_s: float
    pools: tuple[PoolOutcome, ...]
    itl: Histogram
    role_changes: tuple[RoleChange, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker that became another role; `drain_s` of `total_s` it waited for its requests to end or move."""

    worker_id: str
    before: Role
    after: Role
    at_s: float
    drain_s: float
    total_s: float


class Histogram:
    """Durations in buckets that each are 2 % wide: any number of them in the same memory. Quantiles err by 1 %."""

    _LOWEST_S, _RATIO = 1e-6, 1.02
    _LOG_RATIO = math.log(_RATIO)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0

    def add(self, seconds: float, times: int = 1) -> None:
        """Counts a duration, `times` over. What is below a microsecond counts as one."""
        lowest_s = self._LOWEST_S
        bucket = math.ceil(math.log(seconds / lowest_s) / self._LOG_RATIO) if seconds > lowest_s else 0
        self.counts[bucket] = self.counts.get(bucket, 0) + times
        self.total += times

    def quantile(self, fraction: float) -> float:
        """The duration that `fraction` of those counted do not exceed; NaN if there are none."""
        if not self.total:
            return math.nan
        left = fraction * self.total
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                break
        return float(self._LOWEST_S * self._RATIO ** (bucket - 0.5)) if bucket else self._LOWEST_S
