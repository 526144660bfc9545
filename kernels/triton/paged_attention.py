"""Causal attention of a step's tokens over keys and values that lie in blocks of the paged pool, on a GPU.

    out[t] = softmax_j(cap(q[t] . K[j] / sqrt(D))) . V[j]     position(t) - window < j <= position(t)

where K[j], V[j] of a sequence are pool[table[j // S], layer, :, 0 or 1, j % S]. H/K query heads share a KV head.
One-token sequences go to decode_attention.py, longer ones to chunk_attention.py; a step may hold both, in any order.
Unlike the plain kernel, what no row may see is never used, whatever it holds: the pool need not be finite there.

`plan_attention` turns the step's shape into one array of int32 and sends it to the device in one copy:

    | bounds of singles | bounds of chunks | tiles of chunks | tables of singles | tables of chunks |

Axes: T token of the step, H query head, K KV head, D feature of a head, N block, L layer, S token of a block.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.kernels.parcel import send
from baton.kernels.triton.chunk_attention import Chunks, chunk_attention, chunk_tokens
from baton.kernels.triton.decode_attention import Singles, decode_attention, splits_for
from baton.kernels.triton.operands import OperandError, require_pool

_INTERPRETED_PROCESSORS = 8  # the interpreter has none; this many let small contexts be split there too


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's shape on the host, for `reference`, and on the device, for the kernels."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: tuple[npt.NDArray[np.int64], ...]
    num_heads: int
    window: int
    soft_cap: float
    singles: Singles
    chunks: Chunks


def plan_attention(
    pool_NLK2SD: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[npt.NDArray[np.int64]],
    *,
    num_heads: int,
    window: int = 0,
    soft_cap: float = 0.0,
    num_splits: int = 0,
) -> AttentionPlan:
    """Plans attention for sequences whose last `query_lens[i]` of `context_lens[i]` tokens are in the step.

    `num_splits` 0 chooses; a captured graph fixes it, since it is part of the launch.
    """
    require_pool(pool_NLK2SD, 0)
    _check(pool_NLK2SD, query_lens, context_lens, block_tables, num_heads, window, soft_cap)
    num_kv_heads, block_size, dim = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4], pool_NLK2SD.shape[5]
    lengths = np.asarray(query_lens, dtype=np.int32)
    bounds = np.zeros((len(lengths), 4), dtype=np.int32)
    bounds[:, 0] = np.cumsum(lengths) - lengths
    bounds[:, 1] = lengths
    bounds[:, 2] = context_lens
    single = np.flatnonzero(lengths == 1)
    chunk = np.flatnonzero(lengths > 1)
    tiles = _tiles(bounds[chunk], chunk_tokens(num_heads // num_kv_heads, dim, pool_NLK2SD.dtype))
    parts = [
        bounds[single],
        bounds[chunk],
        tiles,
        _tables([block_tables[i] for i in single.tolist()], bounds[single, 2], block_size),
        _tables([block_tables[i] for i in chunk.tolist()], bounds[chunk, 2], block_size),
    ]
    on_device = send(parts, pool_NLK2SD.device)
    longest = int(bounds[single, 2].max(initial=0))
    if window:
        longest = min(longest, window)
    splits = num_splits or splits_for(len(single), num_kv_heads, longest, _num_processors(pool_NLK2SD.device))
    return AttentionPlan(
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        block_tables=tuple(block_tables),
        num_heads=num_heads,
        window=window,
        soft_cap=soft_cap,
        singles=Singles(on_device[0], on_device[3], splits),
        chunks=Chunks(on_device[1], on_device[2], on_device[4]),
    )


def fixed_plan(
    pool_NLK2SD: torch.Tensor, bounds_B4: torch.Tensor, tables_BW: torch.Tensor, num_heads: int
) -> AttentionPlan:
    """A plan for one token of each of B sequences whose shape is read from the device at each run, as graphs need it.

    Row b's `bounds_B4[b]` is (b, 1, context, unused); a context of 0 is padding. Tables hold what `Singles` says. The
    plan has no shape on the host, so `reference` cannot take it.
    """
    require_pool(pool_NLK2SD, 0)
    num_sequences, width = tables_BW.shape
    num_kv_heads, block_size = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4]
    device = pool_NLK2SD.device
    splits = splits_for(num_sequences, num_kv_heads, width * block_size, _num_processors(device))
    nothing = torch.zeros((0, 4), dtype=torch.int32, device=device)
    return AttentionPlan(
        query_lens=(1,) * num_sequences,
        context_lens=(),
        block_tables=(),
        num_heads=num_heads,
        window=0,
        soft_cap=0.0,
        singles=Singles(bounds_B4, tables_BW, splits),
        chunks=Chunks(nothing, nothing[:, :2], nothing[:, :1]),
    )


def paged_attention(q_THD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, plan: AttentionPlan) -> torch.Tensor:
    """Attention of all rows, [T, H, D]; queries may be a slice of a wider tensor."""
    num_tokens = sum(plan.query_lens)
    if q_THD.dim() != 3 or q_THD.shape[:2] != (num_tokens, plan.num_heads):
        raise OperandError(f"q: shape {list(q_THD.shape)}, the plan is for [{num_tokens}, {plan.num_heads}, D]")
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    window, soft_cap = plan.window, plan.soft_cap
    decode_attention(out_THD, q_THD, pool_NLK2SD, layer, plan.singles, window=window, soft_cap=soft_cap)
    chunk_attention(out_THD, q_THD, pool_NLK2SD, layer, plan.chunks, window=window, soft_cap=soft_cap)
    return out_THD


def reference(q_THD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, plan: AttentionPlan) -> torch.Tensor:
    """The formula in float64, a token at a time."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    num_heads, dim = q_THD.shape[1:]
    num_kv_heads, block_size = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4]
    row = 0
    for query_len, context_len, table in zip(plan.query_lens, plan.context_lens, plan.block_tables, strict=True):
        for position in range(context_len - query_len, context_len):
            first = max(0, position + 1 - plan.window) if plan.window else 0
            where = torch.arange(first, position + 1, device=q_THD.device)
            blocks = torch.as_tensor(table, device=q_THD.device)[where // block_size]
            kv = pool_NLK2SD[blocks, layer, :, :, where % block_size].double()  # [tokens, K, 2, D]
            key, value = kv.repeat_interleave(num_heads // num_kv_heads, dim=1).unbind(2)
            scores = torch.einsum("hd,jhd->hj", q_THD[row].double(), key) / math.sqrt(dim)
            if plan.soft_cap:
                scores = plan.soft_cap * torch.tanh(scores / plan.soft_cap)
            out_THD[row] = torch.einsum("hj,jhd->hd", scores.softmax(-1), value).to(out_THD.dtype)
            row += 1
    return out_THD


def _check(
    pool_NLK2SD: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[npt.NDArray[np.int64]],
    num_heads: int,
    window: int,
    soft_cap: float,
) -> None:
    num_kv_heads, block_size = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4]
    if num_heads < 1 or num_heads % num_kv_heads:
        raise OperandError(f"num_heads: {num_heads}, needs a multiple of the pool's {num_kv_heads}")
    if window < 0 or soft_cap < 0:
        raise OperandError(f"window {window}, soft_cap {soft_cap}: need 0 (none) or more")
    for i, (query_len, context_len, table) in enumerate(zip(query_lens, context_lens, block_tables, strict=True)):
        if not 1 <= query_len <= context_len:
            raise OperandError(f"sequence {i}: {query_len} rows, needs 1 to its context of {context_len}")
        if len(table) * block_size < context_len:
            raise OperandError(f"sequence {i}: {len(table)} blocks of {block_size} for {context_len} tokens")


def _tiles(bounds_B4: npt.NDArray[np.int32], tokens: int) -> npt.NDArray[np.int32]:
    """(chunk, first token) of all tiles, those with the most tokens before them first."""
    counts = -(-bounds_B4[:, 1] // tokens)
    chunk = np.repeat(np.arange(len(bounds_B4), dtype=np.int32), counts)
    ends = np.cumsum(counts)
    first = (np.arange(len(chunk)) - np.repeat(ends - counts, counts)) * tokens
    position = np.repeat(bounds_B4[:, 2] - bounds_B4[:, 1], counts) + first
    order = np.argsort(-position, kind="stable")
    return np.stack((chunk, first), axis=1)[order].astype(np.int32)


def _tables(
    tables: Sequence[npt.NDArray[np.int64]], context_lens: npt.NDArray[np.int32], block_size: int
) -> npt.NDArray[np.int32]:
    """Block ids, a row a sequence. The width is a power of 2 and what is unused is 0: neither is ever read."""
    used = -(-context_lens // block_size)
    width = 1 << int(max(1, used.max(initial=1)) - 1).bit_length()
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for row, table, count in zip(padded, tables, used.tolist(), strict=True):
        row[:count] = table[:count]
    return padded


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
