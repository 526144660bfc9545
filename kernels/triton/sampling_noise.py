"""Gumbel noise from the counter-based generator of kernels/sampling_noise.py, on a GPU.

The integers are those of the formula there, so the uniform number of (seed, position, token id) is the same bits on
every device. The two logarithms are taken in float64 and rounded to fp32 each, so they are the correctly rounded ones
but for one case in 10^8; the CPU's are within one unit in the last place of that. `gumbel` is the same for use inside
other kernels. Axes: R row, V token id.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.sampling_noise import reference, row_keys
from baton.kernels.triton.operands import OperandError, require_ids

__all__ = ["gumbel", "gumbel_noise", "reference", "row_keys"]

_BLOCK = 1024


def gumbel_noise(keys_R2: torch.Tensor, token_ids_RV: torch.Tensor) -> torch.Tensor:
    """fp32 noise for int32 token ids [R, V]; an id axis of one row, [1, V], serves all rows."""
    require_ids("keys", keys_R2, None, 2, dtype=torch.int32, like=token_ids_RV)
    require_ids("token_ids", token_ids_RV, None, None, dtype=torch.int32, like=keys_R2)
    num_rows, width = len(keys_R2), token_ids_RV.shape[1]
    if len(token_ids_RV) not in (1, num_rows):
        raise OperandError(f"token_ids: {len(token_ids_RV)} rows, needs 1 or {num_rows}")
    noise_RV = torch.empty(num_rows, width, dtype=torch.float32, device=token_ids_RV.device)
    if noise_RV.numel():
        shared = len(token_ids_RV) == 1
        _gumbel_noise[(num_rows, triton.cdiv(width, _BLOCK))](
            keys_R2, token_ids_RV, noise_RV, width, 0 if shared else width, BLOCK=_BLOCK, enable_fp_fusion=False
        )
    return noise_RV


@triton.jit
def gumbel(token_id, low, high):
    """The noise of token ids (any integers) under the key words `low` and `high`."""
    h = token_id.to(tl.uint32) * 0x9E3779B1
    h = h ^ low.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = h ^ high.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 15)) * 0x735A2D97
    h = (h ^ (h >> 15)) & 0x7FFFFFFF
    v = (h.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 4.656612873077392578125e-10
    v = tl.minimum(v, 0.999999940395355224609375)
    inner = tl.log(1.0 - v.to(tl.float64)).to(tl.float32)
    return -tl.log(-inner.to(tl.float64)).to(tl.float32)


@triton.jit
def _gumbel_noise(keys_R2, token_ids_RV, noise_RV, width, id_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < width
    token_id = tl.load(token_ids_RV + row * id_stride + i, mask=there, other=0)
    noise = gumbel(token_id, tl.load(keys_R2 + row * 2), tl.load(keys_R2 + row * 2 + 1))
    tl.store(noise_RV + row * width + i, noise, mask=there)
