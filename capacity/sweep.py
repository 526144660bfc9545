"""Runs many configurations under the same traffic and finds the capacity of each.

Owns: points (a configuration, a traffic, an objective) and their order, the search for the highest rate, and what is
not run again. Refuses to know: how one point is measured (a `Backend` does) and what is shown.

    lattice of rates    2^(k/8) requests a second, for all configurations: what is compared was sent the same arrivals
    search of one row   light load -> from the analytic rate up or down until the objective is met and missed
                        -> halve the gap until the two are neighbours; capacity lies in between, by interpolation
    last                every row at the rate that the best one just holds

Rows are searched side by side where the backend can measure several points at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, Protocol

import baton
from baton.capacity.analytic import Lengths, match
from baton.capacity.cluster import ClusterSetup
from baton.capacity.cost import CostModel
from baton.capacity.grid import Configuration
from baton.capacity.journal import Journal
from baton.capacity.outcome import Slo
from baton.capacity.record import RecordError, digest, from_plain, to_plain
from baton.capacity.study import Capacity, Level, Objective, Prediction, Row, Workload, capacity_of
from baton.capacity.summary import Summary
from baton.capacity.traffic import Traffic

STEPS_PER_OCTAVE = 8
_LIGHT_OCTAVES = 2
_MOST_OCTAVES = 8
_GUESSED_POINTS = 8
_CURVE = (0.8, 0.5)
_LENGTHS_OF = 2000


class SweepError(Exception):
    """A sweep that cannot go on; finished points are kept."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    setup: ClusterSetup
    traffic: Traffic
    slo: Slo


class Measure(Protocol):
    """Runs a point. Crosses to another process where points are measured side by side."""

    def __call__(self, point: Point) -> Summary: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """`identity`: all that results depend on besides the point. `at_once`: points that may be measured at a time."""

    name: str
    measure: Measure
    executor: Executor
    identity: Any = None
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """`expected` is a guess until the searches are over. `kept`: points that were finished before."""

    done: int
    kept: int
    expected: int
    doing: str


