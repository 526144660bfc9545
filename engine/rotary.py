"""The frequencies that a model's rotary embedding turns by, for each kind of scaling that its config may ask for.

Owns: `inverse_frequencies`. Refuses to know: positions, and how anything is rotated (kernels/rope.py).

Sources: RoFormer (default), kaiokendev's linear interpolation, Llama 3.1's reference code (llama3), and YaRN by Peng
et al., arXiv 2309.00071. Arithmetic is fp32 in the order of the checkpoints' reference implementations: at position
100,000 one bit of a frequency is visible.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from baton.engine.models.config import RopeConfig


class Frequencies(NamedTuple):
    """`inverse` [D / 2] in fp32, and the factor on cosines and sines."""

    inverse: torch.Tensor
    factor: float


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Frequencies:
    """Frequencies for heads of `head_dim` features."""
    steps = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "yarn":
        return Frequencies(_yarn(rope, steps, head_dim), _yarn_factor(rope))
    inverse = 1.0 / steps
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    if rope.kind == "llama3":
        inverse = _llama3(rope, inverse)
    return Frequencies(inverse, 1.0)


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones are left, those between are blended."""
    original = rope.original_max_position_embeddings
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    return torch.where((wavelength >= shortest) & (wavelength <= longest), blended, scaled)


def _yarn(rope: RopeConfig, steps: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Features that turn often within the original length are left, those that turn seldom are stretched."""

    def feature(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * steps) * (1 - kept) + 1.0 / steps * kept


def _yarn_factor(rope: RopeConfig) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
