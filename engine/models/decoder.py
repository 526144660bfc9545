"""Builds a `Decoder` from a checkpoint that names its tensors as all of our families do.

Owns: the tensor names, which tensors are fused, and whether the compiled kernels take the model. Refuses to know: which
family has which biases and norms; the family's file says so in `Traits`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.engine.layers import Decoder, Layer, Linear
from baton.engine.models.config import ModelConfig
from baton.engine.native import NativeDecoder
from baton.engine.rotary import Frequencies, inverse_frequencies
from baton.engine.weights import Weights
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


def build(
    config: ModelConfig, weights: Weights, traits: Traits, kernels: Kernels, cpu: Cpu | None
) -> Decoder | NativeDecoder:
    """Reads all weights; raises WeightError with the tensor's name. `cpu` computes whole steps where it can."""
    embedding = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = embedding
    if not config.tie_word_embeddings:
        head = weights.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
    inverse, factor = inverse_frequencies(config.rope, config.head_dim)
    frequencies = Frequencies(inverse.to(embedding.device), factor)
    prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]
    norm = weights.tensor("model.norm.weight", config.hidden_size)
    if cpu is not None and _is_native(config, embedding.dtype, cpu):
        # One layer at a time: the memory of the weight as it was read is free before the next one is.
        model = Model(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            epsilon=config.rms_norm_eps,
            embedding=embedding,
            norm=norm,
            layers=[_packed(_layer(config, weights, traits, prefix), cpu) for prefix in prefixes],
        )
        return NativeDecoder(cpu, model, frequencies, embedding, norm, cpu.pack(head))
    return Decoder(
        kernels=kernels,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        norm_epsilon=config.rms_norm_eps,
        frequencies=frequencies,
        embedding=embedding,
        layers=tuple(_blocked(_layer(config, weights, traits, prefix)) for prefix in prefixes),
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


def _layer(config: ModelConfig, weights: Weights, traits: Traits, prefix: str) -> Layer:
    """The weights as they are read, fused and not packed."""
    hidden, middle, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim

    def fused(names: tuple[str, ...], rows: int, columns: int, bias: bool) -> Linear:
        weight = weights.stacked([f"{prefix}{name}.weight" for name in names], rows, columns)
        return Linear(weight, weights.stacked([f"{prefix}{name}.bias" for name in names], rows) if bias else None)

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return Layer(
        attention_norm=weights.tensor(f"{prefix}input_layernorm.weight", hidden),
        qkv=fused(qkv, q_rows + 2 * kv_rows, hidden, traits.qkv_bias),
        qk_norm=_qk_norm(config, weights, prefix) if traits.qk_norm else None,
        output=fused(("self_attn.o_proj",), hidden, q_rows, traits.output_bias),
        mlp_norm=weights.tensor(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=fused(("mlp.gate_proj", "mlp.up_proj"), 2 * middle, hidden, traits.mlp_bias),
        down=fused(("mlp.down_proj",), hidden, middle, traits.mlp_bias),
    )


def _qk_norm(config: ModelConfig, weights: Weights, prefix: str) -> torch.Tensor:
    """One row a head, so that queries and keys are normalised in one pass."""
    query = weights.tensor(f"{prefix}self_attn.q_norm.weight", config.head_dim)
    key = weights.tensor(f"{prefix}self_attn.k_norm.weight", config.head_dim)
    return torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
