"""The gated activation of a SwiGLU feed-forward layer.

    y[t, i] = silu(x[t, i]) * x[t, I + i],    silu(z) = z / (1 + exp(-z))

Axes: T token, I intermediate feature; the input holds gate and up side by side, as one matrix product leaves them.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def gated_activation(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, of half the width."""
    width = gate_up_T2I.shape[-1] // 2
    return functional.silu(gate_up_T2I[..., :width]).mul_(gate_up_T2I[..., width:])


def reference(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """The formula in float64, rounded where the checkpoints' reference implementations round."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    activated = (gate.double() / (1 + (-gate.double()).exp())).to(gate.dtype)
    return (activated.double() * up.double()).to(gate.dtype)
