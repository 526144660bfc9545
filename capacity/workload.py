"""Synthetic traffic with the lengths, bursts and shared prefixes of real traffic.

Owns: the quantiles of published traces, the way back from quantiles to lengths (inverse of a distribution function that
is linear between them), arrival processes and which requests share a prefix. Everything follows from the seed.
Refuses to know: tokens, tokenizers, clocks and servers. It says when a request of which size should come.

    requests("chat", num_requests=200, rate=2.0, seed=1) -> [Arrival(time_s, prompt_tokens, output_tokens, ...), ...]
    arrivals("chat", rate=2.0, seed=1)                   -> the same without an end, one by one
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import NormalDist


class UnknownWorkload(ValueError):
    """A name that is neither a workload nor `fixed:IN/OUT` or `random:IN/OUT`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt. Stretches of one name begin with the same tokens, in whichever request they stand."""

    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `session` names the conversation or document that it belongs to.

    Its first `prefix_tokens` tokens are those of the session's request before it; the first `shared_tokens` are those
    of every request of the workload. Both are 0 where nothing is shared. A replayed request may instead tell the ids of
    its first blocks, each of `block_tokens` tokens: equal ids are equal tokens.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    session: int
    prefix_tokens: int = 0
    shared_tokens: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0

    @property
    def pieces(self) -> Iterator[Piece]:
        """What the prompt is made of, from its beginning to its end. This is all that decides what requests share."""
        left = self.prompt_tokens
        for block in self.blocks:
            if taken := min(self.block_tokens, left):
                yield Piece(f"block/{block}", taken)
                left -= taken
        if shared := min(self.shared_tokens, left):
            yield Piece("shared", shared)
            left -= shared
        if left:
            yield Piece(f"session/{self.session}", left)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths by their quantiles: linear in between, flat beyond the outermost two.

    `points` are fractions, ascending; `values` the lengths there.
    """

    points: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.points) != len(self.values) or not self.points:
            raise ValueError("as many values as points are needed, and at least one")
        if any(a >= b for a, b in pairwise(self.points)) or any(a > b for a, b in pairwise(self.values)):
            raise ValueError("points must ascend, and values must not descend")

    def at(self, fraction: float) -> float:
        """The length that `fraction` of the requests do not exceed."""
        right = bisect_right(self.points, fraction)
        if right == 0:
            return self.values[0]
        if right == len(self.points):
            return self.values[-1]
        low, high = self.points[right - 1], self.points[right]
        share = (fraction - low) / (high - low)
        return self.values[right - 1] + share * (self.values[right] - self.values[right - 1])

    def mean(self) -> float:
        inner = sum(
            (p1 - p0) * (v0 + v1) / 2 for (p0, v0), (p1, v1) in pairwise(zip(self.points, self.values, strict=True))
        )
        return inner + self.points[0] * self.values[0] + (1 - self.points[-1]) * self.values[-1]


@dataclass(frozen=True, slots=True)
class Silences:
    """Traffic that is on and off: a `share` of the gaps are long.

    `length_s` is at `rate` requests a second, that of the trace; at another rate all time passes faster or slower,
    silences included.
    """

    share: float
    length_s: Quantiles
    rate: float

    def in_gaps(self) -> float:
        """Their mean length, in mean gaps."""
        return self.length_s.mean() * self.rate


@dataclass(frozen=True, slots=True)
class Mix:
    """One kind of traffic.

    `gap_cv`: standard deviation of the time between arrivals over its mean; 1 is Poisson, above is bursty (Gamma).
    `silences`: times without any arrival, on top of that. `rank_correlation`: Spearman's, of prompt and output length.
    `follow_ups`: the share of requests that continue an earlier one, after a time with the quantiles `reuse_gap_s`.
    `shared_tokens`: a prefix that all requests have.
    """

    prompt: Quantiles
    output: Quantiles
    gap_cv: float = 1.0
    silences: Silences | None = None
    rank_correlation: float = 0.0
    follow_ups: float = 0.0
    reuse_gap_s: Quantiles | None = None
    shared_tokens: int = 0


_POINTS = (0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)
_REUSE_GAP_S = Quantiles((0.10, 0.50, 0.90), (42, 123, 483))

