"""Chooses tokens from logits, for all rows of a step at once.

Owns: the order in which a request's sampling parameters apply, and log-probabilities. Refuses to know: models, and who
asked. A row's result depends on the row alone, never on its neighbours in the batch. Ids in a request that are outside
the vocabulary name no token and have no effect.

    logits -> fp32 -> logit bias -> repetition, presence, frequency penalties -> min_tokens hides the stop ids
           -> [log-probabilities are taken here] -> mask of allowed ids
           -> temperature -> top-k -> top-p -> min-p -> noise -> the largest

Each of the three filters keeps what reaches a threshold, so that equally likely tokens stay or go together:
top-k keeps what is as likely as the k-th; top-p what has less than p of mass strictly above it, among what top-k kept;
min-p what is at least min_p times as likely as the most likely. Axes: R row, V token id, C candidate.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from baton.kernels.sampling_noise import gumbel_noise, row_keys
from baton.proto.messages import Sampling, TokenLogprob

_GREEDY_BELOW = 1e-5  # a temperature so small would overflow the scores
_CANDIDATES = 1024  # most likely tokens that top-p and min-p look at before they take in the whole vocabulary


class Row(NamedTuple):
    """One token to choose: tokens [0, num_tokens) are there, of which the first `num_prompt_tokens` are the prompt."""

    sampling: Sampling
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_tokens: int

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """The most likely token and nothing else is wanted."""
        s = self.sampling
        return (
            self.greedy
            and s.logprobs is None
            and not s.logit_bias
            and s.repetition_penalty == 1.0
            and s.presence_penalty == 0.0
            and s.frequency_penalty == 0.0
            and s.min_tokens <= self.num_tokens - self.num_prompt_tokens
            and not s.grammar
        )


class Mask(NamedTuple):
    """Bit t % 32 of word t // 32 says whether row `rows[i]` may go on with token t; it may with one at least.

    Rows ascend.
    """

    rows: list[int]
    bits_RW: torch.Tensor


class Samples(NamedTuple):
    """One token id a row, and the log-probabilities of those rows that want any."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob]


class Choice(Protocol):
    """One token a row, still on the device."""

    @property
    def token_ids_R(self) -> torch.Tensor: ...

    def read(self) -> Samples:
        """Waits for the device."""
        ...


class HostChoice(NamedTuple):
    """One token a row, chosen on the host."""

    samples: Samples

    @property
    def token_ids_R(self) -> torch.Tensor:
        return torch.tensor(self.samples.token_ids)

    def read(self) -> Samples:
        return self.samples


class Chooser(Protocol):
    """Chooses one token a row, of those that the mask leaves. The logits may be overwritten."""

    def __call__(self, logits_RV: torch.Tensor, rows: Sequence[Row], mask: Mask | None) -> Choice: ...


