"""Which blocks of a read lie side by side on both sides, and so move as one piece.

Owns: `Run` and the way to the fewest of them. Refuses to know: bytes, pools, transports.

    destination   3  4  5  9        coalesce         Run(source=7, destination=3, length=2)
    source        7  8  2  3    ------------->       Run(source=2, destination=5, length=1)
                                                     Run(source=3, destination=9, length=1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """`length` blocks that are consecutive on both sides."""

    source: int
    destination: int
    length: int


def coalesce(source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> list[Run]:
    """The fewest runs that move each source block to its destination, in ascending order of destination.

    Raises ValueError if the lists differ in length or a destination is named twice.
    """
    if len(source_blocks) != len(destination_blocks):
        raise ValueError(f"{len(source_blocks)} source blocks for {len(destination_blocks)} destination blocks")
    if len(set(destination_blocks)) != len(destination_blocks):
        raise ValueError(f"a destination block is named twice among {len(destination_blocks)}")
    runs: list[Run] = []
    for destination, source in sorted(zip(destination_blocks, source_blocks, strict=True)):
        last = runs[-1] if runs else None
        if last and destination == last.destination + last.length and source == last.source + last.length:
            runs[-1] = Run(last.source, last.destination, last.length + 1)
        else:
            runs.append(Run(source, destination, 1))
    return runs
