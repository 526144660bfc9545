"""Causal attention of a step's tokens over keys and values that lie in blocks of the paged pool.

    out[t] = softmax_j(q[t] . K[j] / sqrt(D)) . V[j]       over the positions j <= position(t) of t's own sequence

where K[j], V[j] of a sequence are pool[table[j // S], layer, :, 0 or 1, j % S]. H/K query heads share a KV head.

A step's tokens are one flat axis: sequence i owns `query_lens[i]` rows, its last tokens so far.
Their own keys and values are in the pool already. `plan_attention` turns the step's shape into indices and masks once;
`paged_attention` then runs once a layer. The compiled kernels (cpu/attention.h) read the pool where it lies. Without
them, one-token sequences are gathered in groups that are padded to a common length (neighbours share a group, so order
them by length), longer ones are gathered one at a time:

    keys of a group, B = 3:        rows of a chunk, in pieces of at most 512:
      ###########                    past      own tokens
      ##########.   . = padding,     ##########\\......        one mask, aligned to the right edge, serves
      ########...   masked           ##########==\\....        all pieces of all chunks
                                     ##########====\\..

Axes: T token of the step, H query head, K KV head, D feature of a head, N block, L layer, S token of a block,
B sequence of a group, G query heads a KV head. Without the compiled kernels, everything in the pool must be finite:
padding is masked, not skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from baton.kernels.cpu.library import Contexts, Cpu

_PIECE = 512  # query rows that share one mask
_GROUP_PADDING = 64  # blocks of padding that cost as much as starting another group
_GROUP_BLOCKS = 4096  # bounds the copy of one group's keys and values


class _Group(NamedTuple):
    """One-token sequences in rows [first, last): `rows` index the pool, [2, B, K, blocks]; the mask hides padding."""

    first: int
    last: int
    rows: torch.Tensor
    context: int
    mask_B11C: torch.Tensor | None


class _Chunk(NamedTuple):
    """One sequence's rows [first, last), of which the first has `start` tokens before it."""

    first: int
    last: int
    rows: torch.Tensor
    start: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's shape, and what follows from it: `contexts` for the compiled kernels, or else indices and masks.

    `causal_mask` is None if no chunk has a past.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: tuple[npt.NDArray[np.int64], ...]
    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]
    causal_mask: torch.Tensor | None
    cpu: Cpu | None = None
    contexts: Contexts | None = None


