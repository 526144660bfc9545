"""What the launchers here demand of their operands, and the error that they raise otherwise.

A kernel that is launched on the wrong shape reads someone else's memory, so every launcher checks first. A check costs
about a microsecond and looks at shapes only: never at values, which would wait for the device.
"""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM = 256


class OperandError(ValueError):
    """A tensor that a kernel cannot be launched on; the message names it, what it is and what it has to be."""


def require(name: str, tensor: torch.Tensor, *shape: int | None, like: torch.Tensor) -> None:
    """`tensor` has this shape (None is any extent), the dtype and device of `like`, and its features side by side."""
    fits = len(shape) == tensor.dim() and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if extent is None else str(extent) for extent in shape)
        raise OperandError(f"{name}: shape {list(tensor.shape)}, needs [{wanted}]")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise OperandError(
            f"{name}: {tensor.dtype} on {tensor.device}, the other operands are {like.dtype} on {like.device}"
        )
    if tensor.numel() and tensor.stride(-1) != 1:
        raise OperandError(f"{name}: stride {tensor.stride(-1)} of the last axis, needs 1")


def require_ids(name: str, tensor: torch.Tensor, *shape: int | None, dtype: torch.dtype, like: torch.Tensor) -> None:
    """The same for a contiguous tensor of integers, or of another dtype than its neighbours."""
    require(name, tensor, *shape, like=tensor)
    if tensor.dtype != dtype or tensor.device != like.device:
        raise OperandError(f"{name}: {tensor.dtype} on {tensor.device}, needs {dtype} on {like.device}")
    if not tensor.is_contiguous():
        raise OperandError(f"{name}: strides {tensor.stride()}, needs a contiguous tensor")


def require_float(name: str, tensor: torch.Tensor) -> None:
    """One of the dtypes that the kernels compute in."""
    if tensor.dtype not in FLOATS:
        raise OperandError(f"{name}: {tensor.dtype}, needs one of {', '.join(map(str, FLOATS))}")


def require_pool(pool_NLK2SD: torch.Tensor, layer: int) -> None:
    """A contiguous pool that has this layer."""
    if pool_NLK2SD.dim() != 6 or pool_NLK2SD.shape[3] != 2 or not pool_NLK2SD.is_contiguous():
        raise OperandError(f"pool: shape {list(pool_NLK2SD.shape)}, needs a contiguous [N, L, K, 2, S, D]")
    if pool_NLK2SD.shape[5] > LARGEST_HEAD_DIM or pool_NLK2SD.shape[5] % 2:
        raise OperandError(f"pool: head_dim {pool_NLK2SD.shape[5]}, needs an even one up to {LARGEST_HEAD_DIM}")
    if not 0 <= layer < pool_NLK2SD.shape[1]:
        raise OperandError(f"layer: {layer}, the pool has {pool_NLK2SD.shape[1]}")
