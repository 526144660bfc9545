"""Qwen3, dense: every query and key head is normalised before it is rotated; biases where config.json asks for them."""

from __future__ import annotations

from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Traits


def traits(config: ModelConfig) -> Traits:
    """What sets the family apart."""
    return Traits(qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True)
