"""Causal attention of prefill chunks over their own tokens and all before them, which lie in blocks of the paged pool.

    out[t] = softmax_j(cap(q[t] . K[j] / sqrt(D))) . V[j]     position(t) - window < j <= position(t)

A chunk is any number of rows of one sequence, its last tokens so far; chunks of a step have different lengths and
pasts. One program computes one tile: some consecutive tokens of one chunk, for all query heads of one KV head.

    tokens of the context      0 ............................................ context
    tile, TOKENS = 4             unmasked tiles of keys    | masked | not read
                                 ######## ######## ########  ##\\.....
                                 ######## ######## ########  ###\\....
                                 ######## ######## ########  ####\\...

The longest tiles start first, so that the last ones to end are short. Axes: T token of the step, H query head, K KV
head, D feature of a head, N block, L layer, S token of a block, B chunk, W block of a table, X tile; G query heads a
KV head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.kernels.triton.attention_tile import attend_tile
from baton.kernels.triton.generation import Generation, generation
from baton.kernels.triton.operands import require, require_float, require_ids, require_pool


class Chunks(NamedTuple):
    """The chunks of a step, int32 on the device.

    `bounds_B4`: first row, rows, context (with the rows), unused. `tiles_X2`: chunk, and its first token within it;
    each chunk's tiles are `chunk_tokens(G)` tokens apart. `tables_BW`: block ids, of which the first context / S count.
    """

    bounds_B4: torch.Tensor
    tiles_X2: torch.Tensor
    tables_BW: torch.Tensor


class Shape(NamedTuple):
    """How one instance of the kernel is cut: rows of a tile, tokens of a tile of keys, warps, pipeline stages."""

    rows: int
    tile: int
    warps: int
    stages: int


def chunk_shape(head_dim: int, dtype: torch.dtype, on: Generation) -> Shape:
    """What fits into registers without spilling (docs/kernels.md). The rows do not depend on the device."""
    rows = _rows(head_dim, dtype)
    if dtype is torch.float32:
        return Shape(rows, rows, 4, 1)
    if on is Generation.CDNA:
        return Shape(rows, 32, 4, 1)
    if head_dim <= 64:
        return Shape(rows, 64, 8, 2)
    if head_dim <= 128:
        return Shape(rows, 64, 8, 2) if on is Generation.HOPPER else Shape(rows, 32, 8, 3)
    return Shape(rows, 32, 8, 2)


def chunk_tokens(group_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of one tile, whose rows are all query heads of a KV head."""
    return max(1, _rows(head_dim, dtype) // group_size)


def _rows(head_dim: int, dtype: torch.dtype) -> int:
    if dtype is torch.float32:
        return 32 if head_dim <= 64 else 16
    return 128 if head_dim <= 128 else 64


def chunk_attention(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    pool_NLK2SD: torch.Tensor,
    layer: int,
    chunks: Chunks,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Writes the chunks' rows of `out_THD`; other rows stay as they are. Window and cap 0 mean none."""
    require_float("q", q_THD)
    require_pool(pool_NLK2SD, layer)
    num_kv_heads, block_size, dim = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4], pool_NLK2SD.shape[5]
    require("q", q_THD, None, None, dim, like=pool_NLK2SD)
    require("out", out_THD, *q_THD.shape, like=q_THD)
    require_ids("bounds", chunks.bounds_B4, None, 4, dtype=torch.int32, like=q_THD)
    require_ids("tiles", chunks.tiles_X2, None, 2, dtype=torch.int32, like=q_THD)
    require_ids("tables", chunks.tables_BW, len(chunks.bounds_B4), None, dtype=torch.int32, like=q_THD)
    group_size = q_THD.shape[1] // num_kv_heads
    shape = chunk_shape(dim, q_THD.dtype, generation())
    if len(chunks.tiles_X2):
        _chunk_attention[(len(chunks.tiles_X2), num_kv_heads)](
            q_THD,
            pool_NLK2SD,
            out_THD,
            chunks.bounds_B4,
            chunks.tiles_X2,
            chunks.tables_BW,
            layer,
            1.0 / math.sqrt(dim),
            q_THD.stride(0),
            q_THD.stride(1),
            out_THD.stride(0),
            out_THD.stride(1),
            pool_NLK2SD.stride(0),
            chunks.tables_BW.stride(0),
            K=num_kv_heads,
            G=group_size,
            S=block_size,
            D=dim,
            D_PADDED=max(16, triton.next_power_of_2(dim)),
            TOKENS=chunk_tokens(group_size, dim, q_THD.dtype),
            ROWS=max(shape.rows, triton.next_power_of_2(group_size)),
            TILE=shape.tile,
            WINDOW=window,
            SOFT_CAP=soft_cap,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )


@triton.jit(do_not_specialize=["layer"])
def _chunk_attention(
    q,
    pool,
    out,
    bounds_B4,
    tiles_X2,
    tables_BW,
    layer,
    scale,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    table_stride,
    K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    x = tl.program_id(0)
    kv_head = tl.program_id(1)
    chunk = tl.load(tiles_X2 + x * 2)
    first_token = tl.load(tiles_X2 + x * 2 + 1)
    first_row = tl.load(bounds_B4 + chunk * 4)
    num_rows = tl.load(bounds_B4 + chunk * 4 + 1)
    context = tl.load(bounds_B4 + chunk * 4 + 2)
    table = tables_BW + chunk.to(tl.int64) * table_stride

    m = tl.arange(0, ROWS)
    token_M = first_token + m // G
    head_M = kv_head * G + m % G
    row_M = (m // G < TOKENS) & (token_M < num_rows)
    position_M = context - num_rows + token_M
    d = tl.arange(0, D_PADDED)
    row_MD = row_M[:, None] & (d[None, :] < D)
    step_M = (first_row + token_M).to(tl.int64)
    q_MD = tl.load(q + (step_M * q_token_stride + head_M * q_head_stride)[:, None] + d[None, :], mask=row_MD, other=0.0)

    keys = pool + (layer * K + kv_head).to(tl.int64) * (2 * S * D)
    first_position = context - num_rows + first_token
    end = tl.minimum(context, first_position + TOKENS)
    sum_MD = tl.zeros([ROWS, D_PADDED], tl.float32)
    total_M = tl.zeros([ROWS], tl.float32)
    largest_M = tl.full([ROWS], float("-inf"), tl.float32)
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
    else:
        begin = (first_position + 1) // TILE * TILE
        for first in range(0, begin, TILE):
            sum_MD, total_M, largest_M = attend_tile(
                q_MD, sum_MD, total_M, largest_M, keys, table, first, position_M, context, scale, block_stride,
                S, D, D_PADDED, TILE, False, WINDOW, SOFT_CAP,
            )  # fmt: skip
    for first in range(begin, end, TILE):
        sum_MD, total_M, largest_M = attend_tile(
            q_MD, sum_MD, total_M, largest_M, keys, table, first, position_M, context, scale, block_stride,
            S, D, D_PADDED, TILE, True, WINDOW, SOFT_CAP,
        )  # fmt: skip
    result_MD = sum_MD / tl.where(total_M > 0.0, total_M, 1.0)[:, None]
    place = out + (step_M * out_token_stride + head_M * out_head_stride)[:, None] + d[None, :]
    tl.store(place, result_MD.to(q_MD.dtype), mask=row_MD)
