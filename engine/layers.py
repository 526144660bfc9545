"""The decoder that all families share: pre-norm attention with rotary embedding, then a gated feed-forward layer.

Owns: `Decoder`, its parts, and the order in which a step is computed. Refuses to know: checkpoints, requests, sampling.

    tokens -> embedding -> [ norm -> qkv -> (norm of q, k) -> rope -> store KV -> attention -> output, + residual
                             norm -> gate, up -> activation -> down, + residual ] x layers -> rows asked for -> norm

Axes: T token of the step, R row asked for, H query head, K KV head, D feature of a head, E feature of the hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from baton.engine.rotary import Frequencies
from baton.kernels.gated_activation import gated_activation
from baton.kernels.kv_store import Slots, kv_store
from baton.kernels.linear import linear
from baton.kernels.paged_attention import AttentionPlan, paged_attention
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope import Rotation, rope, rotation


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
    """One step's tokens as tensors: ids and positions [T], where their KV goes, and how they attend."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots: Slots
    attention: AttentionPlan


@dataclass(frozen=True, slots=True)
class Decoder:
    """All weights of a model, and the computation of a step with them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    frequencies: Frequencies
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear
    head_VE: torch.Tensor

    def hidden(self, batch: Batch, pool_NLK2SD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Computes the step, writes its KV into the pool, and returns the final hidden state of some rows, [R, E]."""
        x = functional.embedding(batch.token_ids_T, self.embedding)
        turn = rotation(batch.positions_T, self.frequencies.inverse, self.frequencies.factor, x.dtype)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            attended = self._attend(x, batch, turn, pool_NLK2SD, number, layer)
            if number == last:
                if not len(rows_R):
                    return x[:0]
                x, attended = x[rows_R], attended[rows_R]
            x = x + layer.output(attended)
            gate_up = layer.gate_up(rms_norm(x, layer.mlp_norm, self.norm_epsilon))
            x = x + layer.down(gated_activation(gate_up))
        return rms_norm(x, self.norm, self.norm_epsilon)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Scores of the vocabulary for each row, fp32.

        A product in half precision rounds a score of 20 to a multiple of 1/8 (bf16), so the best few are often equal,
        and which of them wins would change with the shape of the batch. Those near the top are computed again in fp32.
        """
        rounded = self.head(hidden_RE)
        scores = rounded.float()
        if rounded.dtype is torch.float32:
            return scores
        best = scores.amax(dim=1, keepdim=True)
        spacing = best.abs().clamp(min=1.0) * torch.finfo(rounded.dtype).eps
        rows, ids = (scores >= best - 4 * spacing).nonzero(as_tuple=True)
        scores[rows, ids] = (hidden_RE[rows].float() * self.head_VE[ids].float()).sum(dim=1)
        return scores

    def _attend(
        self, x_TE: torch.Tensor, batch: Batch, turn: Rotation, pool_NLK2SD: torch.Tensor, number: int, layer: Layer
    ) -> torch.Tensor:
        normed = rms_norm(x_TE, layer.attention_norm, self.norm_epsilon)
        qkv = layer.qkv(normed).view(len(x_TE), -1, self.head_dim)
        qk, value = qkv[:, : -self.num_kv_heads], qkv[:, -self.num_kv_heads :]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, self.norm_epsilon)
        qk = rope(qk, turn)
        kv_store(qk[:, self.num_heads :], value, pool_NLK2SD, number, batch.slots)
        return paged_attention(qk[:, : self.num_heads], pool_NLK2SD, number, batch.attention).flatten(1)
