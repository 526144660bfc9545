"""A run in a few figures.

Owns: `Summary`, which figures there are and over which requests each is taken, and the name of the bottleneck.
Refuses to know: how a run was made, and how figures are shown.

Rates, latencies, goodput and attainment are of the requests that came in the steady window (`steady`). What is counted
per pool, and the gaps between tokens (ITL), are of the whole run. 90 bytes a request are kept until the run is over.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from baton.capacity.outcome import End, PoolOutcome, RequestOutcome, RoleChange, RunOutcome, Slo, Stages
from baton.capacity.steady import Block, Floats, Share, Steadiness, Window, blocks, share, steadiness
from baton.proto.messages import Role

_FULL = 0.8

Flags = NDArray[np.bool_]

STAGES = tuple(each.name for each in fields(Stages))
# Factors by which one bound of the objective is loosened or tightened, to see what a stricter or milder one would mean.
MARGINS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of durations in seconds; NaN where there was none."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Floats) -> Distribution:
        if not len(values):
            return cls(math.nan, math.nan, math.nan, math.nan)
        return cls(float(values.mean()), *map(float, np.quantile(values, (0.5, 0.9, 0.99))))


@dataclass(frozen=True, slots=True)
class Summary:
    """`workers`: of all pools. `tokens_per_s`: output tokens of requests that ended in the window, over its length.
    `tokens_per_s_per_user`: one over the median TPOT. `handoff_share`: of the E2E of finished requests, on average, the
    time of hand-off (wait and transfer). `by_ttft`, `by_tpot`: attainment if that bound were MARGINS times as large.
    `ended`: how all requests of the run ended. `stages`: mean seconds of finished requests.
    """

    num_requests: int
    num_in_window: int
    duration_s: float
    window: Window
    workers: int
    offered_rate: float
    achieved_rate: float
    attainment: Share
    goodput: Share
    blocks: tuple[Block, ...]
    by_ttft: tuple[float, ...]
    by_tpot: tuple[float, ...]
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    queue_wait: Distribution
    worst_gap_s: float
    stages: Stages
    steadiness: Steadiness
    tokens_per_s: float
    prompt_tokens_per_s: float
    tokens_per_s_per_user: float
    handoff_share: float
    handoff_bytes_per_s: float
    cached_share: float
    ended: dict[str, int]
    reasons: dict[str, int]
    retries: int
    pools: tuple[PoolOutcome, ...]
    role_changes: tuple[RoleChange, ...]
    bottleneck: str

    @property
    def tokens_per_s_per_worker(self) -> float:
        return self.tokens_per_s / self.workers if self.workers else math.nan

    @property
    def preemptions(self) -> int:
        return sum(pool.preemptions for pool in self.pools)

    def utilisation(self, pool: PoolOutcome) -> float:
        return pool.busy_s / (pool.workers * self.duration_s) if pool.workers and self.duration_s > 0 else math.nan


_ENDS = tuple(End)


class Recorder:
    """Takes outcomes as they come, in any order, and adds them up when the run is over."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._columns = {name: array("d") for name in ("arrived", "ttft", "e2e", "gap", *STAGES)}
        self._tokens = {name: array("l") for name in ("prompt", "output", "cached")}
        self._ends = array("b")
        self._reasons: Counter[str] = Counter()
        self._retries = 0

    def add(self, outcome: RequestOutcome) -> None:
        columns = self._columns
        columns["arrived"].append(outcome.arrived_s)
        columns["ttft"].append(outcome.ttft_s)
        columns["e2e"].append(outcome.e2e_s)
        columns["gap"].append(outcome.worst_gap_s)
        stages = outcome.stages
        for name in STAGES:
            columns[name].append(getattr(stages, name))
        self._tokens["prompt"].append(outcome.prompt_tokens)
        self._tokens["output"].append(outcome.output_tokens)
        self._tokens["cached"].append(outcome.cached_tokens)
        self._ends.append(_ENDS.index(outcome.end))
        self._retries += outcome.retries
        if outcome.end is not End.FINISHED:
            self._reasons[outcome.reason or outcome.end.value] += 1

    def summary(self, run: RunOutcome) -> Summary:
        """Raises ValueError if not one request has come."""
        if not self._ends:
            raise ValueError("a run without a request has no summary")
        columns = {name: np.frombuffer(column, dtype=np.float64) for name, column in self._columns.items()}
        order = np.argsort(columns["arrived"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
        prompt, output, cached = (np.array(self._tokens[name])[order] for name in ("prompt", "output", "cached"))
        finished = np.array(self._ends)[order] == _ENDS.index(End.FINISHED)

        arrived, ttft, e2e = columns["arrived"], columns["ttft"], columns["e2e"]
        tpot = np.where(output > 1, (e2e - ttft) / np.maximum(output - 1, 1), np.nan)
        ended = np.where(finished, arrived + e2e, np.inf)
        window = Window.of(arrived, run.duration_s)
        inside = window.holds(arrived)
        counted = inside & finished
        ended_inside = window.holds(ended)

        def good(ttft_factor: float = 1.0, tpot_factor: float = 1.0) -> Flags:
            in_time = ttft <= self._slo.ttft_s * ttft_factor
            found: Flags = finished & in_time & ((output < 2) | (tpot <= self._slo.tpot_s * tpot_factor))
            return found[inside]

        flags = good()
        cut = blocks(flags)
        attainment = share(cut)
        per_second = 1 / window.length_s
        stages = Stages(*(_mean(columns[name][counted]) for name in STAGES))
        tpots = Distribution.of(tpot[counted & (output > 1)])
        handoff = columns["handoff_wait"] + columns["handoff_transfer"]
        summary_steadiness = steadiness(arrived, ended, window)
        workers = sum(pool.workers for pool in run.pools)
        handoff_s = sum(pool.handoff_s for pool in run.pools)
        late = ~flags
        return Summary(
            num_requests=len(arrived),
            num_in_window=int(inside.sum()),
            duration_s=run.duration_s,
            window=window,
            workers=workers,
            offered_rate=inside.sum() * per_second,
            achieved_rate=ended_inside.sum() * per_second,
            attainment=attainment,
            goodput=attainment.scaled(inside.sum() * per_second),
            blocks=cut,
            by_ttft=tuple(_mean(good(ttft_factor=factor)) for factor in MARGINS),
            by_tpot=tuple(_mean(good(tpot_factor=factor)) for factor in MARGINS),
            ttft=Distribution.of(ttft[counted]),
            tpot=tpots,
            itl=Distribution(math.nan, *(run.itl.quantile(fraction) for fraction in (0.5, 0.9, 0.99))),
            e2e=Distribution.of(e2e[counted]),
            queue_wait=Distribution.of((columns["router_wait"] + columns["prefill_queue"])[counted]),
            worst_gap_s=float(columns["gap"].max()),
            stages=stages,
            steadiness=summary_steadiness,
            tokens_per_s=float(output[ended_inside].sum() * per_second),
            prompt_tokens_per_s=float(prompt[ended_inside].sum() * per_second),
            tokens_per_s_per_user=1 / tpots.p50 if tpots.p50 > 0 else math.nan,
            handoff_share=_mean((handoff / np.maximum(e2e, 1e-12))[counted]),
            handoff_bytes_per_s=sum(pool.handoff_bytes for pool in run.pools) / handoff_s if handoff_s else math.nan,
            cached_share=float(cached[counted].sum() / max(prompt[counted].sum(), 1)),
            ended={end.value: int((np.array(self._ends) == code).sum()) for code, end in enumerate(_ENDS)},
            reasons=dict(self._reasons.most_common(5)),
            retries=self._retries,
            pools=run.pools,
            role_changes=run.role_changes,
            bottleneck=_bottleneck(
                _Misses(
                    late_first=int((late & ~(ttft <= self._slo.ttft_s)[inside] & finished[inside]).sum()),
                    slow=int((late & (ttft <= self._slo.ttft_s)[inside] & finished[inside]).sum()),
                    unserved=int((~finished[inside]).sum()),
                ),
                _means(columns, inside, late, finished),
                run,
            ),
        )


@dataclass(frozen=True, slots=True)
class _Misses:
    """Requests of the window that met no objective: the first token late, the rest slow, never served."""

    late_first: int
    slow: int
    unserved: int


def _means(columns: dict[str, Floats], inside: Flags, late: Flags, finished: Flags) -> Stages:
    """The stages of those that finished and missed."""
    missed = np.flatnonzero(inside)[late]
    missed = missed[finished[missed]]
    return Stages(*(_mean(columns[name][missed]) for name in STAGES))


def _bottleneck(misses: _Misses, stages: Stages, run: RunOutcome) -> str:
    """What most of the misses waited for; where there are next to none, the pool that is busiest."""
    colocated = any(pool.role is Role.COLOCATED and pool.workers for pool in run.pools)
    reader = "co-located" if colocated else "prefill"
    writer = "co-located" if colocated else "decode"
    total = misses.late_first + misses.slow + misses.unserved
    if total == 0:
        busiest = max(run.pools, key=lambda pool: pool.busy_s / max(pool.workers, 1), default=None)
        return f"none ({busiest.name} busiest)" if busiest is not None else "none"
    if misses.unserved > max(misses.late_first, misses.slow):
        return "admission (refused or failed)"
    if misses.late_first >= misses.slow:
        waited = stages.router_wait + stages.prefill_queue
        return f"{reader} compute" if stages.prefill_compute > waited else f"{reader} queue"
    handed_over = {
        f"{writer} admission{_memory(run, writer)}": stages.decode_admission,
        "hand-off wait": stages.handoff_wait,
        "hand-off transfer": stages.handoff_transfer,
    }
    if sum(handed_over.values()) > stages.decode:
        return max(handed_over, key=lambda name: handed_over[name])
    return f"{writer} step time"


def _memory(run: RunOutcome, writer: str) -> str:
    """Whether it is for memory that requests wait there; else it is the step in progress, and the way."""
    full = [pool for pool in run.pools if pool.role is not Role.PREFILL and pool.kv_usage > _FULL]
    return " (KV memory)" if full else ""


def _mean(values: Floats | Flags) -> float:
    return float(np.mean(values)) if len(values) else math.nan
