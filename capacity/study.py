"""What was found: levels of load, the capacity of each configuration, and what ran on what.

Owns: the records that `sweep` and `plan` make and `report` shows, their file, and the capacity that follows from levels
of load with its confidence interval.
Refuses to know: how runs are made and how records are drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from baton.capacity.grid import Configuration, Shape
from baton.capacity.outcome import Slo
from baton.capacity.record import RecordError, from_plain, to_plain
from baton.capacity.steady import Block, Floats, Share, Verdict, resampled, share
from baton.capacity.summary import Distribution, Summary

FORMAT, VERSION = "baton-capacity-study", 1
_RESAMPLES = 400


class StudyError(ValueError):
    """A file that is no study."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Which requests are good, and which share of them must be."""

    slo: Slo
    share: float = 0.9

    @property
    def text(self) -> str:
        bounds = [
            f"{name} <= {bound_s * 1e3:g} ms"
            for name, bound_s in (("TTFT", self.slo.ttft_s), ("TPOT", self.slo.tpot_s))
            if math.isfinite(bound_s)
        ]
        wanted = f"have {' and '.join(bounds)}" if bounds else "finish"
        return f"at least {self.share:.0%} of requests {wanted}"


@dataclass(frozen=True, slots=True)
class Level:
    """One rate, run with several seeds."""

    rate: float
    runs: tuple[Summary, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for run in self.runs for block in run.blocks)

    @property
    def attainment(self) -> Share:
        return share(self.blocks)

    @property
    def goodput(self) -> Share:
        """Good requests a second; the rate that was offered in the windows times the attainment."""
        return self.attainment.scaled(self.mean("offered_rate"))

    @property
    def verdict(self) -> Verdict:
        """The worst that more than half of the runs reach."""
        order = list(Verdict)
        found = sorted((order.index(run.steadiness.verdict) for run in self.runs), reverse=True)
        return order[found[len(found) // 2]]

    def mean(self, name: str) -> float:
        """Of a figure, over the runs that have it."""
        values = [value for run in self.runs if math.isfinite(value := getattr(run, name))]
        return sum(values) / len(values) if values else math.nan

    def latency(self, name: str) -> Distribution:
        """Of each quantile, its mean over the runs."""
        found = [getattr(run, name) for run in self.runs]
        columns = [[getattr(each, key) for each in found] for key in ("mean", "p50", "p90", "p99")]
        return Distribution(*(_mean(column) for column in columns))


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate at which the objective is met, with a 95 % confidence interval; 0 if it is at none.

    `is_bounded` is False if it was still met at the highest rate tried: the capacity is that or more. NaN if only one
    rate was tried.
    """

    rate: float
    low: float
    high: float
    is_bounded: bool = True
    note: str = ""

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.rate)


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration under one workload, at all rates that were tried, in ascending order."""

    workload: str
    configuration: Configuration
    levels: tuple[Level, ...]
    capacity: Capacity
    analytic_share: float = math.nan
    analytic_rate: float = math.nan

    @property
    def label(self) -> str:
        return self.configuration.label

    @property
    def shape(self) -> Shape:
        return self.configuration.shape

    def at(self, rate: float) -> Level | None:
        return next((level for level in self.levels if math.isclose(level.rate, rate)), None)


@dataclass(frozen=True, slots=True)
class Workload:
    """What was sent. `reference_rate`: the one at which all configurations are set side by side."""

    name: str
    mean_prompt: float
    mean_output: float
    num_clipped: int
    reference_rate: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure that was simulated and measured, for the same arrivals."""

    workload: str
    label: str
    rate: float
    metric: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1 if self.measured else math.nan


@dataclass(frozen=True, slots=True)
class Provenance:
    """What ran, on what, when. `notes`: what a reader must know to judge the figures, one sentence each."""

    command: str
    started: str
    took_s: float
    backend: str
    version: str
    python: str
    machine: str
    cores: int
    cost_model: str
    seeds: tuple[int, ...]
    num_requests: int
    scale_lengths: float
    model: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The smallest cluster of one kind that holds a rate. `total_low`, `total_high`: its size in 95 % of resamples."""

    shape: Shape
    attainment: Share
    capacity: Capacity
    total_low: int
    total_high: int


@dataclass(frozen=True, slots=True)
class Drift:
    """What lengths that move do to the choice: the smallest cluster then, and how the chosen one fares. No `choice`:
    none of the sizes tried holds."""

    prompts: float
    outputs: float
    choice: Shape | None
    held: Share
    analytic: Shape


@dataclass(frozen=True, slots=True)
class Plan:
    """A recommendation for one rate. `smallest` disaggregated, `colocated` beside it, `best`: the split of as many
    workers with the highest capacity."""

    workload: str
    rate: float
    smallest: Choice | None
    colocated: Choice | None
    best: Choice | None
    analytic: Shape
    analytic_share: float
    drifts: tuple[Drift, ...]
    sentence: str

    @property
    def chosen(self) -> Shape | None:
        """What to run: the best split, unless co-location needs fewer workers."""
        if self.best is None or (self.colocated is not None and self.colocated.shape.total < self.best.shape.total):
            return self.colocated.shape if self.colocated is not None else None
        return self.best.shape


@dataclass(frozen=True, slots=True)
class Study:
    provenance: Provenance
    objective: Objective
    workloads: tuple[Workload, ...]
    rows: tuple[Row, ...]
    predictions: tuple[Prediction, ...] = ()
    plan: Plan | None = None
    format: str = field(default=FORMAT)
    version: int = VERSION

    def of(self, workload: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.workload == workload)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(to_plain(self), separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Study:
        """Raises StudyError, or OSError where there is no such file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
                raise RecordError(f"its format must be {FORMAT!r}, version {VERSION}")
            return from_plain(cls, data)
        except ValueError as error:
            raise StudyError(f"{path}: is no capacity study: {error}") from error


def capacity_of(levels: Sequence[Level], target: float) -> Capacity:
    """From levels in ascending order of rate: where attainment crosses `target`, between two rates that were tried.

    Chance makes attainment rise with the rate here and there, so it is first made to fall (each level pooled with
    its neighbours as far as needed). The interval is a bootstrap over blocks of requests, the same ones at all rates.
    """
    if len(levels) < 2:
        return Capacity(math.nan, math.nan, math.nan)
    rates = np.array([level.rate for level in levels])
    measured = falling(np.array([level.attainment.value for level in levels]))
    rate = crossing(rates, measured, target)
    drawn = np.array([resampled(level.blocks, resamples=_RESAMPLES) for level in levels])
    found = [crossing(rates, falling(column), target) for column in drawn.T]
    low, high = (float(each) for each in np.quantile(found, (0.025, 0.975)))
    is_bounded = bool(measured[-1] < target)
    if rate == 0.0:
        lightest = levels[0]
        ttft_s, tpot_s = (lightest.latency(name).p90 for name in ("ttft", "tpot"))
        note = (
            f"even at {lightest.rate:.3g} requests/s only {lightest.attainment.value:.0%} of requests are good, with "
            f"TTFT p90 {ttft_s * 1e3:,.0f} ms and TPOT p90 {tpot_s * 1e3:,.0f} ms"
        )
        return Capacity(0.0, 0.0, high, note=note)
    note = "" if is_bounded else f"still met at {rates[-1]:.3g} requests/s, the highest rate tried"
    return Capacity(rate, min(low, rate), max(high, rate), is_bounded, note)


def crossing(rates: Floats, attainment: Floats, target: float) -> float:
    """The rate at which a falling attainment reaches `target`: linear between levels, 0 if the first one is below."""
    if attainment[0] < target:
        return 0.0
    for (r0, a0), (r1, a1) in pairwise(zip(rates, attainment, strict=True)):
        if a1 < target:
            return float(r0 + (r1 - r0) * (a0 - target) / (a0 - a1))
    return float(rates[-1])


def falling(values: Floats) -> Floats:
    """The nearest sequence that never rises (least squares, by pooling neighbours)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([float(value), 1.0])
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            last, weight = pools.pop()
            pools[-1] = [
                (pools[-1][0] * pools[-1][1] + last * weight) / (pools[-1][1] + weight),
                pools[-1][1] + weight,
            ]
    return np.array([value for value, weight in pools for _ in range(int(weight))])


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
