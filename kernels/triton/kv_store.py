"""Writes new tokens' keys and values of one layer into the paged pool, on a GPU.

    pool[blocks[t], layer, k, 0, offsets[t]] = key[t, k]
    pool[blocks[t], layer, k, 1, offsets[t]] = value[t, k]

Axes: N block, L layer, K KV head, 2 (key, value), S token of a block, D feature of a head, T token of the step. A
negative block id says that the row is padding, of a captured graph for instance: nothing is written for it. In a
decoder, rope_store.py does this together with the rotation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.kv_store import Slots, reference
from baton.kernels.triton.operands import require, require_ids, require_pool

__all__ = ["Slots", "kv_store", "reference", "require_slots"]


def kv_store(
    key_TKD: torch.Tensor, value_TKD: torch.Tensor, pool_NLK2SD: torch.Tensor, layer: int, slots: Slots
) -> None:
    """Stores both; the pool is written in place. Keys and values may be slices of a wider tensor."""
    require_pool(pool_NLK2SD, layer)
    num_heads, block_size, dim = pool_NLK2SD.shape[2], pool_NLK2SD.shape[4], pool_NLK2SD.shape[5]
    require("key", key_TKD, None, num_heads, dim, like=pool_NLK2SD)
    require("value", value_TKD, len(key_TKD), num_heads, dim, like=pool_NLK2SD)
    require_slots(slots, key_TKD)
    if key_TKD.numel():
        _kv_store[(len(key_TKD), 2)](
            key_TKD,
            value_TKD,
            pool_NLK2SD,
            slots.blocks_T,
            slots.offsets_T,
            layer,
            key_TKD.stride(0),
            key_TKD.stride(1),
            value_TKD.stride(0),
            value_TKD.stride(1),
            pool_NLK2SD.stride(0),
            K=num_heads,
            S=block_size,
            D=dim,
            HEADS=triton.next_power_of_2(num_heads),
            BLOCK=triton.next_power_of_2(dim),
        )


def require_slots(slots: Slots, rows: torch.Tensor) -> None:
    """A slot for each row."""
    require_ids("blocks", slots.blocks_T, len(rows), dtype=torch.int64, like=rows)
    require_ids("offsets", slots.offsets_T, len(rows), dtype=torch.int64, like=rows)


@triton.jit(do_not_specialize=["layer"])
def _kv_store(
    keys,
    values,
    pool,
    blocks_T,
    offsets_T,
    layer,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    block = tl.load(blocks_T + t)
    if block >= 0:
        offset = tl.load(offsets_T + t)
        head = tl.arange(0, HEADS)[:, None]
        d = tl.arange(0, BLOCK)[None, :]
        there = (head < K) & (d < D)
        if side == 0:
            vector = tl.load(keys + t * key_token_stride + head * key_head_stride + d, mask=there)
        else:
            vector = tl.load(values + t * value_token_stride + head * value_head_stride + d, mask=there)
        place = pool + block * block_stride + (((layer * K + head) * 2 + side) * S + offset) * D + d
        tl.store(place, vector, mask=there)