def chooser_for(device: torch.device) -> Chooser:
    """The sampler for logits of this device; the Triton kernels' import waits until somebody asks."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from baton.engine.device_sampler import choose

        return choose
    return choose_on_host


def choose_on_host(logits_RV: torch.Tensor, rows: Sequence[Row], mask: Mask | None = None) -> Choice:
    """By plain torch operations, one after the other; on a GPU without Triton too."""
    return HostChoice(sample(logits_RV, rows, mask))


def sample(logits_RV: torch.Tensor, rows: Sequence[Row], mask: Mask | None = None) -> Samples:
    """Chooses one token a row, of those that the mask leaves. The logits may be overwritten."""
    if all(row.plain for row in rows):
        return Samples(_largest(logits_RV).tolist(), {})
    scores = logits_RV.float()
    _add_bias(scores, rows)
    _penalize(scores, rows)
    _hide_stop_ids(scores, rows)
    reported = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    # Of the scores as the model gave them: a copy, because the mask comes next.
    reported_scores = scores[torch.tensor(reported, device=scores.device)] if reported else None
    if mask is not None:
        hide(mask, scores)
    chosen = _largest(scores)
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if drawn:
        index = torch.tensor(drawn, device=scores.device)
        chosen[index] = _draw(scores[index], [rows[i] for i in drawn])
    logprobs: dict[int, TokenLogprob] = {}
    if reported_scores is not None:
        counts = [rows[i].sampling.logprobs or 0 for i in reported]
        logprobs = dict(zip(reported, token_logprobs(reported_scores, chosen[reported], counts), strict=True))
    return Samples(chosen.tolist(), logprobs)


def token_logprobs(scores_RV: torch.Tensor, token_ids_R: torch.Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    """Log-probability and rank (1 is the most likely) of one token a row, and the `counts[i]` most likely ones."""
    logprobs = scores_RV.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids_R[:, None])
    ranks = ((logprobs > own).sum(1) + 1).tolist()
    width = min(max(counts), logprobs.shape[1])
    top = logprobs.topk(width, dim=1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=logprob,
            rank=ranks[i],
            top_ids=tuple(top_ids[i][: counts[i]]),
            top_logprobs=tuple(top_values[i][: counts[i]]),
        )
        for i, (token_id, logprob) in enumerate(zip(token_ids_R.tolist(), own[:, 0].tolist(), strict=True))
    ]


def _largest(scores_RV: torch.Tensor) -> torch.Tensor:
    """Index of the largest score of each row, the lowest one if there are several."""
    if scores_RV.device.type == "cpu" and scores_RV.dtype is torch.float32:
        # Reads at the speed of memory, where torch takes rows number by number.
        return torch.from_numpy(scores_RV.numpy().argmax(axis=-1))
    return scores_RV.max(dim=-1).indices


def _add_bias(scores_RV: torch.Tensor, rows: Sequence[Row]) -> None:
    for i, row in enumerate(rows):
        if row.sampling.logit_bias:
            entries = [entry for entry in row.sampling.logit_bias if 0 <= entry.token_id < scores_RV.shape[1]]
            ids = torch.tensor([entry.token_id for entry in entries], dtype=torch.int64, device=scores_RV.device)
            bias = torch.tensor([entry.bias for entry in entries], dtype=torch.float32, device=scores_RV.device)
            scores_RV[i].index_add_(0, ids, bias)


def _penalize(scores_RV: torch.Tensor, rows: Sequence[Row]) -> None:
    """Repetition looks at prompt and output and scales; presence and frequency look at the output and subtract."""
    for i, row in enumerate(rows):
        s = row.sampling
        if s.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(np.asarray(row.token_ids[: row.num_tokens], dtype=np.int64)))
            seen = seen.to(scores_RV.device)
            values = scores_RV[i, seen]
            scores_RV[i, seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        if s.presence_penalty != 0.0 or s.frequency_penalty != 0.0:
            output = np.asarray(row.token_ids[row.num_prompt_tokens : row.num_tokens], dtype=np.int64)
            ids, counts = np.unique(output, return_counts=True)
            penalty = s.presence_penalty + s.frequency_penalty * counts.astype(np.float32)
            written = torch.from_numpy(ids).to(scores_RV.device)
            scores_RV[i, written] -= torch.from_numpy(penalty.astype(np.float32)).to(scores_RV.device)


def _hide_stop_ids(scores_RV: torch.Tensor, rows: Sequence[Row]) -> None:
    for i, row in enumerate(rows):
        if row.num_tokens - row.num_prompt_tokens < row.sampling.min_tokens:
            ids = [token_id for token_id in row.sampling.stop_token_ids if 0 <= token_id < scores_RV.shape[1]]
            scores_RV[i, torch.tensor(ids, dtype=torch.int64, device=scores_RV.device)] = -math.inf


def hide(mask: Mask, scores_RV: torch.Tensor) -> None:
    """Hides what the mask does not leave."""
    vocabulary = scores_RV.shape[1]
    if scores_RV.device.type == "cpu":
        # Several times as fast as filling where a mask says so, which branches at each id. 1 becomes inf, 0 -inf.
        octets = mask.bits_RW.numpy().view(np.uint8)
        allowed = torch.from_numpy(np.unpackbits(octets, axis=1, count=vocabulary, bitorder="little"))
        for row, allowed_V in zip(mask.rows, allowed, strict=True):
            torch.minimum(scores_RV[row], allowed_V.float().sub_(0.5).mul_(math.inf), out=scores_RV[row])
        return
    # The bits are an eighth of what they become: they travel, and are spread where the scores are.
    hidden_RV = spread(~mask.bits_RW.to(scores_RV.device), vocabulary)
    index = torch.tensor(mask.rows, device=scores_RV.device)
    scores_RV[index] = scores_RV[index].masked_fill_(hidden_RV, -math.inf)


def spread(bits_RW: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The first bits of each row as booleans, the lowest of each word first, on the device where they are."""
    octets = bits_RW.view(torch.uint8)[:, :, None]
    places = torch.arange(8, dtype=torch.uint8, device=bits_RW.device)
    return (octets >> places).bitwise_and_(1).view(torch.bool).flatten(1)[:, :num_bits]


