"""The Triton kernels under the names that a decoder layer calls them by (kernels/dispatch.py)."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.kernels.kv_store import Slots
from baton.kernels.rope import Rotation
from baton.kernels.triton import gated_activation, paged_attention, rms_norm, rope_store


class TritonKernels:
    """For tensors of a GPU; in Triton's interpreter, for those of the CPU."""

    records = True

    def fixed_plan(
        self, pool_NLK2SD: torch.Tensor, bounds_B4: torch.Tensor, tables_BW: torch.Tensor, num_heads: int
    ) -> paged_attention.AttentionPlan:
        return paged_attention.fixed_plan(pool_NLK2SD, bounds_B4, tables_BW, num_heads)

    def plan_attention(
        self,
        pool_NLK2SD: torch.Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[npt.NDArray[np.int64]],
        num_heads: int,
    ) -> paged_attention.AttentionPlan:
        return paged_attention.plan_attention(pool_NLK2SD, query_lens, context_lens, block_tables, num_heads=num_heads)

    def paged_attention(
        self, q_THD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, plan: paged_attention.AttentionPlan
    ) -> torch.Tensor:
        return paged_attention.paged_attention(q_THD, pool_NLK2SD, layer, plan)

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        return rms_norm.rms_norm(x_TD, weight_D, epsilon)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return rms_norm.add_rms_norm(x_TD, residual_TD, weight_D, epsilon)

    def rope_store(
        self,
        qkv_THD: torch.Tensor,
        qk_norm_HD: torch.Tensor | None,
        epsilon: float,
        turn: Rotation,
        pool_NLK2SD: torch.Tensor,
        layer: int,
        slots: Slots,
    ) -> torch.Tensor:
        return rope_store.rope_store(qkv_THD, qk_norm_HD, epsilon, turn, pool_NLK2SD, layer, slots)

    def gated_activation(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        return gated_activation.gated_activation(gate_up_T2I)
