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

    Raises ValueError as `require_pairs` does.
    """
    require_pairs(source_blocks, destination_blocks)
    runs: list[Run] = []
    start = first = length = 0
    for destination, source in sorted(zip(destination_blocks, source_blocks, strict=True)):
        if length and destination == first + length and source == start + length:
            length += 1
            continue
        if length:
            runs.append(Run(start, first, length))
        start, first, length = source, destination, 1
    if length:
        runs.append(Run(start, first, length))
    return runs


def count_runs(source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> int:
    """How many runs `coalesce` finds, without making them."""
    require_pairs(source_blocks, destination_blocks)
    source_of = dict(zip(destination_blocks, source_blocks, strict=True))
    joined = [1 for destination, source in source_of.items() if source_of.get(destination + 1) == source + 1]
    return len(source_of) - len(joined)


def require_pairs(source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> None:
    """Raises ValueError if the lists differ in length or a destination is named twice."""
    if len(source_blocks) != len(destination_blocks):
        raise ValueError(f"{len(source_blocks)} source blocks for {len(destination_blocks)} destination blocks")
    if len(set(destination_blocks)) != len(destination_blocks):
        raise ValueError(f"a destination block is named twice among {len(destination_blocks)}")
