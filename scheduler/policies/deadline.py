"""The earliest deadline first; what has none comes last, first come, first served."""

from __future__ import annotations

from math import inf

from baton.scheduler.sequence import Rank, Sequence


def order(sequence: Sequence) -> Rank:
    deadline_s = sequence.request.deadline_s
    return (inf if deadline_s is None else sequence.added_s + deadline_s, sequence.arrival_number)
