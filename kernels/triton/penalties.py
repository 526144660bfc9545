"""Repetition, presence and frequency penalties of a batch, on a GPU.

    s[r, v] = s > 0 ? s / repetition[r] : s * repetition[r]        where v occurs in row r's prompt or output
    s[r, v] = s - (presence[r] + frequency[r] * n)                 where v occurs n > 0 times in row r's output

A row's tokens are a stretch of one flat array; the penalised scores are changed in place. Counts are made anew from
the tokens, so no state is kept between steps. The order of operations and of roundings is the CPU path's, and no
product is fused with a sum. Axes: R row, V token id, T token of all rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from baton.kernels.triton.operands import OperandError, require, require_ids

_BLOCK = 1024


class History(NamedTuple):
    """What rows have seen: row r is ids_T[starts_R1[r] : starts_R1[r + 1]], its first prompts_R[r] are the prompt.

    All int32. Ids outside the vocabulary name no token. `longest` is the most tokens of a row.
    """

    ids_T: torch.Tensor
    starts_R1: torch.Tensor
    prompts_R: torch.Tensor
    longest: int


class Penalties(NamedTuple):
    """fp32, one a row: 1, 0 and 0 change nothing."""

    repetition_R: torch.Tensor
    presence_R: torch.Tensor
    frequency_R: torch.Tensor


def penalize(scores_RV: torch.Tensor, history: History, penalties: Penalties) -> None:
    """Changes fp32 scores in place."""
    num_rows, vocabulary = scores_RV.shape
    require_ids("scores", scores_RV, None, None, dtype=torch.float32, like=scores_RV)
    require_ids("ids", history.ids_T, None, dtype=torch.int32, like=scores_RV)
    require_ids("starts", history.starts_R1, num_rows + 1, dtype=torch.int32, like=scores_RV)
    require_ids("prompts", history.prompts_R, num_rows, dtype=torch.int32, like=scores_RV)
    for name, values in zip(Penalties._fields, penalties, strict=True):
        require(name, values, num_rows, like=scores_RV)
    if history.longest < 0:
        raise OperandError(f"longest: {history.longest}, needs 0 or more")
    if not num_rows or not history.longest:
        return
    # Output tokens count in the low bits; a prompt token sets a bit that no count reaches.
    counts_RV = torch.zeros(num_rows, vocabulary, dtype=torch.int32, device=scores_RV.device)
    _count[(num_rows, triton.cdiv(history.longest, _BLOCK))](
        history.ids_T, history.starts_R1, history.prompts_R, counts_RV, vocabulary, BLOCK=_BLOCK
    )
    _penalize[(num_rows, triton.cdiv(vocabulary, _BLOCK))](
        scores_RV, counts_RV, *penalties, vocabulary, BLOCK=_BLOCK, enable_fp_fusion=False
    )


def reference(scores_RV: torch.Tensor, history: History, penalties: Penalties) -> None:
    """The formula, a row at a time, in fp32."""
    starts = history.starts_R1.tolist()
    for r in range(len(scores_RV)):
        ids = history.ids_T[starts[r] : starts[r + 1]].long()
        known = (ids >= 0) & (ids < scores_RV.shape[1])
        prompt = int(history.prompts_R[r])
        seen = ids[known].unique()
        written, counts = ids[prompt:][known[prompt:]].unique(return_counts=True)
        s = scores_RV[r, seen]
        repetition = penalties.repetition_R[r]
        scores_RV[r, seen] = torch.where(s > 0, s / repetition, s * repetition)
        scores_RV[r, written] -= penalties.presence_R[r] + penalties.frequency_R[r] * counts.float()


@triton.jit
def _count(ids_T, starts_R1, prompts_R, counts_RV, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_R1 + row)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(ids_T + start + place, mask=place < tl.load(starts_R1 + row + 1) - start, other=-1)
    known = (token_id >= 0) & (token_id < vocabulary)
    written = known & (place >= tl.load(prompts_R + row))
    target = counts_RV + row * vocabulary + token_id
    tl.atomic_add(target, tl.full([BLOCK], 1, tl.int32), mask=written, sem="relaxed")
    tl.atomic_or(target, tl.full([BLOCK], 1 << 30, tl.int32), mask=known & (written == 0), sem="relaxed")


@triton.jit
def _penalize(scores_RV, counts_RV, repetition_R, presence_R, frequency_R, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = v < vocabulary
    count = tl.load(counts_RV + row * vocabulary + v, mask=there, other=0)
    s = tl.load(scores_RV + row * vocabulary + v, mask=there, other=0.0)
    repetition = tl.load(repetition_R + row)
    s = tl.where(count != 0, tl.where(s > 0.0, tl.math.div_rn(s, repetition + tl.zeros_like(s)), s * repetition), s)
    written = count & ((1 << 30) - 1)
    penalty = tl.load(presence_R + row) + tl.load(frequency_R + row) * written.to(tl.float32)
    s = tl.where(written > 0, s - penalty, s)
    tl.store(scores_RV + row * vocabulary + v, s, mask=there)
