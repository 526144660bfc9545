"""Writes new tokens' keys and values of one layer into the paged pool.

    pool[blocks[t], layer, k, 0, offsets[t]] = key[t, k]
    pool[blocks[t], layer, k, 1, offsets[t]] = value[t, k]

Axes: N block, L layer, K KV head, 2 (key, value), S token of a block, D feature of a head, T token of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Slots(NamedTuple):
    """Where each token of a step keeps its KV: block id and place in the block, int64. No slot occurs twice."""

    blocks_T: torch.Tensor
    offsets_T: torch.Tensor


def kv_store(
    key_TKD: torch.Tensor, value_TKD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, slots: Slots
) -> None:
    """Stores both; the pool is written in place."""
    layer_NK2SD = pool_NLK2SD[:, layer]
    layer_NK2SD[slots.blocks_T, :, 0, slots.offsets_T] = key_TKD
    layer_NK2SD[slots.blocks_T, :, 1, slots.offsets_T] = value_TKD


def reference(
    key_TKD: torch.Tensor, value_TKD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, slots: Slots
) -> None:
    """The formula, a token at a time."""
    for t, (block, offset) in enumerate(zip(slots.blocks_T.tolist(), slots.offsets_T.tolist(), strict=True)):
        pool_NLK2SD[block, layer, :, 0, offset] = key_TKD[t]
        pool_NLK2SD[block, layer, :, 1, offset] = value_TKD[t]
