"""One tile of attention: some query rows meet some consecutive tokens of one KV head. Shared by chunks and decode.

    s[m, j] = q[m] . K[j] * scale                soft-capped: cap * tanh(s / cap)
    seen where j <= position[m]                  within a window: and j > position[m] - window
    largest', total', sum' = the usual running softmax, in powers of 2

A row is a (token, query head) pair: all query heads of a KV head are rows of the same tile, so keys and values are
read once for all of them. Tokens lie in blocks: token j of a sequence is token j % S of block table[j // S]. What is
not seen is not read, or read and replaced: numbers of other sequences, or NaN, cannot leak in.

Axes: M row, J token of the tile, D feature of a head, padded to a power of 2 in registers, not in memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    q_MD,
    sum_MD,
    total_M,
    largest_M,
    kv_head,
    table,
    first,
    position_M,
    context,
    scale,
    block_stride,
    S: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """The running sums after tokens [first, first + TILE). Not MASKED promises that every row sees all of them.

    `kv_head` points to the head's keys in block 0 of the pool; values are S * D numbers further.
    """
    token_J = first + tl.arange(0, TILE)
    d = tl.arange(0, D_PADDED)
    if MASKED:
        there_J = token_J < context
        block_J = tl.load(table + token_J // S, mask=there_J, other=0).to(tl.int64)
    else:
        block_J = tl.load(table + token_J // S).to(tl.int64)
    row_J = block_J * block_stride + (token_J % S) * D
    key = kv_head + row_J[None, :] + d[:, None]
    value = kv_head + S * D + row_J[:, None] + d[None, :]
    if MASKED:
        key_DJ = tl.load(key, mask=there_J[None, :] & (d[:, None] < D), other=0.0)
    elif D == D_PADDED:
        key_DJ = tl.load(key)
    else:
        key_DJ = tl.load(key, mask=d[:, None] < D, other=0.0)
    score_MJ = tl.dot(q_MD, key_DJ, input_precision="ieee") * scale
    if SOFT_CAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both infinities.
        score_MJ = SOFT_CAP * (1.0 - 2.0 / (tl.exp2(score_MJ * (2.0 * 1.4426950408889634 / SOFT_CAP)) + 1.0))
    score_MJ = score_MJ * 1.4426950408889634
    if MASKED:
        seen_MJ = there_J[None, :] & (token_J[None, :] <= position_M[:, None])
        if WINDOW > 0:
            seen_MJ = seen_MJ & (token_J[None, :] > position_M[:, None] - WINDOW)
        score_MJ = tl.where(seen_MJ, score_MJ, float("-inf"))
    new_largest_M = tl.maximum(largest_M, tl.max(score_MJ, axis=1))
    # A row that has seen nothing yet stays at -inf, and -inf - -inf is not a number.
    base_M = tl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)
    weight_MJ = tl.exp2(score_MJ - base_M[:, None])
    shrink_M = tl.exp2(largest_M - base_M)
    if MASKED:
        value_JD = tl.load(value, mask=there_J[:, None] & (d[None, :] < D), other=0.0)
    elif D == D_PADDED:
        value_JD = tl.load(value)
    else:
        value_JD = tl.load(value, mask=d[None, :] < D, other=0.0)
    sum_MD = tl.dot(weight_MJ.to(value_JD.dtype), value_JD, sum_MD * shrink_M[:, None], input_precision="ieee")
    return sum_MD, total_M * shrink_M + tl.sum(weight_MJ, axis=1), new_largest_M
