"""Rotary position embedding, half-split form, on a GPU.

    y[d]       = x[d]       * cos(p * f[d]) - x[d + D/2] * sin(p * f[d])       for d < D/2
    y[d + D/2] = x[d + D/2] * cos(p * f[d]) + x[d]       * sin(p * f[d])

Axes: T token, H head, D feature of a head; p is the token's position, f the inverse frequencies (D/2 of them). One
program turns a few heads of one token. In a decoder, rope_store.py does this and the store in one pass.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.rope import Rotation, reference, rotation
from baton.kernels.triton.operands import LARGEST_HEAD_DIM, OperandError, require, require_float

__all__ = ["Rotation", "reference", "rope", "rotation"]

HEADS_EACH = 8


def rope(x_THD: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """Rotates every head of `x_THD`, which may be a slice of a wider tensor; the result is new and contiguous."""
    require_float("x", x_THD)
    require("x", x_THD, None, None, None, like=x_THD)
    require_turn(turn, x_THD)
    num_tokens, num_heads, dim = x_THD.shape
    y = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    if y.numel():
        _rope[(num_tokens, triton.cdiv(num_heads, HEADS_EACH))](
            x_THD,
            turn.cos_T1D,
            turn.sin_T1D,
            y,
            num_heads,
            x_THD.stride(0),
            x_THD.stride(1),
            HALF=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2),
            HEADS=HEADS_EACH,
            num_warps=2,
        )
    return y


def require_turn(turn: Rotation, x_THD: torch.Tensor) -> None:
    """A rotation for as many tokens and features as x has."""
    num_tokens, _, dim = x_THD.shape
    if dim % 2 or dim > LARGEST_HEAD_DIM:
        raise OperandError(f"x: head_dim {dim}, needs an even one up to {LARGEST_HEAD_DIM}")
    for name, tensor in (("cos", turn.cos_T1D), ("sin", turn.sin_T1D)):
        require(name, tensor, num_tokens, 1, dim, like=x_THD)
        if not tensor.is_contiguous():
            raise OperandError(f"{name}: strides {tensor.stride()}, needs a contiguous tensor")


@triton.jit
def turn_low(low, high, cos, sin):
    """The first half of turned features, fp32."""
    return low.to(tl.float32) * cos - high.to(tl.float32) * sin


@triton.jit
def turn_high(low, high, cos, sin):
    """The second half."""
    return high.to(tl.float32) * cos + low.to(tl.float32) * sin


@triton.jit
def _rope(
    x, cos_TD, sin_TD, y, heads, token_stride, head_stride, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    there = (head < heads) & (d < HALF)
    low = tl.load(x + t * token_stride + head * head_stride + d, mask=there, other=0.0)
    high = tl.load(x + t * token_stride + head * head_stride + HALF + d, mask=there, other=0.0)
    # The first half of the sines is negated: the second is read.
    cos = tl.load(cos_TD + t * 2 * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_TD + t * 2 * HALF + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    out = y + (t * heads + head) * 2 * HALF + d
    tl.store(out, turn_low(low, high, cos, sin).to(low.dtype), mask=there)
    tl.store(out + HALF, turn_high(low, high, cos, sin).to(low.dtype), mask=there)
