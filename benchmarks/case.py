"""What every case of `make bench` is told: which peers are there, how long it may take, where it runs.

Owns: the options and how a case pins its own process. A case is a module `case_*.py` with `rows(options)`, which yields
a row as soon as it is known. Each runs in a process of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from peers import Peers, pin


@dataclass(frozen=True, slots=True)
class Options:
    """`rounds` of 0 leaves the number to the case. `quick` is a look at whether all runs: its figures mean nothing."""

    model: str
    quick: bool
    rounds: int
    peers: Peers | None
    cores: tuple[int, ...]

    def rounds_or(self, usual: int) -> int:
        return self.rounds or (1 if self.quick else usual)

    @property
    def core(self) -> int:
        """Where both sides of a case for one core run, one after the other. The first one has more interrupts."""
        return self.cores[-1]

    def pin_here(self) -> None:
        """This process and the threads that it starts from now on."""
        pin(os.getpid(), {self.core})
