"""Steps that were planned and are not committed yet.

Owns: which they are, who has left them since their plan, and the blocks that they may still write to although their
sequence has lost them. Refuses to know: why a sequence leaves, and what becomes of blocks.

    plan -> begin(step) --- leave(sequence, ...) ---> end(step) -> Flight -> commit
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.scheduler.plan import Step
from baton.scheduler.sequence import Sequence


@dataclass(slots=True)
class Flight:
    """One step, whose results for the `departed` are not wanted, and the blocks that are quiet once it is committed."""

    step: Step
    departed: set[Sequence] = field(default_factory=set)
    block_ids: list[int] = field(default_factory=list)

    def start_of(self, sequence: Sequence) -> int | None:
        """The first token that the step computes for a sequence; None if it computes none, or none any more."""
        if sequence in self.departed:
            return None
        return next((chunk.start for chunk in self.step.chunks if chunk.sequence is sequence), None)


class StepsInFlight:
    """Steps end in the order in which they began."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, step: Step) -> None:
        self._flights[step.number] = Flight(step)

    def end(self, step: Step) -> Flight:
        """Raises KeyError if the step is not in flight."""
        return self._flights.pop(step.number)

    def first_token_of(self, sequence: Sequence) -> int | None:
        """The first token of a sequence that any step may still write; None if none does."""
        starts = (flight.start_of(sequence) for flight in self._flights.values())
        return next((start for start in starts if start is not None), None)

    def leave(self, sequence: Sequence, block_ids: list[int]) -> None:
        """A sequence that is in flight takes no part any more; `block_ids` are quiet once its last step has ended."""
        flights = [flight for flight in self._flights.values() if flight.start_of(sequence) is not None]
        flights[-1].block_ids.extend(block_ids)
        for flight in flights:
            flight.departed.add(sequence)

    def block_ids(self) -> list[int]:
        """Blocks that sequences have lost to steps in flight."""
        return [block_id for flight in self._flights.values() for block_id in flight.block_ids]
