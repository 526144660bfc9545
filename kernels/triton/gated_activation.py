"""The gated activation of a SwiGLU feed-forward layer, on a GPU.

    y[t, i] = round(silu(x[t, i])) * x[t, I + i],    silu(z) = z / (1 + exp(-z))

Axes: T token, I intermediate feature. One program computes one piece of one row. Moves 3 numbers an output, so it is
bound by memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.gated_activation import reference
from baton.kernels.triton.operands import OperandError, require_float

__all__ = ["gated_activation", "reference"]

_BLOCK = 1024


def gated_activation(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, of half the width; any leading axes, contiguous."""
    require_float("gate_up", gate_up_T2I)
    if gate_up_T2I.shape[-1] % 2 or not gate_up_T2I.is_contiguous():
        raise OperandError(
            f"gate_up: shape {list(gate_up_T2I.shape)}, strides {gate_up_T2I.stride()}, "
            "needs a contiguous tensor with an even last axis"
        )
    width = gate_up_T2I.shape[-1] // 2
    y = gate_up_T2I.new_empty(*gate_up_T2I.shape[:-1], width)
    if y.numel():
        _gated_activation[(y.numel() // width, triton.cdiv(width, _BLOCK))](gate_up_T2I, y, width, BLOCK=_BLOCK)
    return y


@triton.jit
def _gated_activation(x, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * width + i, mask=i < width, other=0.0)
    up = tl.load(x + row * 2 * width + width + i, mask=i < width, other=0.0)
    z = gate.to(tl.float32)
    activated = (z / (1.0 + tl.exp(-z))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(y + row * width + i, product.to(gate.dtype), mask=i < width)
