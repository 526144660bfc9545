"""Gumbel noise from a counter-based generator: a pure function of (seed, position, token id).

    key(seed, position) = mix64(mix64(seed) + position)                          64 bits: words k0 (low) and k1 (high)
    h = token_id * 0x9E3779B1 ^ k0                                               all 32-bit, wrapping
    h = (h ^ h >> 16) * 0x21F0AAAD;  h = h ^ k1
    h = (h ^ h >> 15) * 0x735A2D97;  h = h ^ h >> 15
    v = ((h & 0x7FFFFFFF) + 1/2) / 2^31                                          uniform in (0, 1)
    noise = -log(-log(1 - v))                                                    standard Gumbel

mix64 is the finaliser of SplitMix64. argmax(logit + noise) over token ids is then a draw from softmax(logit), and the
same draw whatever else is in the batch and wherever it runs: integers wrap alike on every device, and only the last
bits of the logarithms may differ. Axes: R row, V token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

_MASK64 = (1 << 64) - 1
_SPREAD, _FIRST, _SECOND = 0x9E3779B1, 0x21F0AAAD, 0x735A2D97
_LARGEST = 1.0 - 2.0**-24  # the largest fp32 below 1
_CPU_BLOCK = 1 << 16  # elements: keeps the working set of one pass in a core's cache


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """The key words of each row as int32 [R, 2]. Seeds are taken modulo 2^64."""
    keys = np.array(
        [_mix64(_mix64(seed & _MASK64) + position) for seed, position in zip(seeds, positions, strict=True)],
        dtype=np.uint64,
    )
    words = np.stack((keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)), axis=1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def gumbel_noise(keys_R2: torch.Tensor, token_ids_RV: torch.Tensor) -> torch.Tensor:
    """fp32 noise for int32 token ids [R, V]; an id axis of one row, [1, V], serves all rows."""
    num_rows, width = keys_R2.shape[0], token_ids_RV.shape[1]
    noise_RV = torch.empty(num_rows, width, dtype=torch.float32, device=token_ids_RV.device)
    if num_rows * width <= _CPU_BLOCK or noise_RV.device.type != "cpu":
        return _fill(noise_RV, keys_R2, token_ids_RV)
    for row in range(num_rows):
        ids = token_ids_RV[row : row + 1] if token_ids_RV.shape[0] > 1 else token_ids_RV
        for first in range(0, width, _CPU_BLOCK):
            last = first + _CPU_BLOCK
            _fill(noise_RV[row : row + 1, first:last], keys_R2[row : row + 1], ids[:, first:last])
    return noise_RV


def reference(keys_R2: torch.Tensor, token_ids_RV: torch.Tensor) -> torch.Tensor:
    """The formula in Python integers and doubles, an element at a time."""
    rows = []
    for row, (low, high) in enumerate(keys_R2.tolist()):
        k0, k1 = low & 0xFFFFFFFF, high & 0xFFFFFFFF
        values = []
        for token_id in token_ids_RV[row if token_ids_RV.shape[0] > 1 else 0].tolist():
            h = (token_id * _SPREAD & 0xFFFFFFFF) ^ k0
            h = ((h ^ h >> 16) * _FIRST & 0xFFFFFFFF) ^ k1
            h = (h ^ h >> 15) * _SECOND & 0xFFFFFFFF
            h ^= h >> 15
            v = ((h & 0x7FFFFFFF) + 0.5) / 2**31
            values.append(-math.log(-math.log1p(-min(v, _LARGEST))))
        rows.append(values)
    return torch.tensor(rows, dtype=torch.float32)


def _mix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
    return z ^ z >> 31


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _fill(noise_RV: torch.Tensor, keys_R2: torch.Tensor, token_ids_RV: torch.Tensor) -> torch.Tensor:
    # A shift of int32 drags the sign in from the left: the mask takes it out again.
    keys = keys_R2.to(token_ids_RV.device)
    h = (token_ids_RV * _signed(_SPREAD)) ^ keys[:, :1]
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST).bitwise_xor_(keys[:, 1:])
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).bitwise_and_(0x7FFFFFFF)
    noise_RV.copy_(h).add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST)
    return noise_RV.neg_().log1p_().neg_().log_().neg_()
