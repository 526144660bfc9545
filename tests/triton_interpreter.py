"""Triton's interpreter, with bfloat16 as a GPU computes it.

The interpreter keeps bfloat16 as its bits. Its own casts cut the low bits off instead of rounding to the nearest, and
its dot multiplies the bits as if they were integers. Both are put right here, so that a kernel's result can be compared
with its reference in every dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def compute_bfloat16_exactly() -> None:
    """Changes the interpreter of this process."""
    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return handle(_round(source.data), tl.bfloat16)
        return cast(self, source, target)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return cast_impl(self, source, target)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (handle(_widen(side.data), tl.float32) for side in (a, b))
        return dot(self, a, b, d, *options)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = fp_to_fp
    builder.create_dot = create_dot


def _round(data: Any) -> Any:
    rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _widen(data: Any) -> Any:
    return (data.astype(np.uint32) << 16).view(np.float32)
