"""The compiled CPU kernels against the references of those that they stand in for, and how they come to be there."""

from __future__ import annotations

import logging
import multiprocessing
import platform
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from baton.kernels import gated_activation, kv_store, linear, paged_attention, rms_norm, rope
from baton.kernels.cpu import library
from baton.kernels.cpu.library import Cpu
from baton.kernels.cpu.pages import LargePages, Reused, populated_pages

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative size of one rounding; results may be a few of them apart.
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def _narrow_builds() -> dict[str, str]:
    """Builds for lesser CPUs that this one runs as well: their instructions, and the flag that asks for them."""
    if platform.machine() != "x86_64":
        return {}
    plain = {"plain vectors": "-march=x86-64"}
    return plain | {"AVX2": "-march=x86-64-v3"} if "avx2" in library._cpu_features().split() else plain


NARROW = _narrow_builds()


@pytest.fixture(scope="session", params=["one thread", "three threads", "no tiles", *NARROW])
def cpu(request: pytest.FixtureRequest, directory: Path) -> Cpu:
    """The kernels, with one thread and more, without AMX where there is any, and built for lesser CPUs than this."""
    if request.param in NARROW:
        narrow = Cpu(library.load(library.build(directory, tuned=[NARROW[request.param]])), 1)
        assert narrow.instructions == request.param
        return narrow
    compiled = library.load(library.build(directory))
    return Cpu(compiled, 3 if request.param == "three threads" else 1, tiles=request.param != "no tiles")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, roundings: float = 4.0) -> None:
    assert actual.dtype == expected.dtype
    tolerance = roundings * EPSILON[actual.dtype]
    scale = expected.float().abs().max().clamp(min=1.0).item()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale * 0.25)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32, 33, 48, 100, 300])