def plan_attention(
    pool_NLK2SD: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[npt.NDArray[np.int64]],
    cpu: Cpu | None = None,
) -> AttentionPlan:
    """Plans attention for sequences whose last `query_lens[i]` of `context_lens[i]` tokens are in the step."""
    if cpu is not None and cpu.attends(pool_NLK2SD):
        contexts = Contexts.of(query_lens, context_lens, block_tables)
        return AttentionPlan(tuple(query_lens), tuple(context_lens), tuple(block_tables), (), (), None, cpu, contexts)
    groups: list[_Group] = []
    chunks: list[_Chunk] = []
    block_size = pool_NLK2SD.shape[4]
    num_blocks = [-(-length // block_size) for length in context_lens]
    i = row = longest_past = 0
    while i < len(query_lens):
        if query_lens[i] == 1:
            end = _group_end(query_lens, num_blocks, i)
            groups.append(_plan_group(pool_NLK2SD, row, context_lens[i:end], block_tables[i:end]))
            row, i = row + end - i, end
            continue
        start = context_lens[i] - query_lens[i]
        rows = _pool_rows(pool_NLK2SD, block_tables[i][None, : num_blocks[i]])
        chunks.append(_Chunk(row, row + query_lens[i], rows, start))
        if start:
            longest_past = max(longest_past, context_lens[i])
        row, i = row + query_lens[i], i + 1
    mask = _right_aligned_mask(longest_past, pool_NLK2SD) if longest_past else None
    return AttentionPlan(
        tuple(query_lens), tuple(context_lens), tuple(block_tables), tuple(groups), tuple(chunks), mask
    )


def paged_attention(q_THD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, plan: AttentionPlan) -> torch.Tensor:
    """Attention of all rows, [T, H, D]."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    if plan.cpu is not None and plan.contexts is not None:
        plan.cpu.attend(q_THD, pool_NLK2SD, layer, plan.contexts, out_THD)
        return out_THD
    for group in plan.groups:
        q_BHD = q_THD[group.first : group.last]
        out_THD[group.first : group.last] = _attend_group(q_BHD, pool_NLK2SD, layer, group)
    for chunk in plan.chunks:
        _attend_chunk(out_THD, q_THD, pool_NLK2SD, layer, chunk, plan.causal_mask)
    return out_THD


def reference(q_THD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, plan: AttentionPlan) -> torch.Tensor:
    """The formula in float64, a token and a head at a time."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    num_heads, dim = q_THD.shape[1:]
    num_kv_heads, block_size = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4]
    row = 0
    for query_len, context_len, table in zip(plan.query_lens, plan.context_lens, plan.block_tables, strict=True):
        for position in range(context_len - query_len, context_len):
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                tokens = [
                    pool_NLK2SD[table[j // block_size], layer, kv_head, :, j % block_size] for j in range(position + 1)
                ]
                kv = torch.stack(tokens).double()
                weights = torch.softmax(kv[:, 0] @ q_THD[row, head].double() / math.sqrt(dim), dim=0)
                out_THD[row, head] = weights @ kv[:, 1]
            row += 1
    return out_THD


def _group_end(query_lens: Sequence[int], num_blocks: Sequence[int], first: int) -> int:
    """Where the group that starts at sequence `first` ends: before its padding costs more than another group."""
    longest = padding = 0
    for i in range(first, len(query_lens)):
        if query_lens[i] != 1:
            return i
        grown = max(longest, num_blocks[i])
        padding += (grown - longest) * (i - first) + grown - num_blocks[i]
        if i > first and (padding > _GROUP_PADDING or grown * (i - first + 1) > _GROUP_BLOCKS):
            return i
        longest = grown
    return len(query_lens)


def _plan_group(
    pool_NLK2SD: torch.Tensor,
    first: int,
    context_lens: Sequence[int],
    block_tables: Sequence[npt.NDArray[np.int64]],
) -> _Group:
    block_size = pool_NLK2SD.shape[4]
    context = max(context_lens)
    table = np.empty((len(context_lens), -(-context // block_size)), dtype=np.int64)
    for i, (length, blocks) in enumerate(zip(context_lens, block_tables, strict=True)):
        used = -(-length // block_size)
        table[i, :used] = blocks[:used]
        table[i, used:] = blocks[0]
    mask = None
    if min(context_lens) < context:
        lengths = torch.tensor(context_lens, device=pool_NLK2SD.device)
        hidden = torch.arange(context, device=pool_NLK2SD.device) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=pool_NLK2SD.dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, -math.inf)[:, None, None]
    return _Group(first, first + len(context_lens), _pool_rows(pool_NLK2SD, table), context, mask)


def _pool_rows(pool_NLK2SD: torch.Tensor, table_BN: npt.NDArray[np.int64]) -> torch.Tensor:
    """Indices of layer 0's pieces of S * D numbers, in the order [2, B, K, blocks]."""
    num_layers, num_kv_heads = pool_NLK2SD.shape[1:3]
    table = torch.from_numpy(np.ascontiguousarray(table_BN)).to(pool_NLK2SD.device)
    heads = torch.arange(num_kv_heads, device=table.device)[None, None, :, None] * 2
    sides = torch.arange(2, device=table.device)[:, None, None, None]
    return table[None, :, None, :] * (num_layers * num_kv_heads * 2) + heads + sides


def _gather(pool_NLK2SD: torch.Tensor, layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Keys and values of one layer, copied to [2, B, K, tokens, D]."""
    num_kv_heads, _, block_size, dim = pool_NLK2SD.shape[2:]
    pieces = pool_NLK2SD.view(-1, block_size * dim)[layer * num_kv_heads * 2 :]
    return pieces.index_select(0, rows.view(-1)).view(*rows.shape[:3], -1, dim)


def _attend_group(q_BHD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, group: _Group) -> torch.Tensor:
    # The query heads of one KV head take the place of query positions, so that no key is repeated.
    key_BKCD, value_BKCD = _gather(pool_NLK2SD, layer, group.rows)[:, :, :, : group.context].unbind(0)
    q_BKGD = q_BHD.view(len(q_BHD), pool_NLK2SD.shape[2], -1, q_BHD.shape[2])
    out = functional.scaled_dot_product_attention(q_BKGD, key_BKCD, value_BKCD, attn_mask=group.mask_B11C)
    return out.reshape(q_BHD.shape)


def _attend_chunk(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    pool_NLK2SD: torch.Tensor,
    layer: int,
    chunk: _Chunk,
    causal_mask: torch.Tensor | None,
) -> None:
    num_kv_heads = pool_NLK2SD.shape[2]
    group_size = q_THD.shape[1] // num_kv_heads
    kv = _gather(pool_NLK2SD, layer, chunk.rows).transpose(1, 2).expand(-1, -1, group_size, -1, -1)
    piece = chunk.last - chunk.first if chunk.start == 0 else _PIECE
    for first in range(chunk.first, chunk.last, piece):
        last = min(first + piece, chunk.last)
        context = chunk.start + last - chunk.first
        q_KGTD = q_THD[first:last].view(last - first, num_kv_heads, group_size, -1).permute(1, 2, 0, 3)
        mask = None
        if chunk.start:
            assert causal_mask is not None
            mask = causal_mask[_PIECE - (last - first) :, causal_mask.shape[1] - context :]
        out_KGTD = functional.scaled_dot_product_attention(
            q_KGTD, kv[0, ..., :context, :], kv[1, ..., :context, :], attn_mask=mask, is_causal=mask is None
        )
        out_THD[first:last] = out_KGTD.flatten(0, 1).permute(1, 0, 2)


def _right_aligned_mask(width: int, pool_NLK2SD: torch.Tensor) -> torch.Tensor:
    """[_PIECE, width or more]: row i from the bottom hides the last i columns. Any lower right part is causal too."""
    mask = torch.zeros(_PIECE, max(width, _PIECE), dtype=pool_NLK2SD.dtype, device=pool_NLK2SD.device)
    corner = mask[:, mask.shape[1] - _PIECE :]
    corner.masked_fill_(torch.ones_like(corner, dtype=torch.bool).triu_(1), -math.inf)
    return mask
