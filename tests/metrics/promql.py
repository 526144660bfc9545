"""Enough of PromQL to ask a few scrapes what a board or a rule would ask Prometheus.

Owns: series, the grammar that our queries use, and complaints about queries that Prometheus would answer with nothing:
a selector without series, a label that no series has, a rate of something that is no counter, a quantile without `le`.
Rates are not extrapolated to the ends of their window.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*(?:e[+-]?\d+)?)(?![\w:])|(?P<string>\"[^\"]*\")|(?P<word>[a-zA-Z_:][\w:]*)"
    r"|(?P<range>\[\d+[smhd]\])|(?P<sign>=~|!~|!=|>=|<=|==|[-+*/<>=(){},]))"
)
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEVELS = ({"or"}, {"and", "unless"}, {"==", "!=", ">", "<", ">=", "<="}, {"+", "-"}, {"*", "/"})
NUMBERS: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
}
OVER_TIME = {
    "min_over_time": min,
    "max_over_time": max,
    "avg_over_time": lambda values: sum(values) / len(values),
    "sum_over_time": sum,
}
OVER_SERIES = {"sum": sum, "min": min, "max": max, "count": len, "avg": OVER_TIME["avg_over_time"]}


class QueryError(Exception):
    """A query that cannot be answered, or never would be."""


class Point(NamedTuple):
    at: float
    value: float


@dataclass
class Series:
    """`counts`: it only rises, as counters and all parts of histograms do."""

    name: str
    labels: dict[str, str]
    counts: bool
    points: list[Point] = field(default_factory=list)


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Window(NamedTuple):
    series: Series
    points: list[Point]


class Store:
    """What Prometheus would have after some scrapes."""

    def __init__(self) -> None:
        self._series: dict[tuple, Series] = {}

    def add(self, name: str, labels: dict[str, str], at: float, value: float, counts: bool) -> None:
        key = (name, *sorted(labels.items()))
        series = self._series.setdefault(key, Series(name, labels, counts))
        series.points.append(Point(at, value))

    def scrape(self, page: str, at: float, **target: str) -> None:
        """Takes in one page. The target's labels win, as with Prometheus; ours must not be among them."""
        self.add("up", target, at, 1.0, counts=False)
        for family in text_string_to_metric_families(page):
            for name, labels, value, *_ in family.samples:
                clash = labels.keys() & target.keys()
                if clash:
                    raise QueryError(f"{name} has the target's labels {clash}")
                self.add(name, {**labels, **target}, at, value, family.type in ("counter", "histogram"))

    def named(self, name: str) -> list[Series]:
        return [series for series in self._series.values() if series.name == name]


Value = float | list[Sample] | list[Window]


def ask(store: Store, query: str, at: float) -> float | list[Sample]:
    """The answer of an instant query. Raises QueryError."""
    parser = _Parser(store, query, at)
    value = parser.expression()
    if parser.token:
        raise QueryError(f"{query}: {parser.token!r} is left over")
    return value


