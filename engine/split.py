"""Which part of a model each rank of a worker holds.

Owns: `Split`, and the refusal of models that do not divide. Refuses to know: weights, and how ranks talk.

    heads         query heads in order, the same number for every rank
    KV heads      likewise; with more ranks than KV heads, neighbouring ranks hold the same one
    middle        features between gate, up and down
    vocabulary    rows of embedding and head; lengths differ by one at most

Each rank computes its part from a copy of the hidden state, so only what leaves the output and down projections has to
be summed. Embedding and head are cut by the same rows, so that tied ones stay one tensor; a lookup then costs one more
sum a step, and gives exactly the row, since all others add zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.models.config import ModelConfig, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's part of a model; ranges count over the whole model."""

    rank: int
    size: int
    heads: range
    kv_heads: range
    middle: range
    vocabulary: range


def split(config: ModelConfig, rank: int, size: int) -> Split:
    """The part of `rank` of `size`. Raises UnsupportedModel, with the field, where the model does not divide."""
    for name, amount in (
        ("num_attention_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if amount % size:
            raise UnsupportedModel(f"tensor_parallel {size}: {name} {amount} is no multiple of it")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        problem = f"num_key_value_heads {config.num_kv_heads} is neither a multiple nor a divisor of it"
        raise UnsupportedModel(f"tensor_parallel {size}: {problem}")
    if config.vocab_size < size:
        raise UnsupportedModel(f"tensor_parallel {size}: vocab_size {config.vocab_size} is less")
    num_kv_heads = max(1, config.num_kv_heads // size)
    first_kv_head = rank * config.num_kv_heads // size
    return Split(
        rank=rank,
        size=size,
        heads=share(config.num_heads, rank, size),
        kv_heads=range(first_kv_head, first_kv_head + num_kv_heads),
        middle=share(config.intermediate_size, rank, size),
        vocabulary=share(config.vocab_size, rank, size),
    )


def share(amount: int, rank: int, size: int) -> range:
    """The rank's share of `amount` things in a row."""
    return range(rank * amount // size, (rank + 1) * amount // size)
