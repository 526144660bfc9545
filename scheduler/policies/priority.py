"""The most urgent first (the lower number); among equals, first come, first served."""

from __future__ import annotations

from baton.scheduler.queue import Order
from baton.scheduler.sequence import Sequence


def order(sequence: Sequence) -> Order:
    return (sequence.priority, sequence.arrival_number)
