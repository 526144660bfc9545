"""Llama 1 to 3 and what shares their architecture (SmolLM2, TinyLlama, Yi): biases where config.json asks for them."""

from __future__ import annotations

from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Traits


def traits(config: ModelConfig) -> Traits:
    """What sets the family apart."""
    return Traits(qkv_bias=config.attention_bias, output_bias=config.attention_bias, mlp_bias=config.mlp_bias)