class Laboratory:
    """Measures points, each once: what the journal has is not run again."""

    def __init__(
        self, backend: Backend, journal: Journal, on_progress: Callable[[Progress], None] = lambda progress: None
    ) -> None:
        self._backend = backend
        self._journal = journal
        self._on_progress = on_progress
        self._running: dict[str, asyncio.Future[Summary]] = {}
        self._done = self._kept = self._expected = 0

    @property
    def is_parallel(self) -> bool:
        return self._backend.at_once > 1

    def expect(self, points: int) -> None:
        """So many more points are to come; negative: fewer than was said."""
        self._expected += points

    async def measure(self, point: Point) -> Summary:
        """Raises SweepError or JournalError."""
        key = digest(point, self._backend.name, self._backend.identity, baton.__version__)
        if (kept := self._journal.get(key)) is not None:
            try:
                summary = from_plain(Summary, kept)
            except RecordError as error:
                raise SweepError(f"a finished point of another version {error}: take another --output") from error
            self._advance(point, is_kept=True)
            return summary
        if key not in self._running:
            self._running[key] = asyncio.ensure_future(self._run(key, point))
        return await self._running[key]

    async def _run(self, key: str, point: Point) -> Summary:
        try:
            summary = await asyncio.get_running_loop().run_in_executor(
                self._backend.executor, self._backend.measure, point
            )
        except BrokenProcessPool as error:
            raise SweepError(
                f"a process that simulated {point.setup.label} at {point.traffic.rate:.3g} requests/s was killed "
                "(out of memory?); finished points are kept: the same command goes on with them"
            ) from error
        self._journal.add(key, to_plain(point), to_plain(summary))
        self._advance(point, is_kept=False)
        return summary

    def _advance(self, point: Point, is_kept: bool) -> None:
        self._done += 1
        self._kept += is_kept
        doing = f"{point.traffic.name} {point.setup.label} at {point.traffic.rate:.3g}/s"
        self._on_progress(Progress(self._done, self._kept, max(self._expected, self._done), doing))


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to sweep. `traffics`: one a workload; their rates are set here. `rates`: instead of a search, these ones.
    `repeats`: seeds, from that of the traffic on. `compare_at`: the rate of the table, if not the best capacity."""

    configurations: tuple[Configuration, ...]
    traffics: tuple[Traffic, ...]
    objective: Objective
    repeats: int = 2
    rates: tuple[float, ...] = ()
    compare_at: float | None = None


async def sweep(
    experiment: Experiment, laboratory: Laboratory, cost: CostModel | None = None
) -> tuple[tuple[Workload, ...], tuple[Row, ...]]:
    """All rows of all workloads. `cost` gives the searches a place to begin."""
    searches = [
        Search(configuration, traffic, experiment, laboratory, cost)
        for traffic in experiment.traffics
        for configuration in experiment.configurations
    ]
    await all_of([search.run() for search in searches], laboratory.is_parallel)
    workloads = []
    for traffic in experiment.traffics:
        of_workload = [search for search in searches if search.traffic == traffic]
        rate = experiment.compare_at or _reference(of_workload)
        await all_of([search.level(rate) for search in of_workload], laboratory.is_parallel)
        workloads.append(workload_of(traffic, experiment.configurations[0].setup, rate))
    return tuple(workloads), tuple(search.row() for search in searches)


class Search:
    """The levels of one configuration under one workload."""

    def __init__(
        self,
        configuration: Configuration,
        traffic: Traffic,
        experiment: Experiment,
        laboratory: Laboratory,
        cost: CostModel | None,
        expects: int | None = _GUESSED_POINTS,
    ) -> None:
        """`expects`: levels that it is likely to need, for the time left; None if somebody else has said."""
        self.configuration = configuration
        self.traffic = traffic
        self._experiment = experiment
        self._laboratory = laboratory
        self._levels: dict[float, Level] = {}
        self._match = None
        if cost is not None:
            lengths = lengths_of(traffic, configuration.setup)
            self._match = match(configuration.setup, cost, lengths, experiment.objective.slo)
        self._expected = 0 if expects is None else (len(experiment.rates) or expects) * experiment.repeats
        self._is_accounted = expects is not None
        laboratory.expect(self._expected)

    async def run(self) -> None:
        if self._experiment.rates:
            await all_of([self.level(rate) for rate in self._experiment.rates], self._laboratory.is_parallel)
        else:
            await self._search()
        if self._is_accounted:
            self._laboratory.expect(-self._expected + len(self._levels) * self._experiment.repeats)

    async def level(self, rate: float) -> Level:
        """One rate with all seeds."""
        known = self._levels.get(rate)
        if known is not None:
            return known
        seeds = range(self.traffic.seed, self.traffic.seed + self._experiment.repeats)
        points = [
            Point(self.configuration.setup, replace(self.traffic, rate=rate, seed=seed), self._experiment.objective.slo)
            for seed in seeds
        ]
        runs = await all_of([self._laboratory.measure(point) for point in points], self._laboratory.is_parallel)
        self._levels[rate] = Level(rate, tuple(runs))
        return self._levels[rate]

    def capacity(self) -> Capacity:
        return capacity_of(self.levels(), self._experiment.objective.share)

    def row(self) -> Row:
        return Row(
            workload=self.traffic.name,
            configuration=self.configuration,
            levels=self.levels(),
            capacity=self.capacity(),
            analytic_share=self._match.prefill_share if self._match is not None else math.nan,
            analytic_rate=self._match.rate(self.configuration.shape) if self._match is not None else math.nan,
        )

    async def _search(self) -> None:
        start = self._match.rate(self.configuration.shape) if self._match is not None else 1.0
        first = round(math.log2(start) * STEPS_PER_OCTAVE)
        lowest, highest = (first + sign * _MOST_OCTAVES * STEPS_PER_OCTAVE for sign in (-1, 1))
        if not await self._meets(first - _LIGHT_OCTAVES * STEPS_PER_OCTAVE) and not await self._meets(lowest):
            return
        met: int | None = None
        missed: int | None = None
        at, stride = first, STEPS_PER_OCTAVE // 2
        while met is None or missed is None:
            if await self._meets(at):
                met, at = at, at + stride
            else:
                missed, at = at, at - stride
            if not lowest <= at <= highest:
                return
            # Two steps the same way: the beginning was far off.
            stride = min(stride * 2, STEPS_PER_OCTAVE) if met is None or missed is None else stride
        while missed - met > 1:
            middle = (met + missed) // 2
            if await self._meets(middle):
                met = middle
            else:
                missed = middle
        # For the curves: not far below capacity, and half of it.
        for fraction in _CURVE:
            wanted = met + round(math.log2(fraction) * STEPS_PER_OCTAVE)
            if not any(abs(math.log2(level.rate) * STEPS_PER_OCTAVE - wanted) < 2 for level in self.levels()):
                await self.level(rate_of(wanted))

    async def _meets(self, step: int) -> bool:
        level = await self.level(rate_of(step))
        return level.attainment.value >= self._experiment.objective.share

    def levels(self) -> tuple[Level, ...]:
        return tuple(self._levels[rate] for rate in sorted(self._levels))


def rate_of(step: int) -> float:
    """A rate of the lattice, to four digits so that it can be read and typed."""
    return float(f"{2 ** (step / STEPS_PER_OCTAVE):.4g}")


def compare(predicted: Sequence[Row], measured: Sequence[Row]) -> tuple[Prediction, ...]:
    """Figure by figure, where both have a level."""
    found = []
    for row in measured:
        twin = next((each for each in predicted if each.workload == row.workload and each.label == row.label), None)
        for level in row.levels:
            other = twin.at(level.rate) if twin is not None else None
            if other is None:
                continue
            for name in ("ttft", "tpot", "e2e"):
                for point in ("p50", "p90"):
                    values = (getattr(each.latency(name), point) for each in (other, level))
                    found.append(Prediction(row.workload, row.label, level.rate, f"{name.upper()} {point}", *values))
            throughput = (each.mean("tokens_per_s") for each in (other, level))
            found.append(Prediction(row.workload, row.label, level.rate, "output tokens/s", *throughput))
    return tuple(found)


def _reference(searches: Iterable[Search]) -> float:
    """The highest rate that was tried and met by any of them; the lowest rate of all, if none was."""
    met = [
        level.rate
        for search in searches
        for level in search.levels()
        if level.attainment.value >= search._experiment.objective.share
    ]
    return max(met) if met else min(level.rate for search in searches for level in search.levels())


def workload_of(traffic: Traffic, setup: ClusterSetup, rate: float) -> Workload:
    number = prompt = output = clipped = 0
    plain = replace(traffic, rate=1.0)
    for sent, wanted in zip(plain.arrivals(setup.max_model_len), plain.arrivals(1 << 40), strict=True):
        number += 1
        prompt += sent.prompt_tokens
        output += sent.output_tokens
        clipped += (sent.prompt_tokens, sent.output_tokens) != (wanted.prompt_tokens, wanted.output_tokens)
    return Workload(traffic.name, prompt / max(number, 1), output / max(number, 1), clipped, rate)


def lengths_of(traffic: Traffic, setup: ClusterSetup) -> Lengths:
    sample = replace(traffic, rate=1.0, num_requests=min(traffic.num_requests, _LENGTHS_OF))
    return Lengths.of(sample.arrivals(setup.max_model_len))


async def all_of(work: Sequence[Any], is_parallel: bool) -> list[Any]:
    """The results in order: side by side, or one after another. The first failure ends all."""
    if not is_parallel:
        left = list(reversed(work))
        try:
            return [await left.pop() for _ in work]
        finally:
            for each in left:
                each.close()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
