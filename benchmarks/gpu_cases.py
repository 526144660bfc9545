"""The cases of gpu_check.py: each kernel at a shape of an 8B model, with the bytes and operations it cannot avoid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from baton.kernels.dispatch import PlainKernels
from baton.kernels.kv_store import Slots
from baton.kernels.rope import rotation
from baton.kernels.sampling_noise import row_keys
from baton.kernels.triton import (
    gated_activation,
    kv_copy,
    paged_attention,
    penalties,
    rms_norm,
    rope_store,
    sampling_filters,
    token_choice,
    token_logprobs,
)

_HEADS, _KV_HEADS, _DIM, _BLOCK = 32, 8, 128, 16
_PLAIN = PlainKernels()


class Result(NamedTuple):
    """Median time of one call."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Case:
    """`kernel` and `torch` give the same; `torch` is None where nothing comparable is there, or it is the measure."""

    name: str
    num_bytes: float
    flop: float
    tolerance: float
    kernel: Callable[[], torch.Tensor]
    torch: Callable[[], torch.Tensor] | None
    reference: Callable[[], torch.Tensor] | None = None

    def compare(self) -> float:
        """Largest difference to the reference, or to torch."""
        other = self.reference or self.torch
        if other is None:
            return 0.0
        difference = (self.kernel().double() - other().double()).abs().nan_to_num(nan=float("inf"))
        return float(difference.max()) if difference.numel() else 0.0


def cases(device: torch.device, *, small: bool) -> list[Case]:
    """All of them; the first copies and the second multiplies."""
    torch.manual_seed(3)
    return [
        *_limits(device, small),
        *_attention(device, small),
        *_layer(device, small),
        *_blocks(device, small),
        *_sampling(device, small),
    ]


