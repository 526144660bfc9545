"""What stands between a layer's projection and its attention, in one pass: norm of heads, rotation, KV store.

    x[t, h] = norm(qkv[t, h])                 query and key heads, where the family normalises them (rms_norm.py)
    q[t, h] = turn(x[t, h])                                                        h < H        (rope.py)
    pool[blocks[t], layer, k, 0, offsets[t]] = turn(x[t, H + k])                   k < K        (kv_store.py)
    pool[blocks[t], layer, k, 1, offsets[t]] = qkv[t, H + K + k]

Axes: T token, H query head, K KV head, D feature of a head, N block, L layer, S token of a block. One program takes a
few heads of one token. Each number is read once and written once; separate kernels read and write queries and keys up
to three times. A negative block id is padding: the query is computed, nothing is stored.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels import kv_store, rms_norm, rope
from baton.kernels.kv_store import Slots
from baton.kernels.rope import Rotation
from baton.kernels.triton.kv_store import require_slots
from baton.kernels.triton.operands import OperandError, require, require_float, require_pool
from baton.kernels.triton.rope import HEADS_EACH, require_turn, turn_high, turn_low


def rope_store(
    qkv_THD: torch.Tensor,
    qk_norm_HD: torch.Tensor | None,
    epsilon: float,
    turn: Rotation,
    pool_NLK2SD: torch.Tensor,
    layer: int,
    slots: Slots,
) -> torch.Tensor:
    """Stores keys and values and returns the turned queries, [T, H, D], new and contiguous.

    `qkv_THD` has H + K + K heads; the norm's weight [H + K, D] is None for families without one.
    """
    require_float("qkv", qkv_THD)
    require_pool(pool_NLK2SD, layer)
    num_kv_heads, block_size, dim = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4], pool_NLK2SD.shape[5]
    require("qkv", qkv_THD, None, None, dim, like=pool_NLK2SD)
    num_tokens, all_heads = qkv_THD.shape[:2]
    num_heads = all_heads - 2 * num_kv_heads
    if num_heads < 1:
        raise OperandError(f"qkv: {all_heads} heads, needs more than the {2 * num_kv_heads} of keys and values")
    require_turn(turn, qkv_THD)
    require_slots(slots, qkv_THD)
    if qk_norm_HD is not None:
        require("qk_norm", qk_norm_HD, num_heads + num_kv_heads, dim, like=qkv_THD)
        if not qk_norm_HD.is_contiguous():
            raise OperandError(f"qk_norm: strides {qk_norm_HD.stride()}, needs a contiguous tensor")
    q_THD = qkv_THD.new_empty(num_tokens, num_heads, dim)
    if num_tokens:
        _rope_store[(num_tokens, triton.cdiv(all_heads, HEADS_EACH))](
            qkv_THD,
            turn.cos_T1D,
            turn.sin_T1D,
            qkv_THD if qk_norm_HD is None else qk_norm_HD,
            q_THD,
            pool_NLK2SD,
            slots.blocks_T,
            slots.offsets_T,
            layer,
            qkv_THD.stride(0),
            qkv_THD.stride(1),
            pool_NLK2SD.stride(0),
            epsilon,
            H=num_heads,
            K=num_kv_heads,
            S=block_size,
            HALF=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2),
            HEADS=HEADS_EACH,
            NORM=qk_norm_HD is not None,
            num_warps=2,
        )
    return q_THD


def reference(
    qkv_THD: torch.Tensor,
    qk_norm_HD: torch.Tensor | None,
    epsilon: float,
    turn: Rotation,
    pool_NLK2SD: torch.Tensor,
    layer: int,
    slots: Slots,
) -> torch.Tensor:
    """The references of the three parts, one after the other."""
    num_kv_heads = pool_NLK2SD.shape[2]
    qk, value = qkv_THD[:, :-num_kv_heads], qkv_THD[:, -num_kv_heads:]
    if qk_norm_HD is not None:
        qk = rms_norm.reference(qk, qk_norm_HD, epsilon)
    qk = rope.reference(qk, turn)
    kv_store.reference(qk[:, -num_kv_heads:], value, pool_NLK2SD, layer, slots)
    return qk[:, :-num_kv_heads].contiguous()


@triton.jit(do_not_specialize=["layer"])
def _rope_store(
    qkv,
    cos_TD,
    sin_TD,
    norm,
    q,
    pool,
    blocks_T,
    offsets_T,
    layer,
    token_stride,
    head_stride,
    block_stride,
    epsilon,
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    there = (head < H + 2 * K) & (d < HALF)
    turned = head < H + K
    low = tl.load(qkv + t * token_stride + head * head_stride + d, mask=there, other=0.0)
    high = tl.load(qkv + t * token_stride + head * head_stride + HALF + d, mask=there, other=0.0)
    x_low, x_high = low, high
    if NORM:
        squares = low.to(tl.float32) * low.to(tl.float32) + high.to(tl.float32) * high.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, axis=1) / (2 * HALF) + epsilon)[:, None]
        weight = norm + head * 2 * HALF + d
        weight_low = tl.load(weight, mask=there & turned, other=0.0).to(tl.float32)
        weight_high = tl.load(weight + HALF, mask=there & turned, other=0.0).to(tl.float32)
        x_low = ((low.to(tl.float32) * scale).to(low.dtype).to(tl.float32) * weight_low).to(low.dtype)
        x_high = ((high.to(tl.float32) * scale).to(low.dtype).to(tl.float32) * weight_high).to(low.dtype)
    # The first half of the sines is negated: the second is read.
    cos = tl.load(cos_TD + t * 2 * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_TD + t * 2 * HALF + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    y_low = tl.where(turned, turn_low(x_low, x_high, cos, sin).to(low.dtype), low)
    y_high = tl.where(turned, turn_high(x_low, x_high, cos, sin).to(low.dtype), high)
    out = q + (t * H + head) * 2 * HALF + d
    tl.store(out, y_low, mask=there & (head < H))
    tl.store(out + HALF, y_high, mask=there & (head < H))
    block = tl.load(blocks_T + t)
    if block >= 0:
        side = tl.where(turned, 0, 1)
        kv_head = head - H - side * K
        offset = tl.load(offsets_T + t)
        place = pool + block * block_stride + (((layer * K + kv_head) * 2 + side) * S + offset) * 2 * HALF + d
        tl.store(place, y_low, mask=there & (head >= H))
        tl.store(place + HALF, y_high, mask=there & (head >= H))
