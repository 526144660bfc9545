"""The paged KV pool: one tensor for all layers, block-major, so that a block is one piece of memory.

Owns: the pool's shape, size and allocation. Refuses to know: which block belongs to whom (scheduler), and how blocks
travel (kvtransfer).

    pool[block, layer, kv_head, 0 = key or 1 = value, token of the block, feature of the head]
"""

from __future__ import annotations

import psutil
import torch

from baton.engine.models.config import ModelConfig
from baton.kernels.cpu.pages import populated_pages

_GIB = 1 << 30


class OutOfMemory(RuntimeError):
    """The pool does not fit into the memory that is there."""


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype, num_kv_heads: int = 0) -> int:
    """Bytes that the keys and values of one token take over all layers, of all KV heads or of so many."""
    return config.num_layers * (num_kv_heads or config.num_kv_heads) * 2 * config.head_dim * dtype.itemsize


def blocks_for(
    kv_cache_gib: float, config: ModelConfig, block_size: int, dtype: torch.dtype, num_kv_heads: int = 0
) -> int:
    """Whole blocks of all KV heads, or of so many, that fit into so many GiB; raises OutOfMemory if it is none."""
    block_bytes = kv_bytes_per_token(config, dtype, num_kv_heads) * block_size
    num_blocks = int(kv_cache_gib * _GIB) // block_bytes
    if num_blocks < 1:
        raise OutOfMemory(f"a KV cache of {kv_cache_gib} GiB holds no block: one takes {block_bytes} bytes")
    return num_blocks


def allocate(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_kv_heads: int = 0,
) -> torch.Tensor:
    """A contiguous pool of zeros, [N, L, K, 2, S, D], of all KV heads or of so many; raises OutOfMemory before it takes
    more than there is.

    Zeros, because attention masks the unwritten part of a block instead of skipping it, and a mask does not cover NaN.
    On a CPU the pool is there from the beginning, and its memory comes while the worker starts and serves.
    """
    shape = (num_blocks, config.num_layers, num_kv_heads or config.num_kv_heads, 2, block_size, config.head_dim)
    pool_bytes = num_blocks * block_size * kv_bytes_per_token(config, dtype, num_kv_heads)
    available = psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if pool_bytes > available:
        raise OutOfMemory(
            f"a KV cache of {num_blocks} blocks takes {pool_bytes / _GIB:.2f} GiB, "
            f"{available / _GIB:.2f} GiB of {device.type} memory are available"
        )
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory, _ = populated_pages(pool_bytes)
    return memory.view(dtype).view(shape)
