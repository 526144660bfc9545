"""Matrix product with a weight that may have been packed for the machine at hand.

    y[t, o] = sum_i x[t, i] * weight[o, i] + bias[o]

Axes: T token, O output feature, I input feature. On a CPU, oneDNN computes bf16 products on a blocked copy of the
weight and would make that copy anew at every call: at up to 32 rows that is half of the time. `pack` makes it once.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def pack(weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight in the form that `linear` likes best; opaque, so keep the original if it is needed otherwise."""
    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return weight_OI
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight_OI
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), None)
    return packed


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """The product; `weight_OI` may come from `pack`."""
    if weight_OI.is_mkldnn:
        y_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
        return y_TO
    return functional.linear(x_TI, weight_OI, bias_O)


def reference(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """The product in float64, rounded once; takes only unpacked weights."""
    y = x_TI.double() @ weight_OI.double().t()
    return (y if bias_O is None else y + bias_O.double()).to(x_TI.dtype)
