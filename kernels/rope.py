"""Rotary position embedding, half-split form.

    y[d]       = x[d]       * cos(p * f[d]) - x[d + D/2] * sin(p * f[d])       for d < D/2
    y[d + D/2] = x[d + D/2] * cos(p * f[d]) + x[d]       * sin(p * f[d])

Axes: T token, H head, D feature of a head; p is the token's position, f the inverse frequencies (D/2 of them).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotation(NamedTuple):
    """What one step rotates by: `cos_T1D`, and `sin_T1D` whose first half is negated."""

    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor


def rotation(
    positions_T: torch.Tensor, inverse_frequencies: torch.Tensor, factor: float, dtype: torch.dtype
) -> Rotation:
    """The rotation at each position: angles, cosines and sines in fp32, scaled by `factor`, then cast to `dtype`."""
    angles = positions_T[:, None].float() * inverse_frequencies.float()
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return Rotation(
        torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)
    )


def rope(x_THD: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """Rotates every head of `x_THD`; the result is new and contiguous."""
    half = x_THD.shape[-1] // 2
    return torch.addcmul(x_THD * turn.cos_T1D, x_THD.roll(half, -1), turn.sin_T1D)


def reference(x_THD: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """The formula, a feature at a time."""
    half = x_THD.shape[-1] // 2
    y = torch.empty_like(x_THD)
    for d in range(half):
        cos, sin = turn.cos_T1D[:, :, d], turn.sin_T1D[:, :, d + half]
        y[:, :, d] = x_THD[:, :, d] * cos - x_THD[:, :, d + half] * sin
        y[:, :, d + half] = x_THD[:, :, d + half] * cos + x_THD[:, :, d] * sin
    return y
