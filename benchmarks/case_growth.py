"""S7: how costs grow with batch, context and queue: no worse than linearly, and without a knee.

Owns: the rows. `growth.py` measures the points and draws them; a row is the exponent of cost ~ x^exponent, end to end
and, for a knee, of the steepest step between neighbouring points. A whole prompt in one step is shown without a bar:
its attention is quadratic.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from bars import Better, Measure, Row
from case import Options
from growth import PARTS, exponent, measure, open_runner, plot
from growth import Row as Point

BAR, BAR_KNEE = 1.05, 1.3
"""Linear is 1; the rest is for noise, of which the steepest of seven steps has the most."""
NO_BAR = {"prefill"}
OUT = Path(__file__).resolve().parent / "out"


def rows(options: Options) -> Iterator[Row]:
    options.pin_here()
    torch.set_num_threads(1)
    runner = open_runner(options.model)
    plotted: dict[str, list[Point]] = {}
    for part, points in PARTS.items():
        wanted = points[:3] if options.quick else points
        rounds = 1 if part in NO_BAR else options.rounds_or(3)
        found = [[measure(runner, part, x) for x in wanted] for _ in range(rounds)]
        plotted[part] = [_median(list(same)) for same in zip(*found, strict=True)]
        for column in list(found[0][0])[1:]:
            if not column.startswith("us a "):
                yield from _rows(part, column, found)
    if importlib.util.find_spec("matplotlib") is not None:
        plot(plotted, OUT / "growth.png")


def _rows(part: str, column: str, rounds: list[list[Point]]) -> Iterator[Row]:
    for what, bar, exponents in (
        ("growth", BAR, [exponent(points[0], points[-1], column) for points in rounds]),
        ("steepest", BAR_KNEE, [max(exponent(*pair, column) for pair in pairwise(points)) for points in rounds]),
    ):
        measured = Measure("linear", Better.AT_MOST, None if part in NO_BAR else bar, tuple(exponents))
        span = f"{rounds[0][0][part]:.0f} to {rounds[0][-1][part]:.0f}"
        yield Row("S7", f"{what} of {column} with {part}, {span}", "exponent", (measured,))


def _median(same: list[Point]) -> Point:
    return {name: statistics.median(point[name] for point in same) for name in same[0]}
