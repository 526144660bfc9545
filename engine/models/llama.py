"""Llama 1 to 3 and what shares their architecture (SmolLM2, TinyLlama, Yi): biases where config.json asks for them."""

from __future__ import annotations

from baton.engine.layers import Decoder
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Traits, build
from baton.engine.native import NativeDecoder
from baton.engine.weights import Weights
from baton.kernels.cpu.library import Cpu


def load(config: ModelConfig, weights: Weights, cpu: Cpu | None) -> Decoder | NativeDecoder:
    """Builds the decoder; raises WeightError with the tensor's name."""
    return build(
        config,
        weights,
        Traits(qkv_bias=config.attention_bias, output_bias=config.attention_bias, mlp_bias=config.mlp_bias),
        cpu,
    )
