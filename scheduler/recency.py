"""Keys in the order in which they were last touched, in memory that is read from one end to the other.

Owns: `Recency`. Refuses to know: what the keys are, and when one is to go.

Keys are touched in batches and go in batches, oldest first. So the order is a queue of batches, and a key knows the one
that it was last in; what it left behind in older ones is passed over when their turn comes.

    batches   2: a b c    3: d    5: e b        last in   a 2, c 2, d 3, e 5, b 5        oldest first   a c d e b
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_LEFT_BEHIND = 1024
"""So many keys, and as many as there are, may have been left behind in batches before these are made anew."""


class Recency(Generic[Key]):
    """`batch_of` has the keys, each with the number of its batch; only the methods write to it."""

    __slots__ = ("_batches", "_first", "_num_noted", "batch_of")

    def __init__(self) -> None:
        self.batch_of: dict[Key, int] = {}
        self._batches: deque[list[Key]] = deque()  # each reversed: its oldest key is its last
        self._first = 0  # the number of the first batch
        self._num_noted = 0  # keys in all batches, those left behind included

    def __len__(self) -> int:
        return len(self.batch_of)

    def __contains__(self, key: object) -> bool:
        return key in self.batch_of

    def __iter__(self) -> Iterator[Key]:
        """Oldest first."""
        for number, batch in enumerate(self._batches, start=self._first):
            yield from [key for key in reversed(batch) if self.batch_of.get(key) == number]

    def touch(self, keys: Sequence[Key]) -> None:
        """These, each named once, are the youngest now, the last of them the youngest of all."""
        batch_of, number = self.batch_of, self._first + len(self._batches)
        for key in keys:
            batch_of[key] = number
        self._batches.append(list(reversed(keys)))
        self._num_noted += len(keys)
        if self._num_noted > 2 * len(self.batch_of) + _LEFT_BEHIND:
            self._forget_what_was_left_behind()

    def remove(self, key: Key) -> None:
        """Raises KeyError if it is not there."""
        del self.batch_of[key]

    def pop_oldest(self, number: int) -> list[Key]:
        """Takes out that many, oldest first; there must be so many."""
        batch_of = self.batch_of
        popped: list[Key] = []
        while (missing := number - len(popped)) > 0:
            batch, first = self._batches[0], self._first
            oldest = batch[: -missing - 1 : -1]
            del batch[-missing:]
            if self._num_noted > len(batch_of):
                there = [key for key in oldest if batch_of.get(key) == first]
            else:
                there = oldest  # nobody has left anything behind
            self._num_noted -= len(oldest)
            for key in there:
                del batch_of[key]
            popped += there
            if not batch:
                self._batches.popleft()
                self._first += 1
        return popped

    def _forget_what_was_left_behind(self) -> None:
        keys = list(self)
        self._batches.clear()
        self._num_noted = 0
        self._first += 1
        self.batch_of.clear()
        if keys:
            self.touch(keys)
