"""Chooses tokens from logits on a GPU, for all rows of a step at once, without waiting for the device.

Owns: what sampler.py owns, in the same order and with the same choices, by the Triton kernels: the numbers that rows
ask for go to the device in one copy, and come back when somebody reads them. Refuses to know: models, and who asked.

Axes: R row, V token id.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.sampler import Mask, Row, Samples, hide
from baton.kernels.parcel import Fetched, send
from baton.kernels.sampling_noise import row_keys
from baton.kernels.triton.penalties import History, Penalties, penalize
from baton.kernels.triton.sampling import Draw, sample
from baton.kernels.triton.sampling_filters import Filters
from baton.kernels.triton.token_logprobs import Chosen, chosen_logprobs
from baton.proto.messages import TokenLogprob

_LEAST_MIN_P = 1e-38


@dataclass(frozen=True, slots=True)
class _Reported:
    """Log-probabilities on the device, of those rows that want any: of the token, and of the most likely ones."""

    rows: list[int]
    counts: list[int]
    chosen: Chosen
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


class DeviceChoice:
    """One token a row, on the device, and what the host is to know of it on its way there."""

    def __init__(self, token_ids_R: torch.Tensor, reported: _Reported | None = None) -> None:
        self.token_ids_R = token_ids_R
        self._reported = reported
        wanted = () if reported is None else (*reported.chosen, reported.top_ids, reported.top_logprobs)
        self._fetched = Fetched([token_ids_R, *wanted])

    def read(self) -> Samples:
        """Waits for the device."""
        token_ids, *numbers = (tensor.tolist() for tensor in self._fetched.read())
        if self._reported is None:
            return Samples(token_ids, {})
        logprobs, ranks, top_ids, top_logprobs = numbers
        return Samples(
            token_ids,
            {
                row: TokenLogprob(
                    token_id=token_ids[row],
                    logprob=logprobs[i],
                    rank=ranks[i],
                    top_ids=tuple(top_ids[i][:count]),
                    top_logprobs=tuple(top_logprobs[i][:count]),
                )
                for i, (row, count) in enumerate(zip(self._reported.rows, self._reported.counts, strict=True))
            },
        )


def choose(logits_RV: torch.Tensor, rows: Sequence[Row], mask: Mask | None = None) -> DeviceChoice:
    """Chooses one token a row, of those that the mask leaves. The logits may be overwritten."""
    if all(row.plain for row in rows):
        return DeviceChoice(logits_RV.max(dim=-1).indices)
    device, asked = logits_RV.device, [row.sampling for row in rows]
    scores = logits_RV.float()
    _shift(scores, _biases(rows, scores.shape[1]))
    if any(s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty for s in asked):
        _penalize(scores, rows)
    _shift(scores, _hidden_stop_ids(rows, scores.shape[1]))
    reported = [i for i, s in enumerate(asked) if s.logprobs is not None]
    places = send([np.array(reported, dtype=np.int64)], device)[0]
    # Of the scores as the model gave them: a copy, because the mask comes next.
    told = scores[places] if reported else None
    if mask is not None:
        hide(mask, scores)
    temperatures, top_k, top_p, log_min_p, keys = send(
        [
            np.array([0.0 if row.greedy else row.sampling.temperature for row in rows], dtype=np.float32),
            np.array([s.top_k for s in asked], dtype=np.int32),
            np.array([s.top_p for s in asked], dtype=np.float64),
            # The logarithm as the CPU takes it: the last bit may decide.
            torch.tensor([max(s.min_p, _LEAST_MIN_P) for s in asked]).log().numpy(),
            row_keys([s.seed for s in asked], [row.num_tokens for row in rows]).numpy(),
        ],
        device,
    )
    chosen = sample(scores, Draw(temperatures, Filters(top_k, top_p, log_min_p), keys))
    if told is None:
        return DeviceChoice(chosen)
    counts = [asked[i].logprobs or 0 for i in reported]
    own = chosen_logprobs(told, chosen[places])
    top = told.topk(min(max(counts), told.shape[1]), dim=1)
    total = told.gather(1, chosen[places][:, None])[:, 0] - own.logprobs_R
    return DeviceChoice(chosen, _Reported(reported, counts, own, top.indices, top.values - total[:, None]))


def _biases(rows: Sequence[Row], vocabulary: int) -> list[tuple[int, int, float]]:
    return [
        (i, entry.token_id, entry.bias)
        for i, row in enumerate(rows)
        for entry in row.sampling.logit_bias
        if 0 <= entry.token_id < vocabulary
    ]


def _hidden_stop_ids(rows: Sequence[Row], vocabulary: int) -> list[tuple[int, int, float]]:
    return [
        (i, token_id, -math.inf)
        for i, row in enumerate(rows)
        if row.num_tokens - row.num_prompt_tokens < row.sampling.min_tokens
        for token_id in sorted(set(row.sampling.stop_token_ids))
        if 0 <= token_id < vocabulary
    ]


def _shift(scores_RV: torch.Tensor, entries: Sequence[tuple[int, int, float]]) -> None:
    """Adds (row, token id, number) to the scores. A token may be named several times only if it is by one row."""
    if entries:
        rows, token_ids, numbers = zip(*entries, strict=True)
        where = np.array(rows, dtype=np.int64) * scores_RV.shape[1] + np.array(token_ids, dtype=np.int64)
        index, values = send([where, np.array(numbers, dtype=np.float32)], scores_RV.device)
        scores_RV.view(-1).index_add_(0, index, values)


def _penalize(scores_RV: torch.Tensor, rows: Sequence[Row]) -> None:
    lengths = [row.num_tokens for row in rows]
    asked = [row.sampling for row in rows]
    seen = [np.asarray(row.token_ids[: row.num_tokens], dtype=np.int32) for row in rows]
    ids, starts, prompts, repetition, presence, frequency = send(
        [
            np.concatenate(seen),
            np.cumsum([0, *lengths], dtype=np.int32),
            np.array([row.num_prompt_tokens for row in rows], dtype=np.int32),
            np.array([s.repetition_penalty for s in asked], dtype=np.float32),
            np.array([s.presence_penalty for s in asked], dtype=np.float32),
            np.array([s.frequency_penalty for s in asked], dtype=np.float32),
        ],
        scores_RV.device,
    )
    penalize(scores_RV, History(ids, starts, prompts, max(lengths)), Penalties(repetition, presence, frequency))
