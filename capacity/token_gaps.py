"""The time between tokens, of all sequences of one worker, without touching each token.

Owns: which sequences get a token at every step, and the steps' times as far as those need them.
Refuses to know: what a step is, and why a sequence misses one.

A sequence that had a token at the last step is in stride: its gap is the time between the two steps, so a step counts
once for all of them. Who misses a step falls out, with the time of its last token and its worst gap, and comes back
with its next token.
"""

from __future__ import annotations

from bisect import bisect_right

from baton.capacity.outcome import Histogram
from baton.scheduler.sequence import Sequence


class Reader:
    """Who reads a request's tokens: when the last one was made, and the longest time between two.

    `last_token_s` is that of tokens made while the sequence was not in stride.
    """

    __slots__ = ("last_token_s", "num_unsent", "worst_gap_s")

    def __init__(self) -> None:
        self.last_token_s: float | None = None
        self.worst_gap_s = 0.0
        self.num_unsent = 0

    def note(self, gap_s: float) -> None:
        if gap_s > self.worst_gap_s:
            self.worst_gap_s = gap_s


class _Stride:
    """One sequence in stride since step `since`."""

    __slots__ = ("reader", "since")

    def __init__(self, reader: Reader, since: int) -> None:
        self.reader = reader
        self.since = since


class TokenGaps:
    """Of one worker; counts into a histogram that may be others' too.

    The longest of the last gaps, for each of them, is found in a list of those that no later one exceeds:

        gaps    5  9  3  7  2      numbers 2 4 5      worst since step 3: the first number above 3, so 7
                                   kept    9 7 2
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._step = 0
        self._last_s = 0.0
        self._numbers: list[int] = []
        self._kept_s: list[float] = []
        self._strides: dict[Sequence, _Stride] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._strides

    def step(self, now: float) -> None:
        """All in stride have a token. First `leave` those who have none."""
        num_tokens = len(self._strides)
        gap_s, self._last_s = now - self._last_s, now
        self._step += 1
        if not num_tokens:
            self._numbers.clear()
            self._kept_s.clear()
            return
        self._histogram.add(gap_s, num_tokens)
        kept_s, numbers = self._kept_s, self._numbers
        while kept_s and kept_s[-1] <= gap_s:
            kept_s.pop()
            numbers.pop()
        kept_s.append(gap_s)
        numbers.append(self._step)

    def enter(self, sequence: Sequence, reader: Reader) -> None:
        """It has a token at this step, and had none at the last. After `step`."""
        if reader.last_token_s is not None:
            gap_s = self._last_s - reader.last_token_s
            self._histogram.add(gap_s)
            reader.note(gap_s)
        reader.last_token_s = self._last_s
        self._strides[sequence] = _Stride(reader, self._step)

    def leave(self, sequence: Sequence) -> None:
        """It had a token at the last step and gets none now; nothing if it was not in stride."""
        stride = self._strides.pop(sequence, None)
        if stride is None:
            return
        first = bisect_right(self._numbers, stride.since)
        if first < len(self._numbers):
            stride.reader.note(self._kept_s[first])
        stride.reader.last_token_s = self._last_s