class _Parser:
    """Answers while it reads: a query is asked once."""

    def __init__(self, store: Store, query: str, at: float) -> None:
        self._store = store
        self._query = query
        self._at = at
        self._place = 0
        self._may_be_absent = False
        self.kind, self.token = "", ""
        self._next()

    def expression(self, level: int = 0) -> Value:
        if level == len(LEVELS):
            return self._unary()
        left = self.expression(level + 1)
        while self.token in LEVELS[level]:
            sign = self._next()
            as_bool = self._skip("bool")
            on = self._labels() if self._skip("on") else None
            many = bool(self._skip("group_left") and (self._labels() or True))
            left = self._combine(sign, left, self.expression(level + 1), on, as_bool, many)
        return left

    # --- tokens -----------------------------------------------------------------------------------------------------

    def _next(self) -> str:
        """Moves on; returns the token that was passed."""
        passed, rest = self.token, self._query[self._place :]
        if not rest.strip():
            self.kind, self.token = "", ""
            return passed
        match = TOKEN.match(self._query, self._place)
        if match is None:
            raise QueryError(f"{self._query}: cannot be read from {rest[:30]!r} on")
        self._place, self.kind = match.end(), match.lastgroup or ""
        self.token = match[self.kind]
        return passed

    def _skip(self, token: str) -> bool:
        return self.token == token and bool(self._next())

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            raise QueryError(f"{self._query}: {token!r} expected, {self.token!r} found")

    def _labels(self) -> list[str]:
        self._expect("(")
        found = []
        while not self._skip(")"):
            found.append(self._next())
            self._skip(",")
        return found

    # --- values -----------------------------------------------------------------------------------------------------

    def _unary(self) -> Value:
        if self._skip("("):
            value = self.expression()
            self._expect(")")
            return value
        if self.kind == "number":
            return float(self._next())
        if self.kind != "word":
            raise QueryError(f"{self._query}: {self.token!r} begins no value")
        word = self._next()
        if word in OVER_SERIES:
            return self._aggregate(word)
        if self.token == "(":
            return self._call(word)
        return self._select(word)

    def _select(self, name: str) -> list[Sample] | list[Window]:
        found = self._store.named(name)
        if self._skip("{"):
            while not self._skip("}"):
                label, sign, text = self._next(), self._next(), self._next()[1:-1]
                if found and not any(label in series.labels for series in found):
                    raise QueryError(f"{self._query}: no {name} has the label {label}")
                found = [series for series in found if _matches(series.labels.get(label, ""), sign, text)]
                self._skip(",")
        if not found and not self._may_be_absent:
            raise QueryError(f"{self._query}: {name} with these labels matches no series")
        if self.kind == "range":
            text = self._next()
            begin = self._at - int(text[1:-2]) * SECONDS[text[-2]]
            windows = [Window(series, [p for p in series.points if begin < p.at <= self._at]) for series in found]
            return [window for window in windows if window.points]
        newest = [(series, max(p for p in series.points if p.at <= self._at)) for series in found]
        return [Sample({**series.labels, "__name__": name}, point.value) for series, point in newest]

    def _aggregate(self, word: str) -> list[Sample]:
        by = self._labels() if self._skip("by") else None
        self._expect("(")
        samples = self.expression()
        self._expect(")")
        by = self._labels() if by is None and self._skip("by") else by or []
        for label in by:
            if samples and not any(label in sample.labels for sample in samples):
                raise QueryError(f"{self._query}: nothing to group has the label {label}")
        groups = defaultdict(list)
        for sample in samples:
            groups[tuple((label, sample.labels[label]) for label in by if label in sample.labels)].append(sample.value)
        return [Sample(dict(key), OVER_SERIES[word](values)) for key, values in groups.items()]

    def _call(self, word: str) -> Value:
        self._may_be_absent = word == "absent"
        arguments = []
        self._expect("(")
        while not self._skip(")"):
            arguments.append(self.expression())
            self._skip(",")
        self._may_be_absent = False
        match word, arguments:
            case "absent", [samples]:
                return [] if samples else [Sample({}, 1.0)]
            case "vector", [number]:
                return [Sample({}, number)]
            case "clamp_min", [samples, least]:
                return [Sample(_bare(sample), max(sample.value, least)) for sample in samples]
            case "histogram_quantile", [quantile, samples]:
                return self._quantiles(quantile, samples)
            case (("rate" | "increase"), [windows]):
                return [self._rate(window, per_s=word == "rate") for window in windows if len(window.points) > 1]
            case "deriv", [windows]:
                return [self._slope(window) for window in windows if len(window.points) > 1]
            case _, [windows] if word in OVER_TIME:
                return [
                    Sample(window.series.labels, OVER_TIME[word]([p.value for p in window.points]))
                    for window in windows
                ]
        raise QueryError(f"{self._query}: {word} of {len(arguments)} arguments is not known here")

    def _rate(self, window: Window, per_s: bool) -> Sample:
        if not window.series.counts:
            raise QueryError(f"{self._query}: {window.series.name} is no counter")
        pairs = zip(window.points, window.points[1:], strict=False)
        # One that is smaller than before began again at zero.
        risen = sum(b.value - a.value if b.value >= a.value else b.value for a, b in pairs)
        seconds = window.points[-1].at - window.points[0].at
        return Sample(window.series.labels, risen / seconds if per_s else risen)

    def _slope(self, window: Window) -> Sample:
        if window.series.counts:
            raise QueryError(f"{self._query}: {window.series.name} is no gauge")
        first, last = window.points[0], window.points[-1]
        return Sample(window.series.labels, (last.value - first.value) / (last.at - first.at))

    def _quantiles(self, quantile: float, samples: list[Sample]) -> list[Sample]:
        groups = defaultdict(list)
        for sample in samples:
            if "le" not in sample.labels:
                raise QueryError(f"{self._query}: a quantile of what has no le")
            others = {label: value for label, value in _bare(sample).items() if label != "le"}
            groups[tuple(sorted(others.items()))].append((float(sample.labels["le"]), sample.value))
        return [Sample(dict(key), _quantile(quantile, sorted(buckets))) for key, buckets in groups.items()]

    def _combine(
        self, sign: str, left: Value, right: Value, on: list[str] | None, as_bool: bool, many: bool
    ) -> float | list[Sample]:
        compares = sign in LEVELS[2]
        if isinstance(left, float) and isinstance(right, float):
            return float(NUMBERS[sign](left, right))
        if isinstance(left, float) or isinstance(right, float):
            samples = right if isinstance(left, float) else left
            pairs = [(s, (left, s.value) if isinstance(left, float) else (s.value, right)) for s in samples]
        else:
            table: dict[tuple, list[Sample]] = defaultdict(list)
            for sample in right:
                table[_key(sample, on)].append(sample)
            if sign == "and":
                return [sample for sample in left if _key(sample, on) in table]
            if sign == "unless":
                return [sample for sample in left if _key(sample, on) not in table]
            if sign == "or":
                present = {_key(sample, on) for sample in left}
                return left + [sample for sample in right if _key(sample, on) not in present]
            keys = [_key(sample, on) for sample in left]
            if any(len(found) > 1 for found in table.values()) or (len(set(keys)) < len(keys) and not many):
                raise QueryError(f"{self._query}: {sign} matches many with one, or many")
            pairs = [(s, (s.value, table[key][0].value)) for s, key in zip(left, keys, strict=True) if key in table]
        if compares and not as_bool:
            return [sample for sample, (a, b) in pairs if NUMBERS[sign](a, b)]
        return [Sample(_bare(sample), float(NUMBERS[sign](a, b))) for sample, (a, b) in pairs]


def _matches(value: str, sign: str, text: str) -> bool:
    found = re.fullmatch(text, value) is not None if "~" in sign else value == text
    return found != sign.startswith("!")


def _bare(sample: Sample) -> dict[str, str]:
    return {label: value for label, value in sample.labels.items() if label != "__name__"}


def _key(sample: Sample, on: Iterable[str] | None) -> tuple:
    labels = _bare(sample)
    return tuple(sorted((label, labels.get(label, "")) for label in (labels if on is None else on)))


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    """By straight lines within a bucket, as Prometheus does."""
    total = buckets[-1][1]
    if not total or not math.isinf(buckets[-1][0]):
        return math.nan
    rank, begin, before = quantile * total, 0.0, 0.0
    for end, count in buckets:
        if count >= rank:
            return begin if math.isinf(end) else begin + (end - begin) * (rank - before) / max(count - before, 1e-12)
        begin, before = end, count
    return begin
