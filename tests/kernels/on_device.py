"""Every Triton kernel against its reference: on a GPU where there is one, otherwise in Triton's interpreter.

Not collected by itself: the interpreter has to be switched on before Triton is imported, for the whole process.
`test_triton.py` runs it with TRITON_INTERPRET=1; benchmarks/gpu_check.sh runs it as it is.

Memory that a kernel has to leave alone, and memory that it has to write, holds NaN beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from triton import knobs

from baton.kernels import dispatch
from baton.kernels import kv_store as plain_kv_store
from baton.kernels import sampling_noise as plain_noise
from baton.kernels.rope import Rotation, rotation
from baton.kernels.triton import (
    chunk_attention,
    decode_attention,
    gated_activation,
    kv_copy,
    kv_store,
    paged_attention,
    penalties,
    rms_norm,
    rope,
    rope_store,
    sampling_filters,
    sampling_noise,
    token_choice,
    token_logprobs,
)
from baton.kernels.triton.operands import OperandError

if knobs.runtime.interpret:
    from triton_interpreter import compute_bfloat16_exactly

    compute_bfloat16_exactly()

DEVICE = torch.device("cpu" if knobs.runtime.interpret else "cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_DIMS = [64, 80, 96, 128, 256]
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)
    torch.set_num_threads(1)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, roundings: float = 4.0) -> None:
    assert actual.dtype == expected.dtype
    tolerance = roundings * EPSILON[actual.dtype]
    scale = max(1.0, expected.float().abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale * 0.25)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, where NaN equals itself."""
    return torch.equal(torch.nan_to_num(a, nan=123.0), torch.nan_to_num(b, nan=123.0))


