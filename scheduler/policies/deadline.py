"""The earliest deadline first; what has none comes last, first come, first served."""

from __future__ import annotations

from math import inf

from baton.scheduler.queue import Order
from baton.scheduler.sequence import Sequence


def order(sequence: Sequence) -> Order:
    deadline_s = sequence.request.deadline_s
    return (inf if deadline_s is None else sequence.added_s + deadline_s, sequence.arrival_number)
