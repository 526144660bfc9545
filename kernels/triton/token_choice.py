"""Chooses one token a row on a GPU: the largest of score + noise among those that reach the row's threshold.

    choice[r] = argmax_v ( s[r, v] + noise[r] * gumbel(key[r], v) )     over v with s[r, v] >= threshold[r]

`s` is the score over the temperature, `noise[r]` says whether row r draws (else it is greedy), thresholds come from
sampling_filters.py. Of equal values the lowest id wins. Noise is made where it is used and never stored.

The vocabulary of a row is cut into parts that different programs search, so that few rows fill the device too; a
second kernel chooses among the parts' winners. Axes: R row, V token id, P part.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels import sampling_noise
from baton.kernels.triton.operands import require_ids
from baton.kernels.triton.sampling_noise import gumbel

_BLOCK = 1024
_PART = 8192


def choose(
    scores_RV: torch.Tensor, keys_R2: torch.Tensor, noisy_R: torch.Tensor, thresholds_R: torch.Tensor
) -> torch.Tensor:
    """int64 ids [R]. Scores and thresholds are fp32, `noisy_R` int32 (0 is greedy), a threshold of -inf keeps all."""
    num_rows = len(scores_RV)
    require_ids("scores", scores_RV, None, None, dtype=torch.float32, like=scores_RV)
    require_ids("keys", keys_R2, num_rows, 2, dtype=torch.int32, like=scores_RV)
    require_ids("noisy", noisy_R, num_rows, dtype=torch.int32, like=scores_RV)
    require_ids("thresholds", thresholds_R, num_rows, dtype=torch.float32, like=scores_RV)
    vocabulary = scores_RV.shape[1]
    parts = triton.cdiv(vocabulary, _PART)
    ids_R = torch.empty(num_rows, dtype=torch.int64, device=scores_RV.device)
    if num_rows:
        values_RP = scores_RV.new_empty(num_rows, parts)
        ids_RP = torch.empty(num_rows, parts, dtype=torch.int32, device=scores_RV.device)
        _choose[(num_rows, parts)](
            scores_RV,
            keys_R2,
            noisy_R,
            thresholds_R,
            values_RP,
            ids_RP,
            vocabulary,
            PART=_PART,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
        _among_parts[(num_rows,)](values_RP, ids_RP, ids_R, parts, PARTS=triton.next_power_of_2(parts))
    return ids_R


def reference(
    scores_RV: torch.Tensor, keys_R2: torch.Tensor, noisy_R: torch.Tensor, thresholds_R: torch.Tensor
) -> torch.Tensor:
    """The formula with the plain kernel's noise, which is what the CPU path chooses by."""
    ids = torch.arange(scores_RV.shape[1], dtype=torch.int32, device=scores_RV.device)[None]
    kept = scores_RV.masked_fill(scores_RV < thresholds_R[:, None], float("-inf"))
    noise = sampling_noise.gumbel_noise(keys_R2, ids)
    return torch.where(noisy_R[:, None] != 0, noise + kept, kept).max(dim=-1).indices


@triton.jit
def _choose(
    scores_RV,
    keys_R2,
    noisy_R,
    thresholds_R,
    values_RP,
    ids_RP,
    vocabulary,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    low = tl.load(keys_R2 + row * 2)
    high = tl.load(keys_R2 + row * 2 + 1)
    noisy = tl.load(noisy_R + row)
    threshold = tl.load(thresholds_R + row)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = part * PART + lane
    for first in range(part * PART, tl.minimum(vocabulary, (part + 1) * PART), BLOCK):
        v = first + lane
        s = tl.load(scores_RV + row * vocabulary + v, mask=v < vocabulary, other=float("-inf"))
        s = tl.where(s >= threshold, s, float("-inf"))
        if noisy != 0:
            s = gumbel(v, low, high) + s
        best_id = tl.where(s > best, v, best_id)
        best = tl.maximum(best, s)
    top = tl.max(best, axis=0)
    tl.store(values_RP + row * tl.num_programs(1) + part, top)
    tl.store(ids_RP + row * tl.num_programs(1) + part, tl.min(tl.where(best == top, best_id, 2147483647), axis=0))


@triton.jit
def _among_parts(values_RP, ids_RP, ids_R, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    value = tl.load(values_RP + row * parts + p, mask=p < parts, other=float("-inf"))
    token_id = tl.load(ids_RP + row * parts + p, mask=p < parts, other=2147483647)
    winner = tl.min(tl.where(value == tl.max(value, axis=0), token_id, 2147483647), axis=0)
    tl.store(ids_R + row, winner.to(tl.int64))