# Operations of a layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 2), (3, 96), (7, 2050), (130, 64)])
def test_gated_activation(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = randn(*shape, dtype=dtype) * 4
    assert_close(gated_activation.gated_activation(x), gated_activation.reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (33, 64), (7, 576), (2, 4096)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    assert_close(rms_norm.rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rms_norm_of_heads_that_are_a_slice(dtype: torch.dtype, dim: int) -> None:
    x = randn(5, 9, dim, dtype=dtype)[:, 1:8]
    for weight in (randn(7, dim, dtype=dtype), randn(dim, dtype=dtype)):
        assert_close(rms_norm.rms_norm(x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 3000)])
def test_add_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    expected_residual = residual.clone()
    expected = rms_norm.add_rms_norm_reference(x, expected_residual, weight, 1e-5)
    assert_close(rms_norm.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


def turn_at(positions: list[int], dim: int, dtype: torch.dtype) -> Rotation:
    frequencies = 1.0 / 10000 ** (torch.arange(0, dim, 2, device=DEVICE) / dim)
    return rotation(ints(positions, torch.int64), frequencies, 1.3, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, *HEAD_DIMS])
def test_rope(dtype: torch.dtype, dim: int) -> None:
    x = randn(4, 14, dim, dtype=dtype)[:, :11]
    turn = turn_at([0, 1, 4095, 131071], dim, dtype)
    assert_close(rope.rope(x, turn), rope.reference(x, turn))
    assert rope.rope(x[:0], Rotation(turn.cos_T1D[:0], turn.sin_T1D[:0])).shape == (0, 11, dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_store_writes_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    pool = torch.full((11, 3, 3, 2, 4, 80), NAN, dtype=dtype, device=DEVICE)
    expected = pool.clone()
    slots = torch.randperm(44)[:17].to(DEVICE)
    where = kv_store.Slots(slots // 4, slots % 4)
    key, value = randn(17, 9, 80, dtype=dtype)[:, 1:4], randn(17, 3, 80, dtype=dtype)
    kv_store.kv_store(key, value, pool, 1, where)
    kv_store.reference(key, value, expected, 1, where)
    assert same_bits(pool, expected)
    where.blocks_T.fill_(-1)
    kv_store.kv_store(-key, -value, pool, 1, where)
    kv_store.kv_store(key[:0], value[:0], pool, 1, kv_store.Slots(slots[:0], slots[:0]))
    assert same_bits(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("normed", [True, False])
def test_rope_store(dtype: torch.dtype, dim: int, normed: bool) -> None:
    heads, kv_heads, tokens = 7, 2, 5
    pool = torch.full((3, 2, kv_heads, 2, 4, dim), NAN, dtype=dtype, device=DEVICE)
    expected_pool = pool.clone()
    qkv = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    weight = randn(heads + kv_heads, dim, dtype=dtype) if normed else None
    turn = turn_at([3, 4, 5, 6, 700], dim, dtype)
    slots = kv_store.Slots(ints([2, 0, 0, 2, 1], torch.int64), ints([3, 0, 3, 1, 2], torch.int64))
    q = rope_store.rope_store(qkv, weight, 1e-6, turn, pool, 1, slots)
    expected = rope_store.reference(qkv, weight, 1e-6, turn, expected_pool, 1, slots)
    assert_close(q, expected)
    written = ~expected_pool.isnan()
    assert torch.equal(written, ~pool.isnan())
    assert_close(pool[written], expected_pool[written])
    assert torch.equal(pool[slots.blocks_T, 1, :, 1, slots.offsets_T], qkv[:, -kv_heads:])


def test_rope_store_of_padding_stores_nothing() -> None:
    pool = torch.full((2, 1, 1, 2, 4, 64), NAN, device=DEVICE)
    slots = kv_store.Slots(ints([-1, -1], torch.int64), ints([0, 3], torch.int64))
    q = rope_store.rope_store(randn(2, 3, 64), None, 1e-6, turn_at([0, 1], 64, torch.float32), pool, 0, slots)
    assert q.isfinite().all()
    assert pool.isnan().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize(("first_head", "num_heads"), [(0, 4), (1, 2), (3, 1), (2, 0)])
def test_kv_gather_and_scatter_move_bits_of_the_heads_asked_for(
    dtype: torch.dtype, first_head: int, num_heads: int
) -> None:
    pool = (torch.randn(9, 3, 4, 2, 4, 80) * 50).to(dtype).to(DEVICE)
    if dtype.is_floating_point:
        pool[2] = NAN
    blocks = ints([7, 2, 3, 0], torch.int64)
    buffer, expected = (torch.full((4, 3, num_heads, 2, 4, 80), 77, dtype=dtype, device=DEVICE) for _ in range(2))
    kv_copy.kv_gather(pool, blocks, first_head, buffer)
    kv_copy.gather_reference(pool, blocks, first_head, expected)
    assert same_bits(buffer, expected)
    target = torch.full_like(pool, 5)
    expected_pool = target.clone()
    kv_copy.kv_scatter(buffer, target, blocks, first_head)
    kv_copy.scatter_reference(expected, expected_pool, blocks, first_head)
    assert same_bits(target, expected_pool)


# Attention


def check_attention(
    query_lens: list[int],
    context_lens: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    dim: int = 64,
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    window: int = 0,
    soft_cap: float = 0.0,
    num_splits: int = 0,
) -> None:
    """Blocks beyond the table, and the unwritten part of the last block, hold NaN; so do the rows to be written."""
    num_heads, num_kv_heads = heads
    sizes = [-(-length // block_size) + 1 for length in context_lens]
    pool = randn(sum(sizes) + 1, 2, num_kv_heads, 2, block_size, dim, dtype=dtype)
    ids = np.random.default_rng(0).permutation(len(pool) - 1) + 1
    tables = np.split(ids, np.cumsum(sizes)[:-1])
    pool[0] = NAN
    for table, length in zip(tables, context_lens, strict=True):
        pool[table[-1]] = NAN
        if length % block_size:
            pool[table[-2], :, :, :, length % block_size :] = NAN
    q = randn(sum(query_lens), num_heads + 2, dim, dtype=dtype)[:, 1:-1]
    plan = paged_attention.plan_attention(
        pool,
        query_lens,
        context_lens,
        tables,
        num_heads=num_heads,
        window=window,
        soft_cap=soft_cap,
        num_splits=num_splits,
    )
    out = paged_attention.paged_attention(q, pool, 1, plan)
    # In fp32, scores of up to 30 are rounded before they are exponents; else the rounding of the result prevails.
    assert_close(out, paged_attention.reference(q, pool, 1, plan), roundings=64 if dtype is torch.float32 else 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_attention_of_a_mixed_step(dtype: torch.dtype, dim: int) -> None:
    check_attention([1, 5, 1, 48], [33, 5, 1, 100], dtype=dtype, dim=dim)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 63, 64, 65, 128])
def test_attention_at_the_edges_of_blocks_and_tiles(context: int) -> None:
    check_attention([1, context], [context, context], dtype=torch.float16)
    if context > 2:
        check_attention([2, context - 1], [context, context + 16], dtype=torch.float16)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (7, 1), (8, 1), (40, 2)])
def test_attention_with_every_grouping_of_heads(heads: tuple[int, int]) -> None:
    check_attention([1, 23, 1], [50, 40, 7], heads=heads)


@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 256])
def test_attention_with_every_size_of_block(block_size: int) -> None:
    check_attention([1, 20], [70, 37], block_size=block_size)


@pytest.mark.parametrize("window", [1, 16, 33, 1000])
def test_attention_within_a_window(window: int) -> None:
    check_attention([1, 40, 1], [130, 90, 5], window=window)
    check_attention([1], [600], window=window, num_splits=4)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_attention_with_a_soft_cap(soft_cap: float) -> None:
    check_attention([1, 20], [70, 37], soft_cap=soft_cap)
    check_attention([1, 20], [70, 37], soft_cap=soft_cap, window=9, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_in_any_number_of_splits(num_splits: int, dtype: torch.dtype) -> None:
    check_attention([1, 1, 1], [700, 64, 1], num_splits=num_splits, dtype=dtype, dim=80)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_of_padding_gives_zeros_and_rows_of_others_stay(num_splits: int) -> None:
    pool = torch.full((3, 1, 2, 2, 16, 64), NAN, device=DEVICE)
    q, out = randn(3, 4, 64), torch.full((3, 4, 64), NAN, device=DEVICE)
    bounds, tables = ints([1, 1, 0, 0]).view(1, 4), torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    decode_attention.decode_attention(out, q, pool, 0, decode_attention.Singles(bounds, tables, num_splits))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[[0, 2]].isnan().all()


def test_attention_of_an_empty_step_is_empty() -> None:
    pool = torch.full((3, 1, 2, 2, 16, 64), NAN, device=DEVICE)
    plan = paged_attention.plan_attention(pool, [], [], [], num_heads=4)
    assert paged_attention.paged_attention(randn(0, 4, 64), pool, 0, plan).shape == (0, 4, 64)


def test_chunks_of_a_long_past_start_with_their_longest_tiles() -> None:
    pool = torch.zeros(40, 1, 1, 2, 16, 64, device=DEVICE)
    plan = paged_attention.plan_attention(pool, [300, 200], [300, 600], [np.arange(19), np.arange(38)], num_heads=1)
    starts = torch.tensor([0, 400])[plan.chunks.tiles_X2[:, 0].cpu().long()]
    positions = starts + plan.chunks.tiles_X2[:, 1].cpu()
    assert positions.tolist() == sorted(positions.tolist(), reverse=True)
    tokens = chunk_attention.chunk_tokens(1, 64, pool.dtype)
    assert len(positions) == math.ceil(300 / tokens) + math.ceil(200 / tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_a_layer_of_both_kinds_of_kernels_agrees(dtype: torch.dtype, normed: bool) -> None:
    """All that a layer does but its matrix products: a step of two chunks, then one of single tokens over them."""
    heads, kv_heads, dim = 6, 2, 64
    pool = torch.zeros(8, 2, kv_heads, 2, 16, dim, dtype=dtype, device=DEVICE)
    weight, norm = randn(heads * dim, dtype=dtype), randn(heads + kv_heads, dim, dtype=dtype) if normed else None
    tables = [np.array([5, 2]), np.array([7, 0, 3])]
    results = []
    for kernels, own_pool in ((dispatch.triton_kernels(), pool), (dispatch.PlainKernels(), pool.clone())):
        torch.manual_seed(7)
        outputs = []
        for query_lens, context_lens in (([20, 33], [20, 33]), ([1, 1], [21, 34])):
            spans = zip(query_lens, context_lens, strict=True)
            positions = np.concatenate([np.arange(end - length, end) for length, end in spans])
            owners = np.repeat([0, 1], query_lens)
            blocks = [int(tables[i][p // 16]) for i, p in zip(owners, positions, strict=True)]
            slots = kv_store.Slots(ints(blocks, torch.int64), ints((positions % 16).tolist(), torch.int64))
            x, residual = (randn(len(positions), heads * dim, dtype=dtype) for _ in range(2))
            normed_x = kernels.add_rms_norm(x, residual, weight, 1e-5)
            qkv = torch.cat((normed_x.view(-1, heads, dim), randn(len(x), 2 * kv_heads, dim, dtype=dtype)), dim=1)
            turn = turn_at(positions.tolist(), dim, dtype)
            q = kernels.rope_store(qkv, norm, 1e-5, turn, own_pool, 1, slots)
            plan = kernels.plan_attention(own_pool, query_lens, context_lens, tables, heads)
            attended = kernels.paged_attention(q, own_pool, 1, plan).flatten(1)
            outputs.append(kernels.gated_activation(kernels.rms_norm(attended, weight, 1e-5)))
        results.append(torch.cat(outputs))
    assert_close(results[0], results[1], roundings=256 if dtype is torch.float32 else 32)


# Sampling


def test_noise_equals_the_plain_kernel_but_for_the_last_bits() -> None:
    keys = plain_noise.row_keys([0, 42, 2**64 - 1], [0, 7, 2**40])
    ids = torch.cat((torch.arange(3000), torch.tensor([2**31 - 1, 49_151, 151_935]))).int()[None]
    expected = plain_noise.gumbel_noise(keys, ids)
    actual = sampling_noise.gumbel_noise(keys.to(DEVICE), ids.to(DEVICE)).cpu()
    torch.testing.assert_close(actual, expected, rtol=3e-7, atol=3e-7)
    torch.testing.assert_close(actual[:, ::97], sampling_noise.reference(keys, ids[:, ::97]), rtol=1e-6, atol=1e-6)
    own = ids.repeat(3, 1).roll(1, 0)
    assert torch.equal(sampling_noise.gumbel_noise(keys.to(DEVICE), own.to(DEVICE)).cpu(), actual)
    assert sampling_noise.gumbel_noise(keys[:0].to(DEVICE), ids.to(DEVICE)).shape == (0, 3003)


@pytest.mark.parametrize("vocabulary", [1, 1000, 8192, 20_000])
def test_choice_is_that_of_the_plain_path(vocabulary: int) -> None:
    rows = 24
    scores = torch.randn(rows, vocabulary) * 3
    keys = plain_noise.row_keys(list(range(rows)), [9] * rows)
    noisy = torch.tensor([r % 3 for r in range(rows)], dtype=torch.int32)
    thresholds = torch.where(torch.arange(rows) % 2 == 0, scores.amax(1) - 2.0, -INFINITY)
    expected = token_choice.reference(scores, keys, noisy, thresholds)
    actual = token_choice.choose(*(operand.to(DEVICE) for operand in (scores, keys, noisy, thresholds)))
    assert actual.tolist() == expected.tolist()


def test_choice_among_equals_is_the_lowest_id() -> None:
    scores = torch.zeros(2, 20_000, device=DEVICE)
    scores[1, [777, 778, 9000, 19_999]] = 1.0
    keys, noisy = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE), ints([0, 0])
    thresholds = torch.full((2,), -INFINITY, device=DEVICE)
    assert token_choice.choose(scores, keys, noisy, thresholds).tolist() == [0, 777]


def filters_of(rows: list[tuple[int, float, float]]) -> sampling_filters.Filters:
    top_k, top_p, min_p = (list(values) for values in zip(*rows, strict=True))
    return sampling_filters.Filters(
        ints(top_k),
        torch.tensor(top_p, dtype=torch.float64, device=DEVICE),
        torch.tensor([math.log(p) if p else -INFINITY for p in min_p], device=DEVICE),
    )


FILTERS = [(0, 1.0, 0.0), (1, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.5, 0.0), (0, 1.0, 0.1), (9, 0.97, 0.05)]


@pytest.mark.parametrize("vocabulary", [7, 2500])
def test_thresholds_keep_what_sorting_keeps(vocabulary: int) -> None:
    scores = randn(len(FILTERS), vocabulary) * 3
    scores[:, ::5] = -INFINITY
    scores[:, 1] = scores[:, 2]
    filters = filters_of(FILTERS)
    actual, expected = sampling_filters.filter_thresholds(scores, filters), sampling_filters.reference(scores, filters)
    assert torch.equal(scores >= actual[:, None], scores >= expected[:, None])


def test_equal_scores_stay_or_go_together() -> None:
    scores = torch.zeros(3, 100, device=DEVICE)
    scores[:, 50:] = 1.0
    scores[:, 0] = -0.0
    thresholds = sampling_filters.filter_thresholds(scores, filters_of([(3, 1.0, 0.0), (0, 0.1, 0.0), (51, 1.0, 0.0)]))
    assert (scores >= thresholds[:, None]).sum(1).tolist() == [50, 50, 100]


def test_penalties_are_those_of_the_plain_path_to_the_bit() -> None:
    vocabulary = 3000
    lengths, prompts = [0, 1, 40, 1500], [0, 1, 15, 0]
    ids = torch.randint(-1, vocabulary + 2, (sum(lengths),), dtype=torch.int32, device=DEVICE)
    ids[-800:] = ids[-800]
    history = penalties.History(ids, ints([0, 0, 1, 41, 1541]), ints(prompts), max(lengths))
    strengths = penalties.Penalties(
        *(torch.tensor(v, device=DEVICE) for v in ([1.3, 0.7, 1.1, 1.0], [0.1, 0.2, -0.3, 0.7], [0.3, 0.0, 0.1, 0.2]))
    )
    scores = randn(4, vocabulary) * 4
    expected = scores.clone()
    penalties.penalize(scores, history, strengths)
    penalties.reference(expected, history, strengths)
    assert torch.equal(scores, expected)


def test_chosen_logprobs() -> None:
    scores = randn(3, 5001) * 5
    scores[:, 7] = -INFINITY
    ids = torch.stack((scores[0].argmax(), scores[1].argmin(), scores[2].argmax() * 0 + 5000))
    actual, expected = token_logprobs.chosen_logprobs(scores, ids), token_logprobs.reference(scores, ids)
    torch.testing.assert_close(actual.logprobs_R, expected.logprobs_R, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual.ranks_R, expected.ranks_R)


# Refusals

POOL = torch.zeros(2, 1, 2, 2, 16, 64, device=DEVICE)
SLOTS = plain_kv_store.Slots(ints([0], torch.int64), ints([0], torch.int64))
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("gate_up: shape", lambda: gated_activation.gated_activation(randn(2, 7))),
    ("weight: shape", lambda: rms_norm.rms_norm(randn(2, 8), randn(9), 1e-5)),
    ("weight: torch.float16", lambda: rms_norm.rms_norm(randn(2, 8), randn(8, dtype=torch.float16), 1e-5)),
    ("x: torch.float64", lambda: rms_norm.rms_norm(randn(2, 8).double(), randn(8).double(), 1e-5)),
    ("residual: stride 2", lambda: rms_norm.add_rms_norm(randn(2, 8), randn(2, 16)[:, ::2], randn(8), 1e-5)),
    ("cos: shape", lambda: rope.rope(randn(2, 1, 64), turn_at([1], 64, torch.float32))),
    ("head_dim 258", lambda: rope.rope(randn(1, 1, 258), turn_at([1], 258, torch.float32))),
    ("layer: 1, the pool has 1", lambda: kv_store.kv_store(randn(1, 2, 64), randn(1, 2, 64), POOL, 1, SLOTS)),
    ("value: shape", lambda: kv_store.kv_store(randn(1, 2, 64), randn(2, 2, 64), POOL, 0, SLOTS)),
    ("first_head: 1 and 2 heads", lambda: kv_copy.kv_gather(POOL, ints([0], torch.int64), 1, POOL[:1].clone())),
    ("num_heads: 3", lambda: paged_attention.plan_attention(POOL, [1], [1], [np.array([0])], num_heads=3)),
    ("1 blocks of 16 for 17", lambda: paged_attention.plan_attention(POOL, [1], [17], [np.array([0])], num_heads=2)),
    ("2 rows, needs 1 to", lambda: paged_attention.plan_attention(POOL, [2], [1], [np.array([0])], num_heads=2)),
    ("keys: torch.int64", lambda: sampling_noise.gumbel_noise(ints([1, 2], torch.int64).view(1, 2), ints([3])[None])),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[message for message, _ in REFUSED])
def test_what_does_not_fit_is_refused_by_name_and_number(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(OperandError) as refused:
        call()
    assert message in str(refused.value)
