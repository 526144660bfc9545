"""From a workload, a rate and an objective to the number of workers.

Owns: which sizes are tried, the recommendation and how sure it is. Refuses to know: how a size is measured (`sweep`).

    rate-matched split of n workers and its neighbours: the smallest n of which one holds the rate
    of as many workers: the split with the highest capacity       as many co-located: the smallest number that holds
    lengths 25 % up and down: how the choice fares, and what would be needed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton.capacity.analytic import Match, match
from baton.capacity.cost import CostModel
from baton.capacity.grid import Configuration, Model, Shape, setup_of
from baton.capacity.steady import resampled
from baton.capacity.study import Choice, Drift, Level, Objective, Plan, Row, Workload
from baton.capacity.sweep import Experiment, Laboratory, Search, all_of, lengths_of, workload_of
from baton.capacity.traffic import Traffic
from baton.router.config import ClusterConfig

DRIFTS = ((0.75, 1.0), (1.25, 1.0), (1.0, 0.75), (1.0, 1.25))
_NEIGHBOURS = 1
_RESAMPLES = 400
_GUESSED_LEVELS = 50


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be served. `traffic` has the rate."""

    config: ClusterConfig
    model: Model
    traffic: Traffic
    objective: Objective
    repeats: int = 2
    max_workers: int = 64


@dataclass(slots=True)
class _Trials:
    """Levels of one traffic at its own rate, by shape."""

    wish: Wish
    traffic: Traffic
    laboratory: Laboratory
    cost: CostModel
    searches: dict[Shape, Search] = field(default_factory=dict)

    def search(self, shape: Shape) -> Search:
        if shape not in self.searches:
            setup = setup_of(self.wish.config, self.wish.model, shape)
            experiment = Experiment(
                (Configuration(shape, setup),), (self.traffic,), self.wish.objective, self.wish.repeats
            )
            self.searches[shape] = Search(
                experiment.configurations[0], self.traffic, experiment, self.laboratory, self.cost, expects=None
            )
        return self.searches[shape]

    async def level(self, shape: Shape) -> Level:
        return await self.search(shape).level(self.traffic.rate)

    async def holding(self, shapes: Sequence[Shape]) -> Shape | None:
        """Of those that hold the rate, the one that holds it best."""
        levels = await all_of([self.level(shape) for shape in shapes], self.laboratory.is_parallel)
        found = [(level.attainment.value, shape) for level, shape in zip(levels, shapes, strict=True)]
        best, shape = max(found, key=lambda entry: entry[0], default=(0.0, None))
        return shape if best >= self.wish.objective.share else None

    async def smallest(self, start: int, least: int, shapes_of: Callable[[int], Sequence[Shape]]) -> Shape | None:
        """The smallest number of workers that holds: up from `start` until one does, then the gap is halved."""
        low, high, found = least - 1, max(start, least), None
        while high <= self.wish.max_workers:
            if (found := await self.holding(shapes_of(high))) is not None:
                break
            low, high = high, max(high + 1, math.ceil(high * 1.25))
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            shape = await self.holding(shapes_of(middle))
            low, high, found = (middle, high, found) if shape is None else (low, middle, shape)
        return found


async def plan(wish: Wish, laboratory: Laboratory, cost: CostModel) -> tuple[Plan, Workload, tuple[Row, ...]]:
    """The recommendation, and what it rests on."""
    formula = _match(wish, wish.traffic, cost)
    laboratory.expect(_GUESSED_LEVELS * wish.repeats)
    trials = _Trials(wish, wish.traffic, laboratory, cost)
    start = math.ceil(wish.traffic.rate * (formula.prefill_s + formula.decode_s))
    pair = await trials.smallest(start, 2, lambda total: splits(formula, total))
    alone = await trials.smallest(start, 1, _colocated)
    # The next sizes up and down, so that the intervals can reach them.
    if pair is not None:
        for total in (pair.total - 1, pair.total + 1):
            await trials.holding(splits(formula, total) if total > 1 else [])
    if alone is not None:
        for total in (alone.total - 1, alone.total + 1):
            await trials.holding(_colocated(total) if total else [])

    candidates = splits(formula, pair.total, _NEIGHBOURS + 1) if pair is not None else []
    searches = [trials.search(shape) for shape in (*candidates, *(_colocated(alone.total) if alone else ()))]
    await all_of([search.run() for search in searches], laboratory.is_parallel)
    await all_of([search.level(wish.traffic.rate) for search in searches], laboratory.is_parallel)
    best = max(candidates, key=lambda shape: trials.search(shape).capacity().rate, default=None)

    chosen = alone if best is None or (alone is not None and alone.total < best.total) else best
    smallest, split, colocated = (_choice(trials, shape) for shape in (pair, best, alone))
    found = Plan(
        workload=wish.traffic.name,
        rate=wish.traffic.rate,
        smallest=smallest,
        colocated=colocated,
        best=split,
        analytic=formula.split(pair.total if pair is not None else max(start, 2)),
        analytic_share=formula.prefill_share,
        drifts=tuple([await _drift(trials, *drift, chosen) for drift in DRIFTS]) if chosen is not None else (),
        sentence=_sentence(wish, split, colocated),
    )
    some = setup_of(wish.config, wish.model, chosen or Shape(1, 1))
    shapes = sorted(trials.searches, key=lambda shape: (shape.colocated > 0, shape.total, shape.prefill))
    rows = tuple(trials.search(shape).row() for shape in shapes)
    return found, workload_of(wish.traffic, some, wish.traffic.rate), rows


