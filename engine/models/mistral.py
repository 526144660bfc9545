"""Mistral 7B and its kin: no biases. Versions with a sliding window run up to the length of the window."""

from __future__ import annotations

from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Traits


def traits(config: ModelConfig) -> Traits:
    """What sets the family apart."""
    return Traits()
