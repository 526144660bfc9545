"""Which part of a run counts, whether the cluster kept up in it, and how sure its figures are.

Owns: the steady window, the verdict and its test, and confidence intervals of shares.
Refuses to know: what was run. Takes times of arrivals and ends, and counts.

    |  warm-up  |               window               |  the end  | drain
    0          20 %                                 90 %       last arrival

The cluster fills during the warm-up; of requests that come at the end the last tokens fall into the drain, where nobody
competes with them. Both are left out. The backlog (requests that have come and are not done; those that were refused or
failed never are) is averaged in 20 parts of the window. Its growth is the slope of Theil and Sen over these, told as a
share of the requests that came; whether it grows at all is the test of Mann and Kendall, one-sided, at 1 %.

    OVERLOADED   it grows, by more than 10 % of what comes: the cluster would never catch up
    BACKLOGGED   it grows, by 2 % to 10 %: at this rate there is little or nothing to spare
    STABLE       neither
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WARM_UP, END = 0.2, 0.9
PARTS = 20
OVERLOADED_GROWTH, BACKLOGGED_GROWTH = 0.10, 0.02
SIGNIFICANCE = 0.01
BLOCKS = 40
CONFIDENCE = 0.95
_RESAMPLES = 2000
_MIN_BLOCK = 4


class Verdict(StrEnum):
    STABLE = "STABLE"
    BACKLOGGED = "BACKLOGGED"
    OVERLOADED = "OVERLOADED"


@dataclass(frozen=True, slots=True)
class Window:
    start_s: float
    end_s: float

    @classmethod
    def of(cls, arrived_s: Floats, duration_s: float) -> Window:
        """The steady part of a run; all of it where everything came at once."""
        first, last = float(arrived_s.min()), float(arrived_s.max())
        if last <= first:
            return cls(first, max(duration_s, first + 1e-9))
        return cls(first + WARM_UP * (last - first), first + END * (last - first))

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, times_s: Floats) -> NDArray[np.bool_]:
        return (times_s >= self.start_s) & (times_s <= self.end_s)


@dataclass(frozen=True, slots=True)
class Steadiness:
    """`growth`: of the backlog over the window, as a share of the requests that came in it. `p_value`: of no growth."""

    verdict: Verdict
    growth: float
    p_value: float
    backlog_first: float
    backlog_last: float


def steadiness(arrived_s: Floats, ended_s: Floats, window: Window) -> Steadiness:
    """`ended_s` is infinite for what was never served."""
    backlog = mean_backlog(arrived_s, ended_s, window)
    came = max(int(window.holds(arrived_s).sum()), 1)
    growth = slope(backlog) * PARTS / came
    p_value = no_growth(backlog)
    if p_value < SIGNIFICANCE and growth > OVERLOADED_GROWTH:
        verdict = Verdict.OVERLOADED
    elif p_value < SIGNIFICANCE and growth > BACKLOGGED_GROWTH:
        verdict = Verdict.BACKLOGGED
    else:
        verdict = Verdict.STABLE
    return Steadiness(verdict, growth, p_value, float(backlog[0]), float(backlog[-1]))


def mean_backlog(arrived_s: Floats, ended_s: Floats, window: Window) -> Floats:
    """The number of requests in the system, averaged over each part of the window."""
    edges = np.linspace(window.start_s, window.end_s, PARTS + 1)
    # The time that requests spent in the system up to each edge; its differences are those within the parts.
    spent = np.array([np.clip(np.minimum(ended_s, edge) - arrived_s, 0.0, None).sum() for edge in edges])
    return np.diff(spent) / (window.length_s / PARTS)


def slope(values: Floats) -> float:
    """Theil and Sen's: the median of the slopes between all pairs, which a burst at either end does not decide."""
    low, high = np.triu_indices(len(values), k=1)
    return float(np.median((values[high] - values[low]) / (high - low)))


def no_growth(values: Floats) -> float:
    """Mann and Kendall's test: how likely so many ascents would be if the order were mere chance."""
    low, high = np.triu_indices(len(values), k=1)
    score = float(np.sign(values[high] - values[low]).sum())
    n = len(values)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return 1 - NormalDist().cdf((score - math.copysign(1, score)) / deviation) if score else 0.5


@dataclass(frozen=True, slots=True)
class Block:
    """Requests that came one after another, and those of them that met the objective."""

    requests: int
    good: int


@dataclass(frozen=True, slots=True)
class Share:
    """A share of requests with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Share:
        return Share(self.value * factor, self.low * factor, self.high * factor)


def blocks(good: Sequence[bool] | NDArray[np.bool_]) -> tuple[Block, ...]:
    """Cut into up to BLOCKS blocks, in order of arrival. Neighbours share their luck, blocks hardly do."""
    flags = np.asarray(good, dtype=bool)
    if not len(flags):
        return ()
    number = max(min(BLOCKS, len(flags) // _MIN_BLOCK), 1)
    return tuple(Block(len(part), int(part.sum())) for part in np.array_split(flags, number))


@lru_cache(maxsize=4096)
def share(of: tuple[Block, ...], seed: int = 0) -> Share:
    """By a bootstrap over blocks. Never narrower than Wilson's interval: where all requests were good, or none, blocks
    that are drawn again say nothing about the next request."""
    total = sum(block.requests for block in of)
    if not total:
        return Share(math.nan, math.nan, math.nan)
    value = sum(block.good for block in of) / total
    drawn = resampled(of, seed)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    wilson_low, wilson_high = wilson(value, total)
    return Share(value, float(min(low, wilson_low)), float(max(high, wilson_high)))


def resampled(of: Sequence[Block], seed: int = 0, resamples: int = _RESAMPLES) -> Floats:
    """The share of good requests in each of `resamples` drawings of as many blocks, with replacement.

    The same seed and number of blocks give the same drawings, so that configurations compared stay paired.
    """
    requests = np.array([block.requests for block in of], dtype=float)
    good = np.array([block.good for block in of], dtype=float)
    chosen = np.random.default_rng(seed).integers(0, len(of), size=(resamples, len(of)))
    found: Floats = good[chosen].sum(axis=1) / requests[chosen].sum(axis=1)
    return found


def wilson(value: float, total: int) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (value + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(value * (1 - value) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(middle - half, 0.0), min(middle + half, 1.0)
