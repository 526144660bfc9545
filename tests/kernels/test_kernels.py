"""Every kernel against its own reference, over shapes that cross each of its internal boundaries."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from baton.kernels import (
    gated_activation,
    kv_store,
    linear,
    paged_attention,
    rms_norm,
    rope,
    sampling_noise,
)
from baton.kernels.parcel import send

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative size of one rounding; results may be a few of them apart.
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)
    torch.set_num_threads(1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, roundings: float = 4.0) -> None:
    assert actual.dtype == expected.dtype
    tolerance = roundings * EPSILON[actual.dtype]
    scale = expected.float().abs().max().clamp(min=1.0).item()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale * 0.25)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 5, 16)])
def test_rms_norm_equals_its_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1:]).to(dtype)
    assert_close(rms_norm.rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 16, 64])
def test_rope_equals_its_reference(dtype: torch.dtype, dim: int) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131071])
    frequencies = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
    turn = rope.rotation(positions, frequencies, 1.3, dtype)
    x = torch.randn(5, 9, dim).to(dtype)[:, :6]
    assert_close(rope.rope(x, turn), rope.reference(x, turn))


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
@settings(max_examples=30, deadline=None)
def test_rope_lets_products_depend_on_distance_alone(first: int, second: int, shift: int) -> None:
    frequencies = 1.0 / 10000 ** (torch.arange(0, 32, 2) / 32)
    q, k = torch.randn(2, 1, 1, 32).double().unbind(0)

    def product(a: int, b: int) -> float:
        turns = [rope.rotation(torch.tensor([p]), frequencies, 1.0, torch.float64) for p in (a, b)]
        return float((rope.rope(q, turns[0]) * rope.rope(k, turns[1])).sum())

    assert product(first, second) == pytest.approx(product(first + shift, second + shift), abs=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation_equals_its_reference(dtype: torch.dtype) -> None:
    x = (torch.randn(9, 2 * 48) * 4).to(dtype)
    assert_close(gated_activation.gated_activation(x), gated_activation.reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_linear_on_a_packed_weight_equals_its_reference(dtype: torch.dtype, bias: bool, rows: int) -> None:
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(80, 48).to(dtype)
    offset = torch.randn(80).to(dtype) if bias else None
    assert_close(linear.linear(x, linear.pack(weight), offset), linear.reference(x, weight, offset), roundings=16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_store_writes_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    pool = torch.randn(11, 3, 2, 2, 4, 8).to(dtype)
    expected = pool.clone()
    slots = torch.randperm(44)[:17]
    where = kv_store.Slots(slots // 4, slots % 4)
    key, value = torch.randn(2, 17, 5, 8).to(dtype)[:, :, 1:3].unbind(0)
    kv_store.kv_store(key, value, pool, 1, where)
    kv_store.reference(key, value, expected, 1, where)
    assert torch.equal(pool, expected)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Query and context lengths of one step's sequences, many of them with one token."""
    queries = draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 8, 9, 21]), min_size=1, max_size=7))
    return queries, [query + draw(st.integers(0, 40)) for query in queries]


