"""Where KV lies in a pool, and which pieces of one pool belong to which pieces of another.

Owns: the arithmetic of the pool layout (heads over ranks, heads of blocks, copies and checksums of blocks).
Refuses to know: transports, sequences, who asks.

    pool tensor, contiguous: [block][layer][kv_head][K,V][token][head_dim]
    rows(pool):              [block][word]            one row is one block, one contiguous piece of memory

    heads of a block:        [layer][kv_head]        a piece is `unit` heads of one layer of one block
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.kvtransfer.runs import Run, coalesce, require_pairs

Indices = npt.NDArray[np.int64]

__all__ = ["HeadSlice", "Run", "checksum", "coalesce", "copy_runs", "head_map", "rows"]

Blocks = npt.NDArray[np.int64]

_WORD_BYTES = 8
_MODULUS = 1 << 32


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """`num_heads` KV heads that one decode rank reads from one prefill rank; first heads count within each rank."""

    decode_rank: int
    prefill_rank: int
    source_head: int
    destination_head: int
    num_heads: int


def head_map(prefill_tp: int, decode_tp: int, num_kv_heads: int) -> list[HeadSlice]:
    """Which heads each decode rank reads from which prefill rank, in order of decode rank and destination head.

    A rank of `tp` holds `num_kv_heads / tp` heads in order; with more ranks than heads, `tp / num_kv_heads`
    neighbouring ranks hold the same head, and the decode ranks that want it spread over those that have it. Raises
    ValueError where neither divides the other.
    """
    for side, tp in (("prefill", prefill_tp), ("decode", decode_tp)):
        if tp < 1 or num_kv_heads < 1 or (num_kv_heads % tp and tp % num_kv_heads):
            raise ValueError(f"{num_kv_heads} KV heads cannot be shared by {side} tensor parallel {tp}")
    prefill_heads = max(1, num_kv_heads // prefill_tp)
    decode_heads = max(1, num_kv_heads // decode_tp)
    prefill_copies = max(1, prefill_tp // num_kv_heads)
    decode_copies = max(1, decode_tp // num_kv_heads)
    slices: list[HeadSlice] = []
    for decode_rank in range(decode_tp):
        first = decode_rank // decode_copies * decode_heads
        replica = decode_rank % decode_copies
        head = first
        while head < first + decode_heads:
            owner = head // prefill_heads
            source_head = head - owner * prefill_heads
            num_heads = min(prefill_heads - source_head, first + decode_heads - head)
            prefill_rank = owner * prefill_copies + replica % prefill_copies
            slices.append(HeadSlice(decode_rank, prefill_rank, source_head, head - first, num_heads))
            head += num_heads
    return slices


@dataclass(frozen=True, slots=True)
class HeadCut:
    """`num_heads` heads from `source_head` on of blocks of `source_heads`, into heads from `destination_head` on."""

    source_heads: int
    destination_heads: int
    source_head: int
    destination_head: int
    num_heads: int

    @classmethod
    def of(cls, source: range, destination: range, wanted: range) -> HeadCut:
        """The cut that moves the heads `wanted` between pools with these heads; raises ValueError if one lacks some."""
        for side, heads in (("source", source), ("destination", destination)):
            if not (wanted and wanted.start >= heads.start and wanted.stop <= heads.stop):
                raise ValueError(f"KV heads {_span(wanted)} wanted, the {side} has {_span(heads)}")
        return cls(
            len(source), len(destination), wanted.start - source.start, wanted.start - destination.start, len(wanted)
        )

    @property
    def is_whole(self) -> bool:
        """Whether blocks move as they are."""
        return self.num_heads == self.source_heads == self.destination_heads

    @property
    def unit(self) -> int:
        """The most heads of which both pools, and what moves, are whole multiples."""
        places = (self.source_head, self.destination_head)
        return math.gcd(self.source_heads, self.destination_heads, self.num_heads, *places)

    def source_pieces(self, blocks: Blocks, num_layers: int) -> Blocks:
        """The pieces to read, of a pool cut into pieces of `unit` heads: block after block, in the order given."""
        return _pieces(blocks, num_layers, self.source_heads, self.source_head, self.num_heads, self.unit)

    def destination_pieces(self, blocks: Blocks, num_layers: int) -> Blocks:
        """Where these go."""
        return _pieces(blocks, num_layers, self.destination_heads, self.destination_head, self.num_heads, self.unit)


def _span(heads: range) -> str:
    return f"[{heads.start}, {heads.stop})"


def _pieces(blocks: Blocks, num_layers: int, heads: int, first: int, count: int, unit: int) -> Blocks:
    layers = blocks[:, None] * num_layers + np.arange(num_layers, dtype=np.int64)
    return (layers[:, :, None] * (heads // unit) + np.arange(first // unit, (first + count) // unit)).reshape(-1)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The pool as one row of int64 words a block (of bytes, where a block is no whole number of words); no copy.

    Raises ValueError if the tensor is not contiguous: a block would not be one piece of memory.
    """
    return _as_words(tensor, 1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same a head: [block][layer][kv_head][word]. Heads decide on words, however many of them are in a block."""
    return _as_words(tensor, 3)


def _as_words(tensor: torch.Tensor, num_axes: int) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"a KV pool must be contiguous, its strides are {tensor.stride()}")
    flat = tensor.flatten(num_axes)
    row_bytes = flat.shape[-1] * flat.element_size()
    return flat.view(torch.uint8 if row_bytes % _WORD_BYTES else torch.int64)


def copy_runs(source: torch.Tensor, destination: torch.Tensor, runs: Sequence[Run]) -> None:
    """Copies runs of blocks from one pool of this process into another.

    In host memory by numpy: torch would start a team of OpenMP threads for each thread that calls it.
    """
    source_rows, destination_rows = rows(source), rows(destination)
    on_host = source.device.type == destination.device.type == "cpu"
    for run in runs:
        taken = source_rows[run.source : run.source + run.length]
        given = destination_rows[run.destination : run.destination + run.length]
        if on_host:
            np.copyto(given.numpy(), taken.numpy())
        else:
            given.copy_(taken)


def copy_heads(
    source: torch.Tensor,
    destination: torch.Tensor,
    source_blocks: Sequence[int],
    destination_blocks: Sequence[int],
    cut: HeadCut,
) -> None:
    """Copies some heads of blocks of one pool of this process into another."""
    coalesce(source_blocks, destination_blocks)  # refuses what is ambiguous
    taken = _words(source)[:, :, cut.source_head : cut.source_head + cut.num_heads]
    given = _words(destination)[:, :, cut.destination_head : cut.destination_head + cut.num_heads]
    given[list(destination_blocks)] = taken[list(source_blocks)]


def head_checksums(tensor: torch.Tensor, block_ids: Sequence[int], first_head: int = 0) -> tuple[int, ...]:
    """For each head of the pool the crc32 of its int64 sums over each of the blocks, times an odd number of its own.

    The sums wrap. Blocks that are missing, stale or in the wrong place show, heads too; not words swapped within one.
    """
    table = _words(tensor)
    if table.device.type == "cpu":
        words = table.numpy()
        parts = [words[block].sum(axis=(0, 2), dtype=np.int64) for block in block_ids]
        sums = np.stack(parts, axis=1) if parts else np.zeros((tensor.shape[2], 0), np.int64)
    else:
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=table.device)
        sums = table[index].sum(dim=(1, 3), dtype=torch.int64).t().cpu().numpy()
    return tuple(zlib.crc32(row.tobytes()) * (2 * head + 1) % _MODULUS for head, row in enumerate(sums, first_head))


def checksum(tensor: torch.Tensor, block_ids: Sequence[int], first_head: int = 0) -> int:
    """What `head_checksums` says, in one number: that of a model's heads is the same however they are split."""
    return joined(head_checksums(tensor, block_ids, first_head))


def joined(checksums: Iterable[int]) -> int:
    """One number for those of several heads, in any order."""
    return sum(checksums) % _MODULUS


def ascending(source_blocks: Sequence[int], destination_blocks: Sequence[int]) -> tuple[Indices, Indices]:
    """Sources and destinations in ascending order of destination. Raises ValueError as `coalesce` does."""
    require_pairs(source_blocks, destination_blocks)
    destination = np.array(destination_blocks, np.int64)
    order = destination.argsort()
    return np.array(source_blocks, np.int64)[order], destination[order]
