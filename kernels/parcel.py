"""Arrays of the host on a device, by one copy from pinned memory instead of one for each.

    | array 0 | . | array 1 | array 2 | ..... |        each starts at a multiple of 16 bytes, which kernels rely on

Owns: that layout. Refuses to know: what the arrays mean. torch's allocator keeps the pinned memory until the copy is
over, so nobody waits for it.
"""

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


_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32, np.float64: torch.float64}