def _limits(device: torch.device, small: bool) -> Iterator[Case]:
    source = torch.zeros(1 << (10 if small else 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield Case("copy", 2.0 * source.numel(), 0.0, 0.0, lambda: target.copy_(source), None)
    width = 32 if small else 8192
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    yield Case("matrix product", 6.0 * width**2, 2.0 * width**3, 0.0, lambda: a @ b, None)


def _attention(device: torch.device, small: bool) -> Iterator[Case]:
    shapes: list[tuple[str, list[int], list[int]]] = [
        ("decode, batch 64, context 4096", [1] * 64, [4096] * 64),
        ("decode, batch 1, context 32768", [1], [32_768]),
        ("prefill 8192", [8192], [8192]),
        ("prefill 2048 after 14336", [2048], [16_384]),
    ]
    if small:
        shapes = [("decode", [1, 1], [600, 600]), ("prefill", [40], [40]), ("prefill after a past", [20], [90])]
    for name, query_lens, context_lens in shapes:
        yield _one_attention(name, query_lens, context_lens, device)


def _one_attention(name: str, query_lens: list[int], context_lens: list[int], device: torch.device) -> Case:
    """Sequences of one length, so that torch needs no padding. Torch reads dense tensors: no gathering is counted."""
    batch, query, context = len(query_lens), query_lens[0], context_lens[0]
    blocks = -(-context // _BLOCK)
    pool = torch.randn(batch * blocks, 1, _KV_HEADS, 2, _BLOCK, _DIM, device=device, dtype=torch.bfloat16)
    ids = np.random.default_rng(1).permutation(batch * blocks).reshape(batch, blocks)
    q = torch.randn(batch * query, _HEADS, _DIM, device=device, dtype=torch.bfloat16)
    plan = paged_attention.plan_attention(pool, query_lens, context_lens, list(ids), num_heads=_HEADS)
    dense = pool[torch.from_numpy(ids).to(device)][:, :, 0].permute(3, 0, 2, 1, 4, 5)  # [2, B, K, blocks, S, D]
    key, value = dense.reshape(2, batch, _KV_HEADS, blocks * _BLOCK, _DIM)[:, :, :, :context].contiguous().unbind(0)
    q_BHTD = q.view(batch, query, _HEADS, _DIM).transpose(1, 2)
    bias = None
    if 1 < query < context:
        # The form that torch has a fast kernel for; it wants as many key heads as query heads.
        bias = causal_lower_right(query, context)
        key, value = (side.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for side in (key, value))

    def dense_attention() -> torch.Tensor:
        out = functional.scaled_dot_product_attention(
            q_BHTD, key, value, attn_mask=bias, is_causal=bias is None and query > 1, enable_gqa=bias is None
        )
        return out.transpose(1, 2).reshape(q.shape)

    seen = batch * sum(range(context - query + 1, context + 1))
    return Case(
        f"attention: {name}",
        2.0 * (2 * q.numel() + batch * context * _KV_HEADS * 2 * _DIM),
        4.0 * seen * _HEADS * _DIM,
        0.03,
        lambda: paged_attention.paged_attention(q, pool, 0, plan),
        dense_attention,
    )


def _layer(device: torch.device, small: bool) -> Iterator[Case]:
    tokens, width, intermediate = (5, 256, 96) if small else (8192, 4096, 14_336)
    x, residual = (torch.randn(tokens, width, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(width, device=device).bfloat16()
    # The sums of a million additions to the residual would differ, so it starts anew for whoever compares.
    yield Case(
        "norm with residual",
        8.0 * x.numel(),
        0.0,
        0.13,
        lambda: rms_norm.add_rms_norm(x, residual.clone() if small else residual, weight, 1e-5),
        None,
        (lambda: _PLAIN.add_rms_norm(x, residual.clone(), weight, 1e-5)) if small else None,
    )
    gate_up = torch.randn(tokens, 2 * intermediate, device=device).bfloat16()
    yield Case(
        "gated activation",
        3.0 * gate_up.numel(),
        0.0,
        0.13,
        lambda: gated_activation.gated_activation(gate_up),
        lambda: _PLAIN.gated_activation(gate_up),
    )
    heads = _HEADS + 2 * _KV_HEADS
    qkv = torch.randn(tokens, heads, _DIM, device=device).bfloat16()
    pool = torch.zeros(-(-tokens // _BLOCK), 2, _KV_HEADS, 2, _BLOCK, _DIM, device=device, dtype=torch.bfloat16)
    positions = torch.arange(tokens, device=device)
    slots = Slots(positions // _BLOCK, positions % _BLOCK)
    frequencies = 1.0 / 500_000 ** (torch.arange(0, _DIM, 2, device=device) / _DIM)
    turn = rotation(positions, frequencies, 1.0, torch.bfloat16)
    norm = torch.randn(_HEADS + _KV_HEADS, _DIM, device=device).bfloat16()
    for name, qk_norm in (("rope and store", None), ("head norm, rope and store", norm)):
        yield Case(
            name,
            4.0 * qkv.numel(),
            0.0,
            0.26,
            lambda qk_norm=qk_norm: rope_store.rope_store(qkv, qk_norm, 1e-6, turn, pool, 1, slots),
            lambda qk_norm=qk_norm: _PLAIN.rope_store(qkv, qk_norm, 1e-6, turn, pool, 1, slots),
        )


def _blocks(device: torch.device, small: bool) -> Iterator[Case]:
    num_blocks, layers = (3, 2) if small else (1024, 32)
    pool = torch.randn(num_blocks, layers, _KV_HEADS, 2, _BLOCK, _DIM, device=device, dtype=torch.bfloat16)
    blocks = torch.randperm(num_blocks)[: num_blocks // 2].to(device)
    for first, count in ((0, _KV_HEADS), (2, 2)):
        buffer = pool.new_empty(len(blocks), layers, count, 2, _BLOCK, _DIM)

        def gather(first: int = first, buffer: torch.Tensor = buffer) -> torch.Tensor:
            kv_copy.kv_gather(pool, blocks, first, buffer)
            return buffer

        def index(first: int = first, count: int = count) -> torch.Tensor:
            return pool[:, :, first : first + count][blocks]

        yield Case(f"gather {count} of {_KV_HEADS} heads", 4.0 * buffer.numel(), 0.0, 0.0, gather, index)


def _sampling(device: torch.device, small: bool) -> Iterator[Case]:
    rows, vocabulary = (3, 1500) if small else (256, 128_256)
    scores = torch.randn(rows, vocabulary, device=device) * 3
    keys = row_keys(list(range(rows)), [7] * rows).to(device)
    noisy = torch.ones(rows, dtype=torch.int32, device=device)
    everything = torch.full((rows,), -float("inf"), device=device)
    size = 4.0 * scores.numel()
    yield Case(
        "choice with noise",
        size,
        0.0,
        0.0,
        lambda: token_choice.choose(scores, keys, noisy, everything),
        lambda: token_choice.reference(scores, keys, noisy, everything),
    )
    filters = sampling_filters.Filters(
        torch.full((rows,), 50, dtype=torch.int32, device=device),
        torch.full((rows,), 0.9, dtype=torch.float64, device=device),
        torch.full((rows,), -3.0, device=device),
    )
    yield Case(
        "top-k, top-p, min-p",
        size,
        0.0,
        1e-6,
        lambda: sampling_filters.filter_thresholds(scores, filters),
        lambda: sampling_filters.reference(scores, filters),
    )
    length = 40 if small else 1024
    ids = torch.randint(0, vocabulary, (rows * length,), dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
    history = penalties.History(ids, starts, noisy * (length // 2), length)
    strengths = penalties.Penalties(*(torch.full((rows,), value, device=device) for value in (1.2, 0.1, 0.2)))

    def penalized(penalize: Callable[..., None]) -> torch.Tensor:
        own = scores.clone()
        penalize(own, history, strengths)
        return own

    yield Case(
        "penalties, with a copy of the scores",
        4 * size,
        0.0,
        0.0,
        lambda: penalized(penalties.penalize),
        None,
        (lambda: penalized(penalties.reference)) if small else None,
    )
    chosen = scores.argmax(1)
    yield Case(
        "log-probabilities",
        size,
        0.0,
        1e-4,
        lambda: token_logprobs.chosen_logprobs(scores, chosen).logprobs_R,
        lambda: scores.log_softmax(-1).gather(1, chosen[:, None])[:, 0],
    )
