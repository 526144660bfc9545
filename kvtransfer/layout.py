"""Where KV lies in a pool, and which pieces of one pool belong to which pieces of another.

Owns: the arithmetic of the pool layout (heads over ranks, copies and checksums of blocks).
Refuses to know: transports, sequences, who asks.

    pool tensor, contiguous: [block][layer][kv_head][K,V][token][head_dim]
    rows(pool):              [block][word]            one row is one block, one contiguous piece of memory
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.kvtransfer.runs import Run, coalesce

__all__ = ["HeadSlice", "Run", "checksum", "coalesce", "copy_runs", "head_map", "rows"]

_WORD_BYTES = 8


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


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The pool as one row of int64 words a block (of bytes, where a block is no whole number of words); no copy.

    Raises ValueError if the tensor is not contiguous: a block would not be one piece of memory.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a KV pool must be contiguous, its strides are {tensor.stride()}")
    block_bytes = tensor[0].numel() * tensor.element_size()
    flat = tensor.view(tensor.shape[0], -1)
    return flat.view(torch.uint8 if block_bytes % _WORD_BYTES else torch.int64)


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


def checksum(tensor: torch.Tensor, block_ids: Sequence[int]) -> int:
    """crc32 of the vector of the blocks' int64 sums, in the order named: a swap of two blocks changes it.

    The sums wrap. It catches blocks that are missing, stale or in the wrong place, not words swapped within a block.
    """
    table = rows(tensor)
    if table.device.type == "cpu":
        words = table.numpy()
        sums = np.fromiter((words[block].sum(dtype=np.int64) for block in block_ids), np.int64, len(block_ids))
    else:
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=table.device)
        sums = table[index].sum(dim=1, dtype=torch.int64).cpu().numpy()
    return zlib.crc32(sums.tobytes())
