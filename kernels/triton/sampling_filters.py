"""The score that a token must reach under top-k, top-p and min-p, on a GPU.

    k-th   = the largest t with at least k scores >= t
    nucleus = the smallest t >= k-th with mass(s > t) < p,      mass by softmax over what top-k kept
    threshold = max(k-th, nucleus, max(s) + log(min_p))

Equal scores stay or go together, as in the CPU path. No sort: fp32 numbers in the order of their bits are integers,
and both t are found by halving an interval of integers, each half a pass over the row, which stays in the cache. 32
passes find the exact number. Masses are sums of fp32 probabilities in float64; a token at the edge of the nucleus can
fall on the other side than on the CPU if the mass above it is within rounding (10^-6) of p. Axes: R row, V token id.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.kernels.triton.operands import require_ids

_BLOCK = 2048


class Filters(NamedTuple):
    """One a row: int32 k (0 is off), float64 p (1 is off), and log(min_p) in fp32 (-inf is off)."""

    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    log_min_p_R: torch.Tensor


def filter_thresholds(scores_RV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """fp32 thresholds [R] for fp32 scores, temperature applied. A score of -inf is a token that is not there."""
    num_rows, vocabulary = scores_RV.shape
    require_ids("scores", scores_RV, None, None, dtype=torch.float32, like=scores_RV)
    require_ids("top_k", filters.top_k_R, num_rows, dtype=torch.int32, like=scores_RV)
    require_ids("top_p", filters.top_p_R, num_rows, dtype=torch.float64, like=scores_RV)
    require_ids("log_min_p", filters.log_min_p_R, num_rows, dtype=torch.float32, like=scores_RV)
    thresholds_R = scores_RV.new_empty(num_rows)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        _filter_thresholds[(num_rows,)](
            scores_RV, *filters, thresholds_R, vocabulary, BLOCK=block, num_warps=8, enable_fp_fusion=False
        )
    return thresholds_R


def reference(scores_RV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The definition on sorted rows, in float64 where masses are summed."""
    thresholds = []
    for s, k, p, log_min_p in zip(scores_RV, *(values.tolist() for values in filters), strict=True):
        ordered = s.sort(descending=True).values
        kth = ordered[k - 1] if 0 < k < len(s) else torch.full_like(s[0], float("-inf"))
        threshold = torch.maximum(kth, ordered[0] + log_min_p)
        if p < 1.0:
            kept = ordered[ordered >= kth]
            probability = (kept - kept.logsumexp(0)).exp().double()
            above = probability.cumsum(0) - probability
            threshold = torch.maximum(threshold, kept[max(1, int((above < p).sum())) - 1])
        thresholds.append(threshold)
    return torch.stack(thresholds) if thresholds else scores_RV.new_empty(0)


@triton.jit
def _ordered(x):
    """fp32 as int64 in the same order; the sum makes one number of both zeros."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _number(ordered):
    """The inverse."""
    bits = ordered.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _filter_thresholds(scores_RV, top_k_R, top_p_R, log_min_p_R, thresholds_R, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scores = scores_RV + row * vocabulary
    lane = tl.arange(0, BLOCK)
    k = tl.load(top_k_R + row)
    p = tl.load(top_p_R + row)
    largest_N = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        s = tl.load(scores + first + lane, mask=first + lane < vocabulary, other=float("-inf"))
        largest_N = tl.maximum(largest_N, s)
    largest = tl.max(largest_N, axis=0)
    top = _ordered(largest)
    kth = _ordered(tl.full([], float("-inf"), tl.float32))
    if (k > 0) & (k < vocabulary):
        # kth keeps at least k tokens, above + 1 may not.
        above = top
        while kth < above:
            middle = (kth + above + 1) >> 1
            count = tl.zeros([BLOCK], tl.int32)
            for first in range(0, vocabulary, BLOCK):
                s = tl.load(scores + first + lane, mask=first + lane < vocabulary, other=float("-inf"))
                count += ((_ordered(s) >= middle) & (first + lane < vocabulary)).to(tl.int32)
            enough = tl.sum(count, axis=0) >= k
            kth = tl.where(enough, middle, kth)
            above = tl.where(enough, above, middle - 1)
    threshold = tl.maximum(_number(kth), largest + tl.load(log_min_p_R + row))
    if p < 1.0:
        total_N = tl.zeros([BLOCK], tl.float64)
        for first in range(0, vocabulary, BLOCK):
            s = tl.load(scores + first + lane, mask=first + lane < vocabulary, other=float("-inf"))
            total_N += tl.where(_ordered(s) >= kth, tl.exp(s - largest), 0.0).to(tl.float64)
        limit = p * tl.sum(total_N, axis=0)
        nucleus = kth
        enough_at = top
        while nucleus < enough_at:
            middle = (nucleus + enough_at) >> 1
            mass_N = tl.zeros([BLOCK], tl.float64)
            for first in range(0, vocabulary, BLOCK):
                s = tl.load(scores + first + lane, mask=first + lane < vocabulary, other=float("-inf"))
                mass_N += tl.where(_ordered(s) > middle, tl.exp(s - largest), 0.0).to(tl.float64)
            enough = tl.sum(mass_N, axis=0) < limit
            enough_at = tl.where(enough, middle, enough_at)
            nucleus = tl.where(enough, nucleus, middle + 1)
        threshold = tl.maximum(threshold, _number(nucleus))
    tl.store(thresholds_R + row, threshold)
