"""The most urgent first (the lower number); among equals, first come, first served."""

from __future__ import annotations

from baton.scheduler.sequence import Rank, Sequence


def order(sequence: Sequence) -> Rank:
    return (sequence.priority, sequence.arrival_number)
