"""Mistral 7B and its kin: no biases. Versions with a sliding window run up to the length of the window."""

from __future__ import annotations

from baton.engine.layers import Decoder
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Traits, build
from baton.engine.native import NativeDecoder
from baton.engine.weights import Weights
from baton.kernels.cpu.library import Cpu


def load(config: ModelConfig, weights: Weights, cpu: Cpu | None) -> Decoder | NativeDecoder:
    """Builds the decoder; raises WeightError with the tensor's name."""
    return build(config, weights, Traits(), cpu)