def _draw(scores_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """A draw from softmax(scores / temperature) after the filters, by the noise of (seed, position)."""
    device = scores_RV.device
    scores_RV = scores_RV / torch.tensor([row.sampling.temperature for row in rows], device=device)[:, None]
    keys = row_keys([row.sampling.seed for row in rows], [row.num_tokens for row in rows]).to(device)
    chosen = torch.empty(len(rows), dtype=torch.int64, device=device)
    filtered = [i for i, row in enumerate(rows) if _filters(row.sampling)]
    whole = [i for i, row in enumerate(rows) if not _filters(row.sampling)]
    if filtered:
        index = torch.tensor(filtered, device=device)
        chosen[index] = _draw_filtered(scores_RV[index], keys[index], [rows[i].sampling for i in filtered])
    if whole:
        index = torch.tensor(whole, device=device)
        chosen[index] = _draw_whole(scores_RV[index], keys[index])
    return chosen


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _draw_whole(scores_RV: torch.Tensor, keys_R2: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(scores_RV.shape[1], dtype=torch.int32, device=scores_RV.device)[None]
    return _largest(gumbel_noise(keys_R2, ids).add_(scores_RV))


def _draw_filtered(scores_RV: torch.Tensor, keys_R2: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Most filters keep few tokens: then only the candidates need noise, which is the same noise either way."""
    vocabulary = scores_RV.shape[1]
    width = min(vocabulary, max(s.top_k or _CANDIDATES for s in samplings) + 1)
    top = scores_RV.topk(width, dim=1)
    thresholds = filter_thresholds(scores_RV, top.values, samplings)
    candidates = top.values.masked_fill(top.values < thresholds[:, None], -math.inf)
    noise = gumbel_noise(keys_R2, top.indices.int()).add_(candidates)
    chosen = top.indices.gather(1, _largest(noise)[:, None])[:, 0]
    open_ended = ((top.values[:, -1] >= thresholds) & (width < vocabulary)).nonzero()[:, 0]
    if len(open_ended):
        scores = scores_RV[open_ended]
        scores.masked_fill_(scores < thresholds[open_ended, None], -math.inf)
        chosen[open_ended] = _draw_whole(scores, keys_R2[open_ended])
    return chosen


def filter_thresholds(scores_RV: torch.Tensor, top_RC: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """The score that a token must reach in each row; `top_RC` holds its largest scores, sorted, at least top_k."""
    device = scores_RV.device
    vocabulary, width = scores_RV.shape[1], top_RC.shape[1]
    top_k = torch.tensor([min(s.top_k or vocabulary, vocabulary) for s in samplings], device=device)
    min_p = torch.tensor([max(s.min_p, 1e-38) for s in samplings], device=device)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    kth = top_RC.gather(1, (top_k.clamp(max=width) - 1)[:, None])[:, 0]
    thresholds = kth.masked_fill(top_k >= vocabulary, -math.inf)
    nucleus = (top_p < 1.0).nonzero()[:, 0]
    if len(nucleus):
        limit = top_p[nucleus]
        kept = scores_RV[nucleus]
        kept.masked_fill_(kept < thresholds[nucleus, None], -math.inf)
        total = kept.logsumexp(-1, keepdim=True)
        above = _mass_above(top_RC[nucleus].masked_fill(top_RC[nucleus] < thresholds[nucleus, None], -math.inf), total)
        sizes = (above < limit[:, None]).sum(1).clamp(min=1)
        nucleus_thresholds = top_RC[nucleus].gather(1, (sizes - 1)[:, None])[:, 0]
        wide = ((sizes == width) & (width < vocabulary)).nonzero()[:, 0]
        if len(wide):
            ordered = kept[wide].sort(dim=-1, descending=True).values
            sizes = (_mass_above(ordered, total[wide]) < limit[wide, None]).sum(1)
            nucleus_thresholds[wide] = ordered.gather(1, (sizes - 1)[:, None])[:, 0]
        thresholds[nucleus] = torch.maximum(thresholds[nucleus], nucleus_thresholds)
    return torch.maximum(thresholds, top_RC[:, 0] + min_p.log())


def _mass_above(ordered_RC: torch.Tensor, total_R1: torch.Tensor) -> torch.Tensor:
    """For scores in falling order: the probability of all that stand before each."""
    probabilities = (ordered_RC - total_R1).exp().double()
    return probabilities.cumsum(-1) - probabilities
