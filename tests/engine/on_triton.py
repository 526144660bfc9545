"""A decoder of Triton kernels computes what the decoder of plain torch computes: whole models, chunked, batched, paged.

Not collected by itself: the interpreter has to be switched on before Triton is imported, for the whole process.
`test_triton_decoder.py` runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine import part as part_module
from baton.engine.graphs import DecodeGraphs, Run, buckets_up_to
from baton.engine.layers import Batch
from baton.engine.runner import Runner
from baton.kernels.dispatch import triton_kernels
from baton.kernels.kv_store import Slots

VARIANTS = [("llama", {"num_hidden_layers": 2}), ("qwen3", {"num_hidden_layers": 2, "head_dim": 64})]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_tokens_and_logprobs_equal_those_of_plain_torch(
    tiny_model_dir: Callable[..., Path],
    runner_for: Callable[..., Runner],
    new_sequence: Any,
    play: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    overrides: dict[str, Any],
) -> None:
    directory = tiny_model_dir(family, **overrides)
    plain = runner_for(directory, cpu_kernels="torch")
    monkeypatch.setattr(part_module, "kernels_for", lambda device, cpu: triton_kernels())
    triton = runner_for(directory, cpu_kernels="torch", threads=2)
    assert type(triton._decoder.kernels).__name__ == "TritonKernels"  # type: ignore[union-attr]
    prompts = [random.Random(length).choices(range(320), k=length) for length in (1, 15, 40)]
    played, tokens = [], []
    for runner in (plain, triton):
        sequences = [
            new_sequence(prompt, max_tokens=3, temperature=0.8 * (i % 2), seed=i, logprobs=0, prompt_logprobs=0)
            for i, prompt in enumerate(prompts)
        ]
        played.append(play(runner, sequences, seed=4))
        tokens.append([sequence.token_ids for sequence in sequences])
    assert tokens[0] == tokens[1]
    for expected, actual in zip(*played, strict=True):
        pairs = zip(expected.prompt + expected.sampled, actual.prompt + actual.sampled, strict=True)
        assert all(one.logprob == pytest.approx(other.logprob, abs=1e-3) for one, other in pairs)


class Rerun:
    """Stands where a GPU records: the computation itself, again. Whatever it reads must lie where it lay."""

    def record(self, compute: Run) -> Run:
        compute()
        return compute


@pytest.mark.parametrize("batch", [1, 3, 5, 7])
def test_a_recorded_decode_step_computes_what_a_planned_one_computes(
    tiny_model_dir: Callable[..., Path], runner_for: Callable[..., Runner], batch: int
) -> None:
    runner = runner_for(tiny_model_dir("llama", num_hidden_layers=2), cpu_kernels="torch")
    plain, pool = runner._decoder, runner.kv.clone()
    graphs = DecodeGraphs(replace(plain, kernels=triton_kernels()), pool, 7, 8, Rerun())
    generator = np.random.default_rng(batch)
    for _ in range(3):
        context_lens = generator.integers(1, 8 * 16, batch)
        free = generator.permutation(len(pool))
        tables = [free[8 * i : 8 * i + 8] for i in range(batch)]
        token_ids, positions = generator.integers(0, 320, batch), context_lens - 1
        expected_pool = pool.clone()
        blocks = np.array([table[p // 16] for table, p in zip(tables, positions, strict=True)])
        slots = Slots(torch.from_numpy(blocks), torch.from_numpy(positions % 16))
        plan = plain.plan_attention(expected_pool, [1] * batch, context_lens.tolist(), tables)
        step = Batch(torch.from_numpy(token_ids), torch.from_numpy(positions), slots, plan)
        with torch.inference_mode():
            expected = plain.hidden(step, expected_pool, torch.arange(batch))
            actual = graphs.hidden(token_ids, context_lens, tables)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pool, expected_pool, atol=1e-4, rtol=1e-4)


def test_more_sequences_than_any_bucket_takes_are_left_to_others(
    tiny_model_dir: Callable[..., Path], runner_for: Callable[..., Runner]
) -> None:
    runner = runner_for(tiny_model_dir("llama", num_hidden_layers=2), cpu_kernels="torch")
    graphs = DecodeGraphs(replace(runner._decoder, kernels=triton_kernels()), runner.kv.clone(), 2, 4, Rerun())
    ones = np.ones(3, dtype=np.int64)
    assert graphs.hidden(ones, ones, [ones] * 3) is None


@pytest.mark.parametrize("most", [1, 2, 3, 8, 63, 64, 65, 200, 256])
def test_buckets_ascend_to_the_largest_and_waste_little(most: int) -> None:
    buckets = buckets_up_to(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    for count in range(1, most + 1):
        assert next(size for size in buckets if size >= count) <= max(count + 7, count * 1.25)
