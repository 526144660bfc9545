"""Sequences in the order of a policy.

Owns: `SequenceQueue`, a sorted list. Refuses to know: what the order means, and what state its members are in.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from operator import attrgetter

from baton.scheduler.sequence import Sequence

RANK = attrgetter("rank")


class SequenceQueue:
    """Sequences sorted by rank.

    `sequences` is read by whoever likes, first comes first; only the methods write to it.
    """

    __slots__ = ("sequences",)

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def first(self) -> Sequence:
        return self.sequences[0]

    def add(self, sequence: Sequence) -> None:
        sequences = self.sequences
        if not sequences or sequences[-1].rank < sequence.rank:
            sequences.append(sequence)
        else:
            sequences.insert(bisect_left(sequences, sequence.rank, key=RANK), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if it is not a member."""
        index = bisect_left(self.sequences, sequence.rank, key=RANK)
        if index == len(self.sequences) or self.sequences[index] is not sequence:
            raise ValueError(f"{sequence} is not in this queue")
        del self.sequences[index]

    def check(self) -> None:
        """Raises AssertionError if it is out of order."""
        ranks = [sequence.rank for sequence in self.sequences]
        assert all(before < after for before, after in pairwise(ranks)), ranks
