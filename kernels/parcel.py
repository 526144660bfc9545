"""Arrays of the host on a device, by one copy from pinned memory instead of one for each, and tensors on the way back.

    | array 0 | . | array 1 | array 2 | ..... |        each starts at a multiple of 16 bytes, which kernels rely on

Owns: that layout. Refuses to know: what the arrays mean. torch's allocator keeps the pinned memory until the copy is
over, so nobody waits for it.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16


def send(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, of the same shapes and types: views of one tensor."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = np.cumsum([0, *sizes]).tolist()
    packed = torch.zeros(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    octets = packed.numpy()
    for array, start in zip(arrays, starts, strict=False):
        octets[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = packed.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(_TORCH[array.dtype.type]).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


class Fetched:
    """Tensors on their way to the host. The copies come after all that their stream was told before, not later."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._event = list(tensors), None
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[torch.Tensor]:
        """Waits for the copies, not for what the stream was told after them."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32, np.float64: torch.float64}
