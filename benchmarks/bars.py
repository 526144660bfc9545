"""What a measurement must reach: rounds of ratios, their bar, the verdict, and the one table of all of them.

Owns: the records, their statistics, the table and how they travel as JSON. Refuses to know: how anything is measured.

A measure compares this project with something (a peer, a limit, a fixed bound) once a round. Its ratio of a round says
how many times better ours is: `Better` tells which way the raw values go. Shares and exponents, which have a bound that
they must stay under, are `AT_MOST` and stand for themselves. A row passes if any of its measures reaches its bar.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Better(Enum):
    """Which values are better, and what becomes of them: the first two are divided, the third stands for itself."""

    MORE = "more"
    LESS = "less"
    AT_MOST = "at most"


class Verdict(Enum):
    OK = "ok"
    MISS = "MISS"
    NO_PEER = "peer not installed"
    SHOWN = "-"


@dataclass(frozen=True, slots=True)
class Measure:
    """One comparison. `ours` and `theirs` have one value a round; `theirs` is empty for `AT_MOST`, and where the peer
    is not installed. `bar` is None where nothing is demanded and the figures are only shown."""

    against: str
    better: Better
    bar: float | None
    ours: tuple[float, ...]
    theirs: tuple[float, ...] = ()

    @property
    def ratios(self) -> tuple[float, ...]:
        match self.better:
            case Better.AT_MOST:
                return self.ours
            case Better.MORE:
                return tuple(_over(a, b) for a, b in zip(self.ours, self.theirs, strict=False))
            case Better.LESS:
                return tuple(_over(b, a) for a, b in zip(self.ours, self.theirs, strict=False))

    @property
    def ratio(self) -> float:
        """The median over rounds; NaN without any."""
        known = [ratio for ratio in self.ratios if not math.isnan(ratio)]
        return statistics.median(known) if known else math.nan

    @property
    def verdict(self) -> Verdict:
        if math.isnan(self.ratio):
            return Verdict.NO_PEER if not self.ratios else Verdict.SHOWN
        if self.bar is None:
            return Verdict.SHOWN
        reached = self.ratio <= self.bar if self.better is Better.AT_MOST else self.ratio >= self.bar
        return Verdict.OK if reached else Verdict.MISS


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one case, compared with one thing or more."""

    case: str
    what: str
    unit: str
    measures: tuple[Measure, ...]
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """Of several measures the best: what has no verdict of its own does not count beside one that has."""
        found = {measure.verdict for measure in self.measures}
        for verdict in (Verdict.OK, Verdict.NO_PEER, Verdict.MISS):
            if verdict in found:
                return verdict
        return Verdict.SHOWN

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        for measure, fields in zip(self.measures, content["measures"], strict=True):
            fields["better"], fields["verdict"] = measure.better.value, measure.verdict.value
            fields["ours"] = [_finite(value) for value in measure.ours]
            fields["theirs"] = [_finite(value) for value in measure.theirs]
            fields["ratio"] = _finite(measure.ratio)
        return content | {"verdict": self.verdict.value}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Row:
        measures = tuple(
            Measure(
                fields["against"],
                Better(fields["better"]),
                fields["bar"],
                tuple(math.nan if value is None else value for value in fields["ours"]),
                tuple(math.nan if value is None else value for value in fields["theirs"]),
            )
            for fields in content["measures"]
        )
        return cls(content["case"], content["what"], content["unit"], measures, content["note"])


def percentile(values: Iterable[float], fraction: float) -> float:
    """Linear between the two nearest ranks; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def table(rows: Sequence[Row]) -> str:
    """All rows, one line a measure; further measures of a row begin with `or`. The figures are medians over rounds."""
    lines = [HEADINGS, *(line for row in rows for line in _lines(row))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    left = {0, 1, 4, 8}

    def laid_out(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join(laid_out(line) for line in [lines[0], rule, *lines[1:]])


def tally(rows: Iterable[Row]) -> str:
    """How many rows reached their bar."""
    verdicts = [row.verdict for row in rows]
    counts = [(verdict, verdicts.count(verdict)) for verdict in Verdict if verdict is not Verdict.SHOWN]
    return ", ".join(f"{number} {verdict.value}" for verdict, number in counts if number) or "nothing with a bar"


HEADINGS = ("case", "what", "unit", "ours", "against", "theirs", "ratio (min..max)", "bar", "verdict")


def _lines(row: Row) -> Iterator[tuple[str, ...]]:
    for number, measure in enumerate(row.measures):
        first = number == 0
        verdict = row.verdict if first else Verdict.SHOWN
        note = f"  {row.note}" if first and row.note else ""
        yield (
            row.case if first else "",
            row.what if first else "  or",
            row.unit if first else "",
            _figure(_middle(measure.ours)),
            measure.against,
            _figure(_middle(measure.theirs)),
            _spread(measure),
            _bound(measure),
            f"{verdict.value if first else ''}{note}",
        )


def _spread(measure: Measure) -> str:
    known = [ratio for ratio in measure.ratios if not math.isnan(ratio)]
    if not known:
        return "-"
    return f"{measure.ratio:.2f} ({min(known):.2f}..{max(known):.2f})"


def _bound(measure: Measure) -> str:
    if measure.bar is None:
        return "-"
    return f"{'<=' if measure.better is Better.AT_MOST else '>='} {measure.bar:g}"


def _middle(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _over(above: float, below: float) -> float:
    """Nothing over nothing is no ratio; something over nothing is beyond any bar."""
    if below == 0:
        return math.nan if above == 0 else math.inf
    return above / below


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
