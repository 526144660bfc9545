"""What the rest of a worker needs to know of the model that its runner has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A loaded model and its KV pool. `max_model_len` is the most tokens of one sequence, prompt and output."""

    name: str
    path: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