def splits(formula: Match, total: int, around: int = _NEIGHBOURS) -> list[Shape]:
    """The rate-matched split of so many workers, and its neighbours."""
    middle = formula.split(total).prefill
    nearby = range(max(middle - around, 1), min(middle + around, total - 1) + 1)
    return [Shape(prefill, total - prefill) for prefill in nearby]


def _colocated(total: int) -> list[Shape]:
    return [Shape(colocated=total)]


def _match(wish: Wish, traffic: Traffic, cost: CostModel) -> Match:
    setup = setup_of(wish.config, wish.model, Shape(1, 1))
    return match(setup, cost, lengths_of(traffic, setup), wish.objective.slo)


def _choice(trials: _Trials, shape: Shape | None) -> Choice | None:
    if shape is None:
        return None
    search = trials.search(shape)
    level = next(each for each in search.levels() if each.rate == trials.traffic.rate)
    low, high = _totals(trials, is_colocated=shape.colocated > 0)
    return Choice(shape, level.attainment, search.capacity(), min(low, shape.total), max(high, shape.total))


def _totals(trials: _Trials, is_colocated: bool) -> tuple[int, int]:
    """The sizes between which the smallest that holds lies in 95 % of resamples of the requests."""
    drawn: dict[int, NDArray[np.float64]] = {}
    for shape, search in trials.searches.items():
        level = next((each for each in search.levels() if each.rate == trials.traffic.rate), None)
        if level is None or (shape.colocated > 0) != is_colocated:
            continue
        shares = resampled(level.blocks, resamples=_RESAMPLES)
        drawn[shape.total] = np.maximum(drawn[shape.total], shares) if shape.total in drawn else shares
    totals = sorted(drawn)
    holds = np.array([drawn[total] >= trials.wish.objective.share for total in totals])
    # The last row stands for resamples in which not even the largest size tried holds.
    first = np.vstack([holds, np.ones(_RESAMPLES, dtype=bool)]).argmax(axis=0)
    sizes = np.array([*totals, totals[-1] + 1])[first]
    low, high = np.quantile(sizes, (0.025, 0.975), method="nearest")
    return int(low), int(high)


async def _drift(trials: _Trials, prompts: float, outputs: float, chosen: Shape) -> Drift:
    wish = trials.wish
    moved = _Trials(wish, wish.traffic.drifted(prompts, outputs), trials.laboratory, trials.cost)
    held = (await moved.level(chosen)).attainment
    formula = _match(wish, moved.traffic, trials.cost)
    if chosen.colocated:
        needed = await moved.smallest(chosen.total, 1, _colocated)
    else:
        needed = await moved.smallest(chosen.total, 2, lambda total: splits(formula, total))
    return Drift(prompts, outputs, needed, held, formula.split(needed.total if needed is not None else chosen.total))


def _sentence(wish: Wish, pair: Choice | None, alone: Choice | None) -> str:
    where = f"{wish.traffic.rate:.3g} requests/s of {wish.traffic.name}"
    if pair is None and alone is None:
        return (
            f"No cluster of up to {wish.max_workers} workers holds {where}: fewer than {wish.objective.share:.0%} of "
            "requests meet the objective at every size tried. A milder objective or faster workers are needed."
        )
    if alone is None or (pair is not None and pair.shape.total < alone.shape.total):
        assert pair is not None
        other = (
            f"co-located workers would have to be {alone.shape.total}"
            if alone is not None
            else f"co-located ones do not, up to {wish.max_workers}"
        )
        return f"For {where}, {_counted(pair.shape)} are enough{_room(pair, wish)}; {other}."
    if pair is None or alone.shape.total < pair.shape.total:
        other = (
            f"disaggregated they would have to be {pair.shape.total} ({pair.shape.label})"
            if pair is not None
            else f"disaggregated ones do not, up to {wish.max_workers}"
        )
        enough = "is" if alone.shape.total == 1 else "are"
        return f"For {where}, {_counted(alone.shape)} {enough} enough{_room(alone, wish)}; {other}. Co-location wins."
    said = f"For {where}, {pair.shape.total} workers are needed either way: {pair.shape.label} or co-located"
    a, b = pair.capacity, alone.capacity
    if a.low <= b.high and b.low <= a.high:
        return f"{said}; their capacities ({a.rate:.3g} and {b.rate:.3g} requests/s) differ by less than is certain."
    winner = f"{pair.shape.label} has" if a.rate > b.rate else "co-located workers have"
    return f"{said}; {winner} more to spare ({a.rate:.3g} against {b.rate:.3g} requests/s)."


def _counted(shape: Shape) -> str:
    if shape.colocated:
        return f"{shape.colocated} co-located {'worker' if shape.colocated == 1 else 'workers'}"
    return f"{shape.prefill} prefill and {shape.decode} decode {'worker' if shape.decode == 1 else 'workers'}"


def _room(choice: Choice, wish: Wish) -> str:
    spare = choice.capacity.rate / wish.traffic.rate - 1
    return f" with {spare:.0%} to spare" if spare > 0.005 else ""