# Azure LLM inference traces of 2023 and (read from plots) 2024; Mooncake's conversation and synthetic traces.
MIXES = {
    "chat": Mix(
        prompt=Quantiles(_POINTS, (29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142)),
        output=Quantiles(_POINTS, (16, 41, 54, 85, 129, 395, 424, 451, 601)),
        gap_cv=1.02,
    ),
    "code": Mix(
        prompt=Quantiles(_POINTS, (17, 75, 147, 578, 1469, 2744, 5188, 7303, 7436)),
        output=Quantiles(_POINTS, (6, 6, 7, 9, 13, 24, 55, 90, 251)),
        # Inside windows of a minute the gaps vary by 4.3; with the silences, by 13 over the whole.
        gap_cv=4.6,
        silences=Silences(share=0.0015, length_s=Quantiles((0.0, 1.0), (15, 217)), rate=2.57),
    ),
    "long-chat": Mix(
        prompt=Quantiles(_POINTS, (894, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400)),
        output=Quantiles(_POINTS, (3, 10, 24, 156, 350, 472, 597, 698, 1119)),
        follow_ups=0.39,
        reuse_gap_s=_REUSE_GAP_S,
        shared_tokens=512,
    ),
    "doc-qa": Mix(
        prompt=Quantiles(_POINTS, (16, 22, 30, 277, 11587, 23175, 38611, 48905, 66456)),
        output=Quantiles(_POINTS, (2, 2, 4, 11, 69, 250, 389, 519, 768)),
        rank_correlation=-0.52,
        follow_ups=0.75,
        reuse_gap_s=_REUSE_GAP_S,
    ),
    "chat-2024": Mix(
        prompt=Quantiles((0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.98), (293, 541, 914, 2341, 3761, 4869, 5889)),
        output=Quantiles((0.50, 0.75, 0.90, 0.95, 0.98), (33, 100, 338, 449, 587)),
    ),
    "code-2024": Mix(
        prompt=Quantiles((0.10, 0.25, 0.50, 0.75, 0.90, 0.95), (337, 922, 1916, 3326, 6120, 7660)),
        output=Quantiles((0.50, 0.75, 0.90, 0.95, 0.98), (6, 11, 39, 72, 166)),
    ),
}

# The ratio of prompt to output moves from 5 over 73 to 35, which no fixed ratio of workers suits.
SHIFT = ("chat", "code", "long-chat")
PHASE_S = 180.0
_PHASE_REQUESTS = 100
NAMES = (*MIXES, "shift")

_MAX_SESSIONS = 2048
_GAP_TOLERANCE = 0.2
_SIZED = re.compile(r"(fixed|random):(\d+)/(\d+)")


def requests(
    name: str, num_requests: int, rate: float = math.inf, seed: int = 0, scale_lengths: float = 1.0
) -> list[Arrival]:
    """The first `num_requests` of `arrivals`. `scale_lengths` is for prompts and outputs."""
    if num_requests < 0:
        raise ValueError("num_requests must not be negative")
    return list(islice(arrivals(name, rate, seed, scale_lengths, scale_lengths), num_requests))


def arrivals(
    name: str, rate: float = math.inf, seed: int = 0, scale_prompts: float = 1.0, scale_outputs: float = 1.0
) -> Iterator[Arrival]:
    """Arrivals without an end in order of time, at `rate` a second on average; infinite: all at once.

    `name` is one of NAMES, or `fixed:IN/OUT` for exact lengths, or `random:IN/OUT` for lengths spread evenly from half
    to one and a half times that. `shift` is PHASE_S seconds of each of its three mixes in turn, over and over (at an
    infinite rate, a hundred requests of each). The scales multiply lengths, and keep each at 1 or above.
    """
    if not rate > 0 or not 0 < scale_prompts < math.inf or not 0 < scale_outputs < math.inf:
        raise ValueError("rate and scales of lengths must be above 0")
    scale = _Scale(scale_prompts, scale_outputs)
    if name == "shift":
        return _shift(rate, seed, scale)
    return _generate(mix(name), rate, random.Random(f"{seed}/{name}"), scale)


def mix(name: str) -> Mix:
    """The mix of that name, `fixed:` and `random:` included."""
    if name in MIXES:
        return MIXES[name]
    sized = _SIZED.fullmatch(name)
    if sized is None or "0" in (sized[2], sized[3]):
        raise UnknownWorkload(f"unknown workload {name!r}: {', '.join(NAMES)}, fixed:IN/OUT or random:IN/OUT")
    prompt, output = int(sized[2]), int(sized[3])
    if sized[1] == "fixed":
        return Mix(Quantiles((0.5,), (prompt,)), Quantiles((0.5,), (output,)))
    return Mix(Quantiles((0.0, 1.0), (prompt / 2, prompt * 1.5)), Quantiles((0.0, 1.0), (output / 2, output * 1.5)))


@dataclass(frozen=True, slots=True)
class _Scale:
    prompts: float
    outputs: float


