"""Qwen2 and Qwen2.5: query, key and value have a bias, which config.json does not mention."""

from __future__ import annotations

from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Traits


def traits(config: ModelConfig) -> Traits:
    """What sets the family apart."""
    return Traits(qkv_bias=True)
