"""Copies blocks of the paged pool to and from one dense buffer: for swapping, and for hand-offs between unequal ranks.

    buffer[i, l, k, :, :, :] = pool[blocks[i], l, first_head + k, :, :, :]       gather
    pool[blocks[i], l, first_head + k, :, :, :] = buffer[i, l, k, :, :, :]       scatter

Axes: N block, L layer, K KV head of the pool, J KV head of the buffer, 2 (key, value), S token of a block, D feature
of a head, B block of the buffer. A rank that holds other heads than its peer sends or takes a slice of them. The heads
of one block and layer are side by side on both sides, so each program copies one such stretch; bits are moved, not
numbers, so every dtype works and NaN stays the NaN that it was.

    pool block   | layer 0: k0 k1 k2 k3 | layer 1: k0 k1 k2 k3 | ...
    buffer block | layer 0:    k1 k2    | layer 1:    k1 k2    | ...        first_head 1, two heads

"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.kernels.triton.operands import OperandError, require_ids, require_pool

_BLOCK = 2048
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kv_gather(pool_NLK2SD: torch.Tensor, blocks_B: torch.Tensor, first_head: int, buffer_BLJ2SD: torch.Tensor) -> None:
    """Fills the buffer; `blocks_B` are int64 ids."""
    _check(pool_NLK2SD, blocks_B, first_head, buffer_BLJ2SD)
    _launch(pool_NLK2SD, blocks_B, first_head, buffer_BLJ2SD, gather=True)


def kv_scatter(buffer_BLJ2SD: torch.Tensor, pool_NLK2SD: torch.Tensor, blocks_B: torch.Tensor, first_head: int) -> None:
    """Writes the buffer into the pool's blocks, of which none may occur twice."""
    _check(pool_NLK2SD, blocks_B, first_head, buffer_BLJ2SD)
    _launch(pool_NLK2SD, blocks_B, first_head, buffer_BLJ2SD, gather=False)


def gather_reference(
    pool_NLK2SD: torch.Tensor, blocks_B: torch.Tensor, first_head: int, buffer_BLJ2SD: torch.Tensor
) -> None:
    """The formula, a block at a time."""
    for i, block in enumerate(blocks_B.tolist()):
        buffer_BLJ2SD[i] = pool_NLK2SD[block, :, first_head : first_head + buffer_BLJ2SD.shape[2]]


def scatter_reference(
    buffer_BLJ2SD: torch.Tensor, pool_NLK2SD: torch.Tensor, blocks_B: torch.Tensor, first_head: int
) -> None:
    """The formula, a block at a time."""
    for i, block in enumerate(blocks_B.tolist()):
        pool_NLK2SD[block, :, first_head : first_head + buffer_BLJ2SD.shape[2]] = buffer_BLJ2SD[i]


def _check(pool: torch.Tensor, blocks_B: torch.Tensor, first_head: int, buffer: torch.Tensor) -> None:
    require_pool(pool, 0)
    require_ids("blocks", blocks_B, None, dtype=torch.int64, like=pool)
    num_layers, num_heads, _, block_size, dim = pool.shape[1:]
    require_ids("buffer", buffer, len(blocks_B), num_layers, None, 2, block_size, dim, dtype=pool.dtype, like=pool)
    if not 0 <= first_head <= num_heads - buffer.shape[2]:
        raise OperandError(f"first_head: {first_head} and {buffer.shape[2]} heads, the pool has {num_heads}")


def _launch(pool: torch.Tensor, blocks_B: torch.Tensor, first_head: int, buffer: torch.Tensor, *, gather: bool) -> None:
    if not buffer.numel():
        return
    num_layers, num_heads, _, block_size, dim = pool.shape[1:]
    head_size = 2 * block_size * dim
    stretch = buffer.shape[2] * head_size
    bits = _BITS[pool.element_size()]
    _kv_copy[(len(blocks_B), num_layers, triton.cdiv(stretch, _BLOCK))](
        pool.view(bits),
        buffer.view(bits),
        blocks_B,
        stretch,
        first_head * head_size,
        num_heads * head_size,
        pool.stride(0),
        BLOCK=_BLOCK,
        GATHER=gather,
    )


@triton.jit
def _kv_copy(
    pool, buffer, blocks_B, stretch, first, layer_stride, block_stride, BLOCK: tl.constexpr, GATHER: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(blocks_B + i)
    inside = pool + block * block_stride + layer * layer_stride + first + place
    outside = buffer + (i * tl.num_programs(1) + layer) * stretch + place
    if GATHER:
        tl.store(outside, tl.load(inside, mask=place < stretch), mask=place < stretch)
    else:
        tl.store(inside, tl.load(outside, mask=place < stretch), mask=place < stretch)
