"""Attention of one new token a sequence over keys and values that lie in blocks of the paged pool.

    out[b] = softmax_j(cap(q[b] . K[j] / sqrt(D))) . V[j]       context - window <= j < context, in b's own sequence

Reading keys and values is all the time there is, so a context is cut into splits that different programs read; each
leaves a partial result and the logarithm of its weight, and a second kernel combines them.

    context    |#########|#########|#########|#####    |      split s reads whole tiles, as many as its siblings
    partial      p0, w0     p1, w1    p2, w2    p3, w3
    out        = sum_s p[s] * 2^(w[s] - w) / sum_s 2^(w[s] - w),      w = max_s w[s]

One program serves all query heads of one KV head: keys and values are read once for all of them. Axes: T token of the
step, B sequence, H query head, K KV head, D feature of a head, N block, L layer, S token of a block, W block of a
table, P split; G query heads a KV head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.kernels.triton.attention_tile import attend_tile
from baton.kernels.triton.operands import OperandError, require, require_float, require_ids, require_pool

LARGEST_SPLITS = 64
_SPLIT_TOKENS = 256  # a split shorter than this costs more in the second kernel than it gains in the first


class Singles(NamedTuple):
    """The one-token sequences of a step, int32 on the device.

    `bounds_B4`: row, 1, context (with that row; 0 is padding and gives zeros), unused. `tables_BW`: block ids.
    """

    bounds_B4: torch.Tensor
    tables_BW: torch.Tensor
    num_splits: int


class Shape(NamedTuple):
    """How one instance of the kernel is cut: tokens of a tile, warps, stages of the pipeline."""

    tile: int
    warps: int
    stages: int


def decode_shape(head_dim: int, dtype: torch.dtype) -> Shape:
    """What fits into registers without spilling (docs/kernels.md)."""
    if dtype is torch.float32:
        return Shape(32, 4, 1) if head_dim <= 128 else Shape(16, 4, 1)
    return Shape(64, 4, 3) if head_dim <= 128 else Shape(32, 4, 3)


def splits_for(num_sequences: int, num_kv_heads: int, longest_context: int, num_processors: int) -> int:
    """As many splits as give every processor two programs, of at least `_SPLIT_TOKENS` tokens; a power of 2."""
    wanted = max(1, 2 * num_processors // max(1, num_sequences * num_kv_heads))
    most = max(1, longest_context // _SPLIT_TOKENS)
    return min(LARGEST_SPLITS, 1 << (min(wanted, most).bit_length() - 1))


def decode_attention(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    pool_NLK2SD: torch.Tensor,
    layer: int,
    singles: Singles,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Writes the sequences' rows of `out_THD`; other rows stay as they are. Window and cap 0 mean none."""
    require_float("q", q_THD)
    require_pool(pool_NLK2SD, layer)
    num_kv_heads, block_size, dim = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4], pool_NLK2SD.shape[5]
    require("q", q_THD, None, None, dim, like=pool_NLK2SD)
    require("out", out_THD, *q_THD.shape, like=q_THD)
    require_ids("bounds", singles.bounds_B4, None, 4, dtype=torch.int32, like=q_THD)
    num_sequences, num_heads, splits = len(singles.bounds_B4), q_THD.shape[1], singles.num_splits
    require_ids("tables", singles.tables_BW, num_sequences, None, dtype=torch.int32, like=q_THD)
    if not 1 <= splits <= LARGEST_SPLITS or splits & (splits - 1):
        raise OperandError(f"num_splits: {splits}, needs a power of 2 up to {LARGEST_SPLITS}")
    if not num_sequences:
        return
    partial_BHPD = q_THD.new_empty((num_sequences, num_heads, splits, dim) if splits > 1 else 1, dtype=torch.float32)
    weight_BHP = q_THD.new_empty((num_sequences, num_heads, splits) if splits > 1 else 1, dtype=torch.float32)
    group_size = num_heads // num_kv_heads
    shape = decode_shape(dim, q_THD.dtype)
    padded = max(16, triton.next_power_of_2(dim))
    _decode_attention[(num_sequences, num_kv_heads, splits)](
        q_THD,
        pool_NLK2SD,
        out_THD,
        partial_BHPD,
        weight_BHP,
        singles.bounds_B4,
        singles.tables_BW,
        layer,
        1.0 / math.sqrt(dim),
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        pool_NLK2SD.stride(0),
        singles.tables_BW.stride(0),
        K=num_kv_heads,
        G=group_size,
        S=block_size,
        D=dim,
        D_PADDED=padded,
        ROWS=max(16, triton.next_power_of_2(group_size)),
        TILE=shape.tile,
        SPLITS=splits,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if splits > 1:
        _combine[(num_sequences, num_heads)](
            partial_BHPD,
            weight_BHP,
            out_THD,
            singles.bounds_B4,
            out_THD.stride(0),
            out_THD.stride(1),
            D=dim,
            D_PADDED=padded,
            SPLITS=splits,
        )


@triton.jit(do_not_specialize=["layer"])
def _decode_attention(
    q,
    pool,
    out,
    partial_BHPD,
    weight_BHP,
    bounds_B4,
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
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(bounds_B4 + b * 4).to(tl.int64)
    context = tl.load(bounds_B4 + b * 4 + 2)
    table = tables_BW + b * table_stride

    m = tl.arange(0, ROWS)
    head_M = kv_head * G + m
    d = tl.arange(0, D_PADDED)
    row_MD = (m < G)[:, None] & (d[None, :] < D)
    q_MD = tl.load(q + row * q_token_stride + (head_M * q_head_stride)[:, None] + d[None, :], mask=row_MD, other=0.0)
    position_M = tl.zeros([ROWS], tl.int32) + (context - 1)

    keys = pool + (layer * K + kv_head).to(tl.int64) * (2 * S * D)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(context - WINDOW, 0) // TILE * TILE
    tiles = tl.cdiv(tl.cdiv(context - lowest, TILE), SPLITS)
    begin = lowest + split * tiles * TILE
    end = tl.minimum(context, begin + tiles * TILE)
    sum_MD = tl.zeros([ROWS, D_PADDED], tl.float32)
    total_M = tl.zeros([ROWS], tl.float32)
    largest_M = tl.full([ROWS], float("-inf"), tl.float32)
    masked = begin
    if WINDOW == 0:
        masked = tl.maximum(begin, end // TILE * TILE)
        for first in range(begin, masked, TILE):
            sum_MD, total_M, largest_M = attend_tile(
                q_MD, sum_MD, total_M, largest_M, keys, table, first, position_M, context, scale, block_stride,
                S, D, D_PADDED, TILE, False, WINDOW, SOFT_CAP,
            )  # fmt: skip
    for first in range(masked, end, TILE):
        sum_MD, total_M, largest_M = attend_tile(
            q_MD, sum_MD, total_M, largest_M, keys, table, first, position_M, context, scale, block_stride,
            S, D, D_PADDED, TILE, True, WINDOW, SOFT_CAP,
        )  # fmt: skip
    result_MD = sum_MD / tl.where(total_M > 0.0, total_M, 1.0)[:, None]
    if SPLITS == 1:
        place = out + row * out_token_stride + (head_M * out_head_stride)[:, None] + d[None, :]
        tl.store(place, result_MD.to(q_MD.dtype), mask=row_MD)
    else:
        part_M = (b * (K * G) + head_M) * SPLITS + split
        tl.store(partial_BHPD + part_M[:, None] * D + d[None, :], result_MD, mask=row_MD)
        # A split that read nothing has a weight of zero: log 0 is -inf.
        tl.store(weight_BHP + part_M, largest_M + tl.log2(total_M), mask=m < G)


@triton.jit
def _combine(
    partial_BHPD,
    weight_BHP,
    out,
    bounds_B4,
    out_token_stride,
    out_head_stride,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(bounds_B4 + b * 4).to(tl.int64)
    d = tl.arange(0, D_PADDED)
    part_P = (b * tl.num_programs(1) + head) * SPLITS + tl.arange(0, SPLITS)
    weight_P = tl.load(weight_BHP + part_P)
    largest = tl.max(weight_P, axis=0)
    share_P = tl.exp2(weight_P - tl.where(largest == float("-inf"), 0.0, largest))
    partial_PD = tl.load(partial_BHPD + part_P[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    total = tl.sum(share_P, axis=0)
    result_D = tl.sum(partial_PD * share_P[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    place = out + row * out_token_stride + head * out_head_stride + d
    tl.store(place, result_D.to(out.dtype.element_ty), mask=d < D)