@given(steps(), st.sampled_from([1, 3, 4]), st.sampled_from([(4, 4), (6, 2), (3, 1)]), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_paged_attention_equals_its_reference(
    step: tuple[list[int], list[int]], block_size: int, heads: tuple[int, int], layer: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "_PIECE", 8)
        patch.setattr(paged_attention, "_GROUP_PADDING", 6)
        patch.setattr(paged_attention, "_GROUP_BLOCKS", 40)
        _check_attention(step, block_size, heads, layer, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_equals_its_reference_in_every_dtype(dtype: torch.dtype) -> None:
    _check_attention(([1, 1, 1, 6, 9], [30, 3, 31, 6, 40]), 4, (6, 2), 1, dtype)


def _check_attention(
    step: tuple[list[int], list[int]], block_size: int, heads: tuple[int, int], layer: int, dtype: torch.dtype
) -> None:
    query_lens, context_lens = step
    num_heads, num_kv_heads = heads
    sizes = [-(-length // block_size) + 1 for length in context_lens]
    pool = torch.randn(sum(sizes), 3, num_kv_heads, 2, block_size, 8).to(dtype)
    tables = np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    # A slice of a wider tensor, as the fused projection leaves it.
    q = torch.randn(sum(query_lens), num_heads + 2, 8).to(dtype)[:, :num_heads]
    plan = paged_attention.plan_attention(pool, query_lens, context_lens, tables)
    expected = paged_attention.reference(q, pool, layer, plan)
    assert_close(paged_attention.paged_attention(q, pool, layer, plan), expected, roundings=16)


def test_a_long_chunk_over_a_long_past_is_causal_in_all_its_pieces() -> None:
    start, length, dim = 900, 1100, 8
    pool = torch.randn(125, 1, 2, 2, 16, dim)
    q = torch.randn(length, 4, dim)
    plan = paged_attention.plan_attention(pool, [length], [start + length], [np.arange(125)])
    key, value = pool[:, 0].permute(2, 1, 0, 3, 4).reshape(2, 2, -1, dim).repeat_interleave(2, dim=1)
    weights = torch.einsum("thd,hcd->htc", q, key) / math.sqrt(dim)
    hidden = torch.arange(start + length) > torch.arange(start, start + length)[:, None]
    expected = weights.masked_fill(hidden, -math.inf).softmax(-1) @ value
    actual = paged_attention.paged_attention(q, pool, 0, plan)
    torch.testing.assert_close(actual, expected.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_attention_groups_do_not_pad_short_contexts_to_a_very_long_one() -> None:
    pool = torch.zeros(2000, 1, 1, 2, 16, 8)
    context_lens = [100] * 20 + [16_000]
    tables = [np.zeros(1000, dtype=np.int64)] * 21
    plan = paged_attention.plan_attention(pool, [1] * 21, context_lens, tables)
    assert [(group.first, group.last) for group in plan.groups] == [(0, 20), (20, 21)]


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20)), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_noise_equals_its_reference(pairs: list[tuple[int, int]], ids: list[int]) -> None:
    keys = sampling_noise.row_keys([seed for seed, _ in pairs], [position for _, position in pairs])
    token_ids = torch.tensor([ids], dtype=torch.int32)
    actual = sampling_noise.gumbel_noise(keys, token_ids)
    torch.testing.assert_close(actual, sampling_noise.reference(keys, token_ids), rtol=1e-5, atol=1e-5)


def test_noise_of_an_element_does_not_depend_on_the_others() -> None:
    keys = sampling_noise.row_keys([1, 2, 3], [10, 20, 30])
    ids = torch.arange(70_000, dtype=torch.int32)[None]
    whole = sampling_noise.gumbel_noise(keys, ids)
    few = torch.tensor([[69_999, 5], [65_536, 65_535], [0, 1]], dtype=torch.int32)
    assert torch.equal(sampling_noise.gumbel_noise(keys, few), whole.gather(1, few.long()))


def test_noise_is_gumbel_and_uncorrelated_between_seeds_positions_and_ids() -> None:
    """Mean and variance of 2 million numbers, and correlation of neighbours, each within five standard errors."""
    keys = sampling_noise.row_keys([0, 0, 0, 1, 2, 2**63], [0, 1, 2, 0, 0, 0])
    noise = sampling_noise.gumbel_noise(keys, torch.arange(350_000, dtype=torch.int32)[None]).double()
    count = noise.numel()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=5 * math.sqrt(math.pi**2 / 6 / count))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=5 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / count))
    centred = noise - noise.mean()
    variance = centred.square().mean()
    width = noise.shape[1]
    for other in range(1, len(keys)):
        assert abs((centred[0] * centred[other]).mean() / variance) < 5 / math.sqrt(width)
    assert abs((centred[:, 1:] * centred[:, :-1]).mean() / variance) < 5 / math.sqrt(count)


def test_noise_is_pinned() -> None:
    """A stream that moves to a worker of another version must continue with the same tokens."""
    pinned = [[2.2369447, -0.8253360, -0.6238345], [-0.6353495, 0.6332843, 0.9963865]]
    keys = sampling_noise.row_keys([42, 2**64 - 1], [7, 100_000])
    noise = sampling_noise.gumbel_noise(keys, torch.tensor([[0, 1, 49_151]], dtype=torch.int32))
    torch.testing.assert_close(noise, torch.tensor(pinned), rtol=1e-5, atol=1e-6)


def test_arrays_sent_in_one_parcel_arrive_as_they_were_and_aligned() -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.zeros((0, 4), dtype=np.int64),
        np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
        np.array([0.1, 2.0]),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    ]
    sent = send(arrays, torch.device("cpu"))
    for array, tensor in zip(arrays, sent, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert (tensor.data_ptr() - sent[0].data_ptr()) % 16 == 0
