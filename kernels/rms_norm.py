"""Root-mean-square normalisation over the last axis.

    y[..., d] = weight[..., d] * round(x[..., d] / sqrt(mean_d(x[..., d]^2) + epsilon))

The mean, the root and the division are fp32; `round` is the cast back to x's dtype, before the weight is applied, as in
the checkpoints' reference implementations. Axes: T token, D feature.
"""

from __future__ import annotations

import torch


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalises the last axis of `x_TD` (any leading axes); the weight is broadcast over what it lacks."""
    x = x_TD.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(epsilon))
    return (x * scale).to(x_TD.dtype) * weight_D


def reference(x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The same in float64, with one rounding at the end."""
    x = x_TD.double()
    return (x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight_D.double()).to(x_TD.dtype)
