"""Sequences in the order of a policy.

Owns: `SequenceQueue`, a sorted list. Refuses to know: what the order means, and what state its members are in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

from baton.scheduler.sequence import Sequence

Order = tuple[float, ...]


class SequenceQueue:
    """Sequences sorted by `order`, which must be unique to a sequence and must never change.

    `sequences` is read by whoever likes, first comes first; only the methods write to it.
    """

    __slots__ = ("_order", "sequences")

    def __init__(self, order: Callable[[Sequence], Order]) -> None:
        self._order = order
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def first(self) -> Sequence:
        return self.sequences[0]

    def add(self, sequence: Sequence) -> None:
        order = self._order(sequence)
        if not self.sequences or self._order(self.sequences[-1]) < order:
            self.sequences.append(sequence)
        else:
            self.sequences.insert(bisect_left(self.sequences, order, key=self._order), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if it is not a member."""
        index = bisect_left(self.sequences, self._order(sequence), key=self._order)
        if index == len(self.sequences) or self.sequences[index] is not sequence:
            raise ValueError(f"{sequence} is not in this queue")
        del self.sequences[index]

    def check(self) -> None:
        """Raises AssertionError if it is out of order."""
        orders = [self._order(sequence) for sequence in self.sequences]
        assert all(before < after for before, after in pairwise(orders)), orders
