"""The decoder that all families share: pre-norm attention with rotary embedding, then a gated feed-forward layer.

Owns: `Decoder`, its parts, and the order in which a step is computed. Refuses to know: checkpoints, requests, sampling.

    tokens -> embedding -> norm -> [ qkv -> (norm of q, k) -> rope -> store KV -> attention -> output -> + residual
                            norm -> gate, up -> activation -> down -> + residual -> norm ] x layers -> rows asked for

Axes: T token of the step, R row asked for, H query head, K KV head, D feature of a head, E feature of the hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from baton.engine.group import Group
from baton.engine.rotary import Frequencies
from baton.engine.split import share
from baton.kernels.dispatch import Kernels
from baton.kernels.kv_store import Slots
from baton.kernels.linear import linear
from baton.kernels.rope import Rotation, rotation


class Linear(NamedTuple):
    """A weight from `kernels.linear.pack` and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return linear(x_TI, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. `qk_norm` [H + K, D] normalises query and key heads, None where the family does not."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Batch(NamedTuple):
    """One step's tokens as tensors: ids and positions [T], where their KV goes, and the decoder's plan of attention."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots: Slots
    attention: Any


@dataclass(frozen=True, slots=True)
class Decoder:
    """A rank's weights of a model, and the computation of a step with them; all ranks of the group compute it together.

    `vocabulary`: the rows of embedding and head that are here, of `vocab_size`.
    """

    kernels: Kernels
    group: Group
    num_heads: int
    head_dim: int
    norm_epsilon: float
    frequencies: Frequencies
    vocabulary: range
    vocab_size: int
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear
    head_VE: torch.Tensor

    def plan_attention(
        self,
        pool_NLK2SD: torch.Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[npt.NDArray[np.int64]],
    ) -> Any:
        """Plans attention of a step's sequences, once for all layers."""
        return self.kernels.plan_attention(pool_NLK2SD, query_lens, context_lens, block_tables, self.num_heads)

    def hidden(self, batch: Batch, pool_NLK2SD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Computes the step, writes its KV into the pool, and returns the final hidden state of some rows, [R, E]."""
        kernels, epsilon, group = self.kernels, self.norm_epsilon, self.group
        residual = self._embedded(batch.token_ids_T)
        turn = rotation(batch.positions_T, self.frequencies.inverse, self.frequencies.factor, residual.dtype)
        following = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        normed = kernels.rms_norm(residual, self.layers[0].attention_norm, epsilon)
        for number, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            attended = self._attend(normed, batch, turn, pool_NLK2SD, number, layer)
            if next_norm is self.norm:
                if not len(rows_R):
                    return residual[:0]
                residual, attended = residual[rows_R], attended[rows_R]
            normed = kernels.add_rms_norm(group.sum_(layer.output(attended)), residual, layer.mlp_norm, epsilon)
            activated = kernels.gated_activation(layer.gate_up(normed))
            normed = kernels.add_rms_norm(group.sum_(layer.down(activated)), residual, next_norm, epsilon)
        return normed

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Scores of the vocabulary for each row, fp32; all of them on rank 0, on others those of their own part.

        A product in half precision rounds a score of 20 to a multiple of 1/8 (bf16), so the best few are often equal,
        and which of them wins would change with the shape of the batch. Those near the top are computed again in fp32.
        """
        rounded = self.head(hidden_RE)
        scores = rounded.float()
        if rounded.dtype is not torch.float32:
            best = self.group.largest_(scores.amax(dim=1, keepdim=True))
            near = best - 4 * best.abs().clamp(min=1.0) * torch.finfo(rounded.dtype).eps
            (refine_few if scores.is_cuda else refine_all)(scores, near, hidden_RE, self.head_VE)
        return self.group.gathered(
            scores, [len(share(self.vocab_size, i, self.group.size)) for i in range(self.group.size)]
        )

    def _embedded(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return functional.embedding(token_ids_T, self.embedding)
        ids = token_ids_T - self.vocabulary.start
        elsewhere = (ids < 0) | (ids >= len(self.vocabulary))
        rows = functional.embedding(ids.masked_fill_(elsewhere, 0), self.embedding)
        return self.group.sum_(rows.masked_fill_(elsewhere[:, None], 0.0))

    def _attend(
        self,
        normed_TE: torch.Tensor,
        batch: Batch,
        turn: Rotation,
        pool_NLK2SD: torch.Tensor,
        number: int,
        layer: Layer,
    ) -> torch.Tensor:
        qkv = layer.qkv(normed_TE).view(len(normed_TE), -1, self.head_dim)
        query = self.kernels.rope_store(qkv, layer.qk_norm, self.norm_epsilon, turn, pool_NLK2SD, number, batch.slots)
        return self.kernels.paged_attention(query, pool_NLK2SD, number, batch.attention).flatten(1)


def refine_all(scores_RV: torch.Tensor, near_R1: torch.Tensor, hidden_RE: torch.Tensor, head_VE: torch.Tensor) -> None:
    """Computes scores from `near_R1` on again, in fp32. Waits for the device: how many they are decides the shape."""
    rows, ids = (scores_RV >= near_R1).nonzero(as_tuple=True)
    scores_RV[rows, ids] = (hidden_RE[rows].float() * head_VE[ids].float()).sum(dim=1)


def refine_few(
    scores_RV: torch.Tensor, near_R1: torch.Tensor, hidden_RE: torch.Tensor, head_VE: torch.Tensor, count: int = 8
) -> None:
    """The same for the best `count` of each row at most, without waiting."""
    top = scores_RV.topk(min(count, scores_RV.shape[1]), dim=1)
    exact = torch.einsum("re,rce->rc", hidden_RE.float(), head_VE[top.indices].float())
    scores_RV.scatter_(1, top.indices, torch.where(top.values >= near_R1, exact, top.values))
