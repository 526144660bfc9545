"""A decoder whose whole step is one call of the compiled kernels.

Owns: `NativeDecoder`, which computes what layers.Decoder computes, in bf16 on a CPU. Refuses to know: how (see
kernels/cpu/decoder.cpp), checkpoints, requests.

Every sum has one order, whatever else is in the step: a row's result is the same alone and in any batch. Scores leave
the last product in fp32, so near-ties are decided as exactly as bf16 weights allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.layers import Batch
from baton.engine.rotary import Frequencies
from baton.kernels.cpu.library import Cpu, Model, Packed
from baton.kernels.cpu.pages import Reused
from baton.kernels.paged_attention import AttentionPlan, plan_attention
from baton.kernels.rope import rotation


@dataclass(frozen=True, slots=True)
class NativeDecoder:
    """All weights of a model, packed."""

    cpu: Cpu
    model: Model
    frequencies: Frequencies
    embedding: torch.Tensor
    norm: torch.Tensor
    head: Packed
    memory: Reused = field(default_factory=Reused)

    def plan_attention(
        self,
        pool_NLK2SD: torch.Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[npt.NDArray[np.int64]],
    ) -> AttentionPlan:
        """Plans attention of a step's sequences, once for all layers."""
        return plan_attention(pool_NLK2SD, query_lens, context_lens, block_tables, self.cpu)

    def hidden(self, batch: Batch, pool_NLK2SD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Computes the step, writes its KV into the pool, and returns the final hidden state of some rows, [R, E]."""
        turn = rotation(batch.positions_T, self.frequencies.inverse, self.frequencies.factor, torch.bfloat16)
        assert batch.attention.contexts is not None
        return self.cpu.step(
            self.model,
            batch.token_ids_T,
            turn.cos_T1D,
            turn.sin_T1D,
            batch.slots.blocks_T,
            batch.slots.offsets_T,
            pool_NLK2SD,
            batch.attention.contexts,
            rows_R,
        )

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Scores of the vocabulary for each row, fp32. They last until the next call."""
        return self.cpu.scores(hidden_RE, self.head, self.memory)
