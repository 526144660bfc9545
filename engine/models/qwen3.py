"""Qwen3, dense: every query and key head is normalised before it is rotated; biases where config.json asks for them."""

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
        Traits(qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True),
        cpu,
    )