def _shift(rate: float, seed: int, scale: _Scale) -> Iterator[Arrival]:
    phase_s, phase_requests = (math.inf, _PHASE_REQUESTS) if math.isinf(rate) else (PHASE_S, None)
    start_s, sessions, phase = 0.0, 0, 0
    while True:
        name = SHIFT[phase % len(SHIFT)]
        generator = random.Random(f"{seed}/shift/{phase}")
        last = -1
        for arrival in islice(_generate(MIXES[name], rate, generator, scale), phase_requests):
            if arrival.time_s >= phase_s:
                break
            last = max(last, arrival.session)
            yield replace(arrival, time_s=arrival.time_s + start_s, session=arrival.session + sessions)
        sessions += last + 1
        start_s += phase_s if math.isfinite(phase_s) else 0.0
        phase += 1


def _generate(mix: Mix, rate: float, generator: random.Random, scale: _Scale) -> Iterator[Arrival]:
    next_gap = _gaps(mix, rate, generator)
    sessions = _Sessions()
    time_s = 0.0
    while True:
        time_s += next_gap()
        prompt_fraction, output_fraction = _fractions(mix.rank_correlation, generator)
        prompt = max(round(mix.prompt.at(prompt_fraction) * scale.prompts), 1)
        output = max(round(mix.output.at(output_fraction) * scale.outputs), 1)
        shared = min(round(mix.shared_tokens * scale.prompts), prompt)
        previous = None
        if mix.reuse_gap_s is not None and generator.random() < mix.follow_ups:
            previous = sessions.continued(time_s, mix.reuse_gap_s.at(generator.random()), prompt)
        session = previous.session if previous is not None else sessions.opened()
        prefix = previous.prompt_tokens if previous is not None else 0
        arrival = Arrival(time_s, prompt, output, session, prefix, shared)
        if mix.reuse_gap_s is not None:
            sessions.add(arrival)
        yield arrival


def _gaps(mix: Mix, rate: float, generator: random.Random) -> Callable[[], float]:
    """Times between arrivals, of mean 1 / rate: Gamma with the shape that gives the coefficient of variation wanted,
    and silences at random, for which the other gaps are shorter."""
    if math.isinf(rate):
        return lambda: 0.0
    shape, silences = mix.gap_cv**-2, mix.silences
    if silences is None:
        return lambda: generator.gammavariate(shape, 1 / (rate * shape))
    on_rate = rate * (1 - silences.share) / (1 - silences.share * silences.in_gaps())

    def gap() -> float:
        if generator.random() < silences.share:
            return silences.length_s.at(generator.random()) * silences.rate / rate
        return generator.gammavariate(shape, 1 / (on_rate * shape))

    return gap


def _fractions(rank_correlation: float, generator: random.Random) -> Sequence[float]:
    """Two even draws from [0, 1) with this rank correlation (a Gaussian copula)."""
    if rank_correlation == 0:
        return generator.random(), generator.random()
    pearson = 2 * math.sin(math.pi / 6 * rank_correlation)
    first, independent = generator.gauss(), generator.gauss()
    second = pearson * first + math.sqrt(1 - pearson**2) * independent
    normal = NormalDist()
    return normal.cdf(first), normal.cdf(second)


class _Sessions:
    """The latest requests of the sessions that may go on.

    A follow-up continues the longest of those that are shorter than itself, came about as long ago as wanted and are
    still their session's last: a conversation grows by little, and lengths keep their distribution.
    """

    def __init__(self) -> None:
        self._latest: dict[int, Arrival] = {}
        self._num_opened = 0

    def opened(self) -> int:
        self._num_opened += 1
        return self._num_opened - 1

    def add(self, arrival: Arrival) -> None:
        """Notes a session's new last request; forgets the session that has rested longest when there are too many."""
        self._latest.pop(arrival.session, None)
        self._latest[arrival.session] = arrival
        if len(self._latest) > _MAX_SESSIONS:
            del self._latest[next(iter(self._latest))]

    def continued(self, now_s: float, gap_s: float, prompt_tokens: int) -> Arrival | None:
        shorter = [arrival for arrival in self._latest.values() if arrival.prompt_tokens < prompt_tokens]
        fitting = [arrival for arrival in shorter if abs(now_s - arrival.time_s - gap_s) <= _GAP_TOLERANCE * gap_s]
        if fitting:
            return max(fitting, key=lambda arrival: arrival.prompt_tokens)
        return min(shorter, key=lambda arrival: abs(now_s - arrival.time_s - gap_s), default=None)
