"""Builds a `Decoder` from a checkpoint that names its tensors as all of our families do.

Owns: the tensor names, which tensors are fused, how each is cut between ranks, and whether the compiled kernels take
the model. Refuses to know: which family has which biases and norms; the family's file says so in `Traits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from baton.engine.group import Group
from baton.engine.layers import Decoder, Layer, Linear
from baton.engine.models.config import ModelConfig
from baton.engine.native import NativeDecoder
from baton.engine.rotary import Frequencies, inverse_frequencies
from baton.engine.split import Split
from baton.engine.weights import Piece, Weights
from baton.kernels.cpu.library import Cpu, LayerWeights, Model, interleaved
from baton.kernels.dispatch import Kernels
from baton.kernels.linear import pack


@dataclass(frozen=True, slots=True)
class Traits:
    """What sets a family apart from the others."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class Means:
    """What a rank computes with. `cpu` computes whole steps, where a rank computes alone and the model allows it."""

    kernels: Kernels
    group: Group
    cpu: Cpu | None


def build(config: ModelConfig, weights: Weights, traits: Traits, split: Split, means: Means) -> Decoder | NativeDecoder:
    """Reads a rank's weights; raises WeightError with the tensor's name."""
    table = (config.vocab_size, config.hidden_size)
    embedding = weights.stacked([Piece("model.embed_tokens.weight", table, rows=split.vocabulary)])
    head = embedding
    if not config.tie_word_embeddings:
        head = weights.stacked([Piece("lm_head.weight", table, rows=split.vocabulary)])
    inverse, factor = inverse_frequencies(config.rope, config.head_dim)
    frequencies = Frequencies(inverse.to(embedding.device), factor)
    prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]
    norm = weights.tensor("model.norm.weight", config.hidden_size)
    cpu = means.cpu
    if cpu is not None and split.size == 1 and _is_native(config, embedding.dtype, cpu):
        # One layer at a time: the memory of the weight as it was read is free before the next one is.
        model = Model(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            epsilon=config.rms_norm_eps,
            embedding=embedding,
            norm=norm,
            layers=[_packed(_layer(config, weights, traits, split, prefix), cpu) for prefix in prefixes],
        )
        return NativeDecoder(cpu, model, frequencies, embedding, norm, cpu.pack(head))
    return Decoder(
        kernels=means.kernels,
        group=means.group,
        num_heads=len(split.heads),
        head_dim=config.head_dim,
        norm_epsilon=config.rms_norm_eps,
        frequencies=frequencies,
        vocabulary=split.vocabulary,
        vocab_size=config.vocab_size,
        embedding=embedding,
        layers=tuple(_blocked(_layer(config, weights, traits, split, prefix)) for prefix in prefixes),
        norm=norm,
        head=Linear(pack(head), None),
        head_VE=head,
    )


def _is_native(config: ModelConfig, dtype: torch.dtype, cpu: Cpu) -> bool:
    depths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    return cpu.attends_heads(config.head_dim) and all(cpu.multiplies(depth, dtype) for depth in depths)


def _packed(layer: Layer, cpu: Cpu) -> LayerWeights:
    gate_up, bias = layer.gate_up
    return LayerWeights(
        attention_norm=layer.attention_norm,
        qk_norm=layer.qk_norm,
        mlp_norm=layer.mlp_norm,
        qkv=(cpu.pack(layer.qkv.weight), layer.qkv.bias),
        output=(cpu.pack(layer.output.weight), layer.output.bias),
        gate_up=(cpu.pack(interleaved(gate_up)), None if bias is None else interleaved(bias)),
        down=(cpu.pack(layer.down.weight), layer.down.bias),
    )


def _blocked(layer: Layer) -> Layer:
    def linear(plain: Linear) -> Linear:
        return Linear(pack(plain.weight), plain.bias)

    return replace(
        layer,
        qkv=linear(layer.qkv),
        output=linear(layer.output),
        gate_up=linear(layer.gate_up),
        down=linear(layer.down),
    )


def _layer(config: ModelConfig, weights: Weights, traits: Traits, split: Split, prefix: str) -> Layer:
    """A rank's weights as they are read, fused and not packed."""
    hidden, middle, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries = _Cut(config.num_heads * dim, _features(split.heads, dim))
    keys = _Cut(config.num_kv_heads * dim, _features(split.kv_heads, dim))
    inner = _Cut(middle, split.middle)

    def by_rows(cuts: Mapping[str, _Cut], bias: bool) -> Linear:
        """Each rank computes some of the outputs."""
        weight = [Piece(f"{prefix}{name}.weight", (cut.whole, hidden), rows=cut.kept) for name, cut in cuts.items()]
        if not bias:
            return Linear(weights.stacked(weight), None)
        offsets = [Piece(f"{prefix}{name}.bias", (cut.whole,), rows=cut.kept) for name, cut in cuts.items()]
        return Linear(weights.stacked(weight), weights.stacked(offsets))

    def by_columns(name: str, cut: _Cut, bias: bool) -> Linear:
        """Each rank computes a part of every sum; the bias is to be added once."""
        weight = weights.stacked([Piece(f"{prefix}{name}.weight", (hidden, cut.whole), columns=cut.kept)])
        return Linear(weight, weights.tensor(f"{prefix}{name}.bias", hidden) if bias and split.rank == 0 else None)

    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    return Layer(
        attention_norm=weights.tensor(f"{prefix}input_layernorm.weight", hidden),
        qkv=by_rows(qkv, traits.qkv_bias),
        qk_norm=_qk_norm(config, weights, split, prefix) if traits.qk_norm else None,
        output=by_columns("self_attn.o_proj", queries, traits.output_bias),
        mlp_norm=weights.tensor(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=by_rows({"mlp.gate_proj": inner, "mlp.up_proj": inner}, traits.mlp_bias),
        down=by_columns("mlp.down_proj", inner, traits.mlp_bias),
    )


class _Cut(NamedTuple):
    """What a rank keeps of an axis."""

    whole: int
    kept: range


def _features(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _qk_norm(config: ModelConfig, weights: Weights, split: Split, prefix: str) -> torch.Tensor:
    """One row a head, so that queries and keys are normalised in one pass."""
    query = weights.tensor(f"{prefix}self_attn.q_norm.weight", config.head_dim)
    key = weights.tensor(f"{prefix}self_attn.k_norm.weight", config.head_dim)
    return torch.cat((query.expand(len(split.heads), -1), key.expand(len(split.kv_heads), -1)))
