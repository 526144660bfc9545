"""First come, first served."""

from __future__ import annotations

from baton.scheduler.queue import Order
from baton.scheduler.sequence import Sequence


def order(sequence: Sequence) -> Order:
    return (sequence.arrival_number,)
