"""Log-probability and rank of one token a row, on a GPU.

    logprob[r] = s[r, id[r]] - log sum_u exp(s[r, u]),    rank[r] = 1 + the number of v with s[r, v] > s[r, id[r]]

Two passes over a row, no copy of it. Axes: R row, V token id.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.kernels.triton.operands import require_ids

_BLOCK = 4096


class Chosen(NamedTuple):
    """fp32 log-probabilities and int32 ranks, 1 is the most likely."""

    logprobs_R: torch.Tensor
    ranks_R: torch.Tensor


def chosen_logprobs(scores_RV: torch.Tensor, token_ids_R: torch.Tensor) -> Chosen:
    """Of fp32 scores and int64 ids, which must be in the vocabulary."""
    num_rows, vocabulary = scores_RV.shape
    require_ids("scores", scores_RV, None, None, dtype=torch.float32, like=scores_RV)
    require_ids("token_ids", token_ids_R, num_rows, dtype=torch.int64, like=scores_RV)
    chosen = Chosen(scores_RV.new_empty(num_rows), token_ids_R.new_empty(num_rows, dtype=torch.int32))
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        _chosen_logprobs[(num_rows,)](scores_RV, token_ids_R, *chosen, vocabulary, BLOCK=block, num_warps=8)
    return chosen


def reference(scores_RV: torch.Tensor, token_ids_R: torch.Tensor) -> Chosen:
    """The formula in float64; ranks compare the scores themselves."""
    own = scores_RV.gather(1, token_ids_R[:, None])
    logprobs = scores_RV.double().log_softmax(-1).gather(1, token_ids_R[:, None])
    return Chosen(logprobs[:, 0].float(), ((scores_RV > own).sum(1) + 1).int())


@triton.jit
def _chosen_logprobs(scores_RV, token_ids_R, logprobs_R, ranks_R, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scores = scores_RV + row * vocabulary
    lane = tl.arange(0, BLOCK)
    own = tl.load(scores + tl.load(token_ids_R + row))
    largest_N = tl.full([BLOCK], float("-inf"), tl.float32)
    higher_N = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocabulary, BLOCK):
        s = tl.load(scores + first + lane, mask=first + lane < vocabulary, other=float("-inf"))
        largest_N = tl.maximum(largest_N, s)
        higher_N += (s > own).to(tl.int32)
    largest = tl.max(largest_N, axis=0)
    total_N = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        s = tl.load(scores + first + lane, mask=first + lane < vocabulary, other=float("-inf"))
        total_N += tl.exp(s - largest)
    tl.store(logprobs_R + row, own - largest - tl.log(tl.sum(total_N, axis=0)))
    tl.store(ranks_R + row, tl.sum(higher_N, axis=0) + 1)
