"""First come, first served."""

from __future__ import annotations

from baton.scheduler.sequence import Rank, Sequence


def order(sequence: Sequence) -> Rank:
    return (sequence.arrival_number,)
