"""From scores to one token a row, all on a GPU: penalties, temperature, filters, noise, the largest.

    scores -> penalties.py -> / temperature -> sampling_filters.py -> token_choice.py -> ids

What a row needs are numbers in arrays, one a row, so that rows of every kind are one batch and nothing waits for the
device. Biases, hidden stop ids and masks of allowed ids are the caller's: they change the scores before. Axes: R row,
V token id.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from baton.kernels.triton.operands import require_ids
from baton.kernels.triton.penalties import History, Penalties, penalize
from baton.kernels.triton.sampling_filters import Filters, filter_thresholds
from baton.kernels.triton.token_choice import choose


class Draw(NamedTuple):
    """How rows draw: fp32 temperatures (0 is greedy), filters, and the key words of (seed, position)."""

    temperatures_R: torch.Tensor
    filters: Filters
    keys_R2: torch.Tensor


def filters_of(top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float], device: torch.device) -> Filters:
    """Filters of rows; 0, 1 and 0 are off. The logarithm is taken here, once, as the CPU path takes it."""
    return Filters(
        torch.tensor(list(top_k), dtype=torch.int32, device=device),
        torch.tensor(list(top_p), dtype=torch.float64, device=device),
        torch.tensor([max(p, 1e-38) for p in min_p]).log().to(device),
    )


def sample(
    scores_RV: torch.Tensor, draw: Draw, history: History | None = None, penalties: Penalties | None = None
) -> torch.Tensor:
    """int64 ids [R] of fp32 scores, which the penalties change in place."""
    require_ids("temperatures", draw.temperatures_R, len(scores_RV), dtype=torch.float32, like=scores_RV)
    if history is not None and penalties is not None:
        penalize(scores_RV, history, penalties)
    greedy_R = draw.temperatures_R <= 0.0
    scaled_RV = scores_RV / draw.temperatures_R.masked_fill(greedy_R, 1.0)[:, None]
    # A greedy row takes the largest, which every filter keeps.
    thresholds_R = filter_thresholds(scaled_RV, draw.filters).masked_fill_(greedy_R, -math.inf)
    return choose(scaled_RV, draw.keys_R2, (~greedy_R).int(), thresholds_R)
