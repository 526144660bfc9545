"""Root-mean-square normalisation over the last axis, on a GPU; alone, or with the residual sum before it.

    r[t, d] = round(r[t, d] + x[t, d])                                   (add_rms_norm only; r then takes x's place)
    y[..., d] = weight[..., d] * round(x[..., d] / sqrt(mean_d(x[..., d]^2) + epsilon))

Axes: T token, H head (per-head norms of queries and keys), D feature. One program normalises a few whole rows, so that
a row is read once. Heads may be a slice of a wider projection: only the last axis has to be dense.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels import rms_norm as plain
from baton.kernels.rms_norm import reference
from baton.kernels.triton.operands import OperandError, require, require_float

__all__ = ["add_rms_norm", "add_rms_norm_reference", "reference", "rms_norm"]

_WIDEST = 32768
_TILE = 2048  # numbers that one program takes at least, where the rows are short


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalises the last axis of `x_TD`, [T, D] or [T, H, D]; the weight is [D] or, by head, [H, D]."""
    x_THD = x_TD.unsqueeze(1) if x_TD.dim() == 2 else x_TD
    require("x", x_THD, None, None, None, like=x_THD)
    y = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    _launch(x_THD, None, weight_D, y, epsilon)
    return y


def add_rms_norm(x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Adds x to the residual, in place, and returns the sum normalised: one pass instead of two."""
    require("x", x_TD, None, None, like=x_TD)
    require("residual", residual_TD, *x_TD.shape, like=x_TD)
    if not residual_TD.is_contiguous():
        raise OperandError(f"residual: strides {residual_TD.stride()}, needs a contiguous tensor")
    y = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    _launch(x_TD.unsqueeze(1), residual_TD, weight_D, y, epsilon)
    return y


def add_rms_norm_reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """The same in two steps; the sum is rounded once, the norm is float64."""
    residual_TD.copy_((residual_TD.double() + x_TD.double()).to(x_TD.dtype))
    return plain.reference(residual_TD, weight_D, epsilon)


def _launch(
    x_THD: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, y: torch.Tensor, epsilon: float
) -> None:
    num_tokens, num_heads, dim = x_THD.shape
    require_float("x", x_THD)
    by_head = weight.dim() == 2
    require("weight", weight, *((num_heads, dim) if by_head else (dim,)), like=x_THD)
    if not 1 <= dim <= _WIDEST or not weight.is_contiguous():
        raise OperandError(f"weight: {list(weight.shape)} {weight.stride()}, needs 1 to {_WIDEST} dense features")
    rows = num_tokens * num_heads
    if not rows:
        return
    block = triton.next_power_of_2(dim)
    rows_each = max(1, _TILE // block)
    _rms_norm[(triton.cdiv(rows, rows_each),)](
        x_THD,
        x_THD if residual is None else residual,
        weight,
        y,
        rows,
        num_heads,
        x_THD.stride(0),
        x_THD.stride(1),
        epsilon,
        D=dim,
        BLOCK=block,
        ROWS=rows_each,
        BY_HEAD=by_head,
        RESIDUAL=residual is not None,
        num_warps=min(16, max(4, block // 1024)),
    )


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    residual,
    weight,
    y,
    rows,
    heads,
    token_stride,
    head_stride,
    epsilon,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BY_HEAD: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % heads
    d = tl.arange(0, BLOCK)[None, :]
    there = (row < rows)[:, None] & (d < D)
    dense = row[:, None] * D + d
    rounded = tl.load(x + (row // heads * token_stride + head * head_stride)[:, None] + d, mask=there, other=0.0)
    if RESIDUAL:
        before = tl.load(residual + dense, mask=there, other=0.0)
        rounded = (rounded.to(tl.float32) + before.to(tl.float32)).to(rounded.dtype)
        tl.store(residual + dense, rounded, mask=there)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + epsilon)
    normed = (value * scale[:, None]).to(rounded.dtype).to(tl.float32)
    if BY_HEAD:
        w = tl.load(weight + head[:, None] * D + d, mask=there, other=0.0)
    else:
        w = tl.load(weight + d, mask=d < D, other=0.0)
    tl.store(y + dense, (normed * w.to(tl.float32)).to(rounded.dtype), mask=there)