@pytest.mark.parametrize("shape", [(32, 32), (80, 64), (49, 576), (7, 1536), (70, 1536)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_equals_its_reference(cpu: Cpu, rows: int, shape: tuple[int, int], bias: bool) -> None:
    x, weight = torch.randn(rows, shape[1]).bfloat16(), torch.randn(shape).bfloat16()
    offset = torch.randn(shape[0]).bfloat16() if bias else None
    packed = cpu.pack(weight)
    expected = linear.reference(x, weight, offset)
    assert_close(cpu.linear(x, packed, offset), expected)
    total = torch.randn(rows, shape[0]).bfloat16()
    wanted = (total.double() + linear.reference(x.double(), weight.double(), offset)).bfloat16()
    cpu.add_linear(x, packed, offset, total)
    assert_close(total, wanted)
    if not bias:
        assert_close(cpu.scores(x, packed, Reused()), linear.reference(x.float(), weight.float()), roundings=64)


@pytest.mark.parametrize("rows", [1, 16, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_product_equals_its_reference(cpu: Cpu, rows: int, bias: bool) -> None:
    x, weight = torch.randn(rows, 64).bfloat16(), (torch.randn(2 * 48, 64) / 4).bfloat16()
    offset = torch.randn(2 * 48).bfloat16() if bias else None
    gate_up = linear.reference(x.double(), weight.double(), offset)
    actual = cpu.gated_linear(
        x, cpu.pack(library.interleaved(weight)), None if offset is None else library.interleaved(offset)
    )
    assert_close(actual, gated_activation.reference(gate_up).bfloat16())


def test_the_gate_of_scores_that_overflow_an_exponential_is_still_finite(cpu: Cpu) -> None:
    weight = torch.zeros(32, 32).bfloat16()
    weight[:16, 0], weight[16:, 1] = 1.0, 1.0
    x = torch.zeros(4, 32).bfloat16()
    x[:, 0], x[:, 1] = torch.tensor([-1e4, -100.0, 100.0, 1e4]), 1.0
    gated = cpu.gated_linear(x, cpu.pack(library.interleaved(weight)))[:, 0]
    assert gated.tolist() == pytest.approx([0.0, 0.0, 100.0, 1e4], rel=0.01, abs=1e-30)


@pytest.mark.parametrize("depth", [32, 576, 672, 1536])
def test_a_row_of_a_product_is_the_same_alone_and_in_any_batch(cpu: Cpu, depth: int) -> None:
    x, weight = torch.randn(700, depth).bfloat16(), cpu.pack(torch.randn(96, depth).bfloat16())
    together = cpu.scores(x, weight, Reused())
    for rows in (slice(0, 1), slice(31, 32), slice(5, 22), slice(40, 70), slice(100, 165), slice(600, 700)):
        assert torch.equal(cpu.scores(x[rows], weight, Reused()), together[rows])


def test_a_weight_that_cannot_be_packed_is_refused(cpu: Cpu) -> None:
    with pytest.raises(ValueError, match=r"weight \[576, 33\] torch.bfloat16: needs bf16 and a multiple of 32"):
        cpu.pack(torch.zeros(576, 33).bfloat16())
    with pytest.raises(ValueError, match=r"weight \[32, 32\] torch.float32: needs bf16"):
        cpu.pack(torch.zeros(32, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 576])
def test_rms_norm_equals_its_reference(cpu: Cpu, dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(7, width).to(dtype), torch.randn(width).to(dtype)
    assert_close(cpu.rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("normed", [True, False])
def test_store_rotates_and_writes_its_slots_and_nothing_else(
    cpu: Cpu, dtype: torch.dtype, dim: int, normed: bool
) -> None:
    heads, kv_heads, tokens = 6, 2, 19
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    frequencies = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
    turn = rope.rotation(torch.arange(100, 100 + tokens), frequencies, 1.1, dtype)
    qk_norm = torch.randn(heads + kv_heads, dim).to(dtype) if normed else None
    pool = torch.randn(11, 3, kv_heads, 2, 4, dim).to(dtype)
    places = torch.randperm(44)[:tokens]
    slots = kv_store.Slots(places // 4, places % 4)
    qk, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    if qk_norm is not None:
        qk = rms_norm.reference(qk, qk_norm, 1e-5)
    turned = rope.reference(qk.double(), rope.Rotation(*(side.double() for side in turn))).to(dtype)
    expected = pool.clone()
    kv_store.reference(turned[:, heads:], value.clone(), expected, 1, slots)
    cpu.store(qkv, qk_norm, 1e-5, turn.cos_T1D, turn.sin_T1D, pool, 1, slots.blocks_T, slots.offsets_T)
    assert_close(qkv[:, :heads], turned[:, :heads])
    assert_close(pool, expected)
    untouched = torch.ones(pool.shape, dtype=torch.bool)
    untouched[slots.blocks_T, 1, :, :, slots.offsets_T] = False
    assert torch.equal(pool[untouched], expected[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 1), (17, 1), (9, 3)])
def test_attention_equals_its_reference_and_reads_only_its_contexts(
    cpu: Cpu, dtype: torch.dtype, dim: int, heads: tuple[int, int]
) -> None:
    for block_size in (1, 5, 16):
        _check_attention(cpu, [1, 1, 3, 7, 33], [1, 17, 6, 7, 40], block_size, heads, dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_over_several_segments_equals_its_reference(cpu: Cpu, dtype: torch.dtype, dim: int) -> None:
    """Contexts around the 128 keys of a chunk's block and the 32 to 256 tokens of a row's segment."""
    _check_attention(cpu, [1, 1, 1, 2, 9], [128, 129, 300, 258, 270], 16, (4, 2), dim, dtype)
    _check_attention(cpu, [33], [161], 16, (2, 1), dim, dtype)


def _check_attention(
    cpu: Cpu,
    query_lens: list[int],
    context_lens: list[int],
    block_size: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads = heads
    sizes = [-(-length // block_size) + 1 for length in context_lens]
    pool = torch.full((sum(sizes), 2, num_kv_heads, 2, block_size, dim), torch.nan, dtype=dtype)
    tables = np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    for table, length in zip(tables, context_lens, strict=True):
        for token in range(length):
            where = pool[table[token // block_size], 1, :, :, token % block_size]
            where.copy_(torch.randn(where.shape))
    # A slice of a wider tensor, as the fused projection leaves it.
    q = torch.randn(sum(query_lens), num_heads + 2, dim).to(dtype)[:, :num_heads]
    plan = paged_attention.plan_attention(pool, query_lens, context_lens, tables, cpu)
    assert plan.contexts is not None
    actual = paged_attention.paged_attention(q, pool, 1, plan)
    # As the reference, with a matrix product for its innermost loop.
    expected = torch.empty_like(actual)
    row = 0
    for query_len, context_len, table in zip(query_lens, context_lens, tables, strict=True):
        blocks = torch.from_numpy(table).repeat_interleave(block_size)[:context_len]
        kv = pool[blocks, 1, :, :, torch.arange(context_len) % block_size].double()
        for seen in range(context_len - query_len + 1, context_len + 1):
            key, value = (side.repeat_interleave(num_heads // num_kv_heads, dim=1) for side in kv[:seen].unbind(dim=2))
            weights = torch.einsum("hd,chd->hc", q[row].double(), key).div(dim**0.5).softmax(-1)
            expected[row] = torch.einsum("hc,chd->hd", weights, value)
            row += 1
    assert_close(actual, expected, roundings=32 if dtype is torch.float32 else 4)


def test_a_row_that_attends_is_the_same_alone_and_in_any_batch(cpu: Cpu) -> None:
    lengths = [40, 700, 3, 129]
    tables = np.split(np.arange(4 * 44), 4)
    pool, q = torch.randn(4 * 44, 1, 3, 2, 16, 64).bfloat16(), torch.randn(4, 9, 64).bfloat16()
    plan = paged_attention.plan_attention(pool, [1] * 4, lengths, tables, cpu)
    together = paged_attention.paged_attention(q, pool, 0, plan)
    for i in range(4):
        alone = paged_attention.plan_attention(pool, [1], lengths[i : i + 1], tables[i : i + 1], cpu)
        assert torch.equal(paged_attention.paged_attention(q[i : i + 1], pool, 0, alone), together[i : i + 1])


def test_a_head_that_the_kernels_do_not_take_runs_in_torch(cpu: Cpu) -> None:
    pool = torch.randn(4, 1, 1, 2, 4, 8)
    plan = paged_attention.plan_attention(pool, [1], [9], [np.arange(3)], cpu)
    assert plan.contexts is None
    q = torch.randn(1, 2, 8)
    expected = paged_attention.reference(q, pool, 0, plan)
    torch.testing.assert_close(paged_attention.paged_attention(q, pool, 0, plan), expected)


def test_a_build_is_made_once_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(library.build, [tmp_path, tmp_path])
    assert first == second
    made = first.stat().st_ino
    assert library.build(tmp_path).stat().st_ino == made
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name, "kernels.lock"]


def test_without_a_compiler_there_are_no_kernels_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert library.open_cpu(tmp_path, 1) is None
    assert "torch computes alone: no compiler (g++, c++) is installed" in caplog.text


def test_a_compiler_that_fails_leaves_no_library_and_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo unknown option >&2; exit 1; }\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with caplog.at_level(logging.WARNING):
        assert library.open_cpu(tmp_path / "built", 1) is None
    assert "unknown option" in caplog.text
    assert [path.name for path in (tmp_path / "built").iterdir()] == ["kernels.lock"]


def test_pieces_of_large_pages_begin_lines_and_do_not_overlap() -> None:
    pages = LargePages()
    sizes = [1, 64, 1000, 3 << 20, 70 << 20, 100, 63 << 20]
    pieces = [pages.take(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))


def test_reused_memory_grows_and_is_the_same_otherwise() -> None:
    memory = Reused()
    first = memory.scores(4, 100)
    assert (first.shape, first.dtype) == ((4, 100), torch.float32)
    assert memory.scores(2, 50).data_ptr() == first.data_ptr()
    larger = memory.scores(1000, 5000)
    larger.fill_(1.0)
    assert larger.sum() == 5_000_000


def test_memory_is_populated_and_keeps_what_is_written_meanwhile() -> None:
    before = psutil.Process().memory_info().rss
    memory, thread = populated_pages(200 << 20)
    memory[:: 1 << 20] = 7
    thread.join(60.0)
    assert len(memory) == 200 << 20
    assert memory.sum(dtype=torch.int64) == 7 * 200
    if tuple(map(int, platform.release().split(".")[:2])) >= (5, 14):
        assert psutil.Process().memory_info().rss - before > 190 << 20


def test_memory_that_nobody_has_any_more_is_not_populated() -> None:
    memory, thread = populated_pages(2 << 30)
    del memory
    thread.join(60.0)
    assert not thread.is_alive()
