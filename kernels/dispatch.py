"""Which kernel runs where: the one place that decides.

    device   kernels
    cuda     kernels/triton, if Triton is installed (with a GPU build of torch it is); else as below
    cpu      kernels/*.py: plain torch, one operation after the other where the Triton ones are fused; attention by the
             compiled kernels (kernels/cpu) where they are there

Owns: `Kernels`, what a decoder layer calls, under one name and signature for all devices. Refuses to know: models, and
the compiled step of the CPU, which computes whole layers and therefore has a decoder of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.kernels import gated_activation, kv_store, paged_attention, rms_norm, rope
from baton.kernels.cpu.library import Cpu
from baton.kernels.kv_store import Slots
from baton.kernels.rope import Rotation


class Kernels(Protocol):
    """What a layer is made of besides matrix products. A plan belongs to the kernels that made it."""

    def plan_attention(
        self,
        pool_NLK2SD: torch.Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[npt.NDArray[np.int64]],
        num_heads: int,
    ) -> Any:
        """Plans attention of a step's sequences, once for all layers."""

    @property
    def records(self) -> bool:
        """Whether a step of them may be recorded and run again on other numbers."""

    def fixed_plan(
        self, pool_NLK2SD: torch.Tensor, bounds_B4: torch.Tensor, tables_BW: torch.Tensor, num_heads: int
    ) -> Any:
        """A plan for one token of each of B sequences, whose shape is read from the device at each run.

        Only of kernels that record. See kernels/triton/paged_attention.py.
        """

    def paged_attention(self, q_THD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, plan: Any) -> torch.Tensor:
        """Attention of all rows, [T, H, D]."""

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Normalises the last axis."""

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Adds x to the residual, in place, and returns the sum normalised."""

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
        """Norm and rotation of query and key heads; keys and values go to the pool, the queries are returned."""

    def gated_activation(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`."""


def kernels_for(device: torch.device, cpu: Cpu | None = None) -> Kernels:
    """The kernels for tensors of this device; `cpu` are the compiled ones, if there are any."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return triton_kernels()
    return PlainKernels(cpu)


def triton_kernels() -> Kernels:
    """The Triton kernels; their import takes a second and needs Triton, so it waits until somebody asks."""
    from baton.kernels.triton.layer import TritonKernels

    return TritonKernels()


class PlainKernels:
    """Plain torch, on any device; attention by the compiled kernels of the CPU if they are given."""

    records = False

    def __init__(self, cpu: Cpu | None = None) -> None:
        self._cpu = cpu

    def fixed_plan(
        self, pool_NLK2SD: torch.Tensor, bounds_B4: torch.Tensor, tables_BW: torch.Tensor, num_heads: int
    ) -> Any:
        raise NotImplementedError("plain attention takes its shape from the host")

    def plan_attention(
        self,
        pool_NLK2SD: torch.Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[npt.NDArray[np.int64]],
        num_heads: int,
    ) -> paged_attention.AttentionPlan:
        return paged_attention.plan_attention(pool_NLK2SD, query_lens, context_lens, block_tables, self._cpu)

    def paged_attention(
        self, q_THD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, plan: paged_attention.AttentionPlan
    ) -> torch.Tensor:
        return paged_attention.paged_attention(q_THD, pool_NLK2SD, layer, plan)

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
        return rms_norm.rms_norm(x_TD, weight_D, epsilon)

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return rms_norm.rms_norm(residual_TD.add_(x_TD), weight_D, epsilon)

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
        num_kv_heads = pool_NLK2SD.shape[2]
        qk, value = qkv_THD[:, :-num_kv_heads], qkv_THD[:, -num_kv_heads:]
        if qk_norm_HD is not None:
            qk = rms_norm.rms_norm(qk, qk_norm_HD, epsilon)
        qk = rope.rope(qk, turn)
        kv_store.kv_store(qk[:, -num_kv_heads:], value, pool_NLK2SD, layer, slots)
        return qk[:, :-num_kv_heads]

    def gated_activation(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        return gated_activation.gated_activation(gate_up_T2I)
