"""Keys in the order in which they were last touched, in memory that is read from one end to the other.

Owns: `Recency`, of any keys, and `BlockRecency`, of the numbers of a pool's blocks.
Refuses to know: what the keys are, and when one is to go.

Keys are touched in batches and go in batches, oldest first. So the order is a queue of batches, and a key knows the one
that it was last in; what it left behind in older ones is passed over when their turn comes.

    batches   2: a b c    3: d    5: e b        last in   a 2, c 2, d 3, e 5, b 5        oldest first   a c d e b
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_LEFT_BEHIND = 1024
"""So many keys, and as many as there are, may have been left behind in batches before these are made anew."""
_NOWHERE = -1


class Batches(ABC, Generic[Key]):
    """The queue. Who derives from it keeps the number of each key's batch, in a table of its own."""

    __slots__ = ("_batches", "_first", "_num_noted")

    def __init__(self) -> None:
        self._batches: deque[list[Key]] = deque()  # each reversed: its oldest key is its last
        self._first = 0  # the number of the first batch
        self._num_noted = 0  # keys in all batches, those left behind included

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Takes out a key that is there."""

    @abstractmethod
    def _put(self, keys: Sequence[Key], number: int) -> None:
        """They are in that batch now."""

    @abstractmethod
    def _still_in(self, keys: list[Key], number: int) -> list[Key]:
        """Those of them that are in that batch and in no later one."""

    @abstractmethod
    def _drop(self, keys: list[Key]) -> None:
        """They are in no batch any more."""

    def __iter__(self) -> Iterator[Key]:
        """Oldest first."""
        for number, batch in enumerate(self._batches, start=self._first):
            yield from self._still_in(batch[::-1], number)

    def touch(self, keys: Sequence[Key]) -> None:
        """These, each named once, are the youngest now, the last of them the youngest of all."""
        self._put(keys, self._first + len(self._batches))
        self._batches.append(list(reversed(keys)))
        self._num_noted += len(keys)
        if self._num_noted > 2 * len(self) + _LEFT_BEHIND:
            self._forget_what_was_left_behind()

    def pop_oldest(self, number: int) -> list[Key]:
        """Takes out that many, oldest first; there must be so many."""
        popped: list[Key] = []
        while (missing := number - len(popped)) > 0:
            batch, first = self._batches[0], self._first
            oldest = batch[: -missing - 1 : -1]
            del batch[-missing:]
            # As many noted as there are: nobody has left anything behind.
            there = self._still_in(oldest, first) if self._num_noted > len(self) else oldest
            self._num_noted -= len(oldest)
            self._drop(there)
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
        self._drop(keys)
        if keys:
            self.touch(keys)


class Recency(Batches[Key]):
    """`batch_of` has the keys, each with the number of its batch; only the methods write to it."""

    __slots__ = ("batch_of",)

    def __init__(self) -> None:
        super().__init__()
        self.batch_of: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self.batch_of)

    def __contains__(self, key: object) -> bool:
        return key in self.batch_of

    def remove(self, key: Key) -> None:
        """Raises KeyError if it is not there."""
        del self.batch_of[key]

    def _put(self, keys: Sequence[Key], number: int) -> None:
        batch_of = self.batch_of
        for key in keys:
            batch_of[key] = number

    def _still_in(self, keys: list[Key], number: int) -> list[Key]:
        batch_of = self.batch_of
        return [key for key in keys if batch_of.get(key) == number]

    def _drop(self, keys: list[Key]) -> None:
        batch_of = self.batch_of
        for key in keys:
            del batch_of[key]


class BlockRecency(Batches[int]):
    """Of the numbers 0 .. num_blocks - 1, of which only those may be touched that are not there."""

    __slots__ = ("_batch_of", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._batch_of = [_NOWHERE] * num_blocks
        self.num_blocks = 0
        """How many are there."""

    def __len__(self) -> int:
        return self.num_blocks

    def __contains__(self, block_id: int) -> bool:
        return self._batch_of[block_id] != _NOWHERE

    def remove(self, block_id: int) -> None:
        self._batch_of[block_id] = _NOWHERE
        self.num_blocks -= 1

    def _put(self, keys: Sequence[int], number: int) -> None:
        batch_of = self._batch_of
        for block_id in keys:
            batch_of[block_id] = number
        self.num_blocks += len(keys)

    def _still_in(self, keys: list[int], number: int) -> list[int]:
        batch_of = self._batch_of
        return [block_id for block_id in keys if batch_of[block_id] == number]

    def _drop(self, keys: list[int]) -> None:
        batch_of = self._batch_of
        for block_id in keys:
            batch_of[block_id] = _NOWHERE
        self.num_blocks -= len(keys)
