"""The decoder of compiled kernels computes what the torch decoder does, and each can be had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import part as part_module
from baton.engine.layers import Decoder
from baton.engine.native import NativeDecoder
from baton.engine.runner import Runner
from baton.kernels.cpu.library import Cpu
from baton.proto.settings import EngineSettings
from baton.scheduler.plan import Chunk, Step

TinyModelDir = Callable[..., Path]


def settings(directory: Path, **options: Any) -> EngineSettings:
    return EngineSettings(
        model=str(directory), **({"num_blocks": 64, "block_size": 16, "threads": 1, "cpu_kernels": "native"} | options)
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("threads", [1, 2])
def test_both_decoders_find_the_same_hidden_state(
    tiny_model_dir: TinyModelDir, new_sequence: Any, family: str, threads: int
) -> None:
    directory = tiny_model_dir(family)
    native = Runner(settings(directory, threads=threads))
    plain = Runner(settings(directory, cpu_kernels="torch"))
    assert isinstance(native._decoder, NativeDecoder)
    assert isinstance(plain._decoder, Decoder)
    entries = []
    for each in (native, plain):
        sequence = new_sequence(range(7, 60), temperature=0.0, prompt_logprobs=0, logprobs=0)
        sequence.block_ids = [3, 9, 1, 4]
        first = each.run(Step(0, [Chunk(sequence, 0, 40, False)], 40)).logprobs[0].prompt
        rest = each.run(Step(1, [Chunk(sequence, 40, 13, True)], 13)).logprobs[0]
        entries.append([entry.logprob for entry in (*first, *rest.prompt)])
        assert rest.sampled is not None
        entries[-1].append(rest.sampled.logprob)
    # Scores are a few units wide; bf16 keeps 8 bits of each of the sums behind them.
    assert entries[0] == pytest.approx(entries[1], abs=0.25)
    torch.testing.assert_close(native.kv.float(), plain.kv.float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("lengths", [(9, 33, 1, 50, 17), tuple(range(2, 51))])
def test_a_row_that_decodes_is_bit_for_bit_the_same_alone_and_in_any_batch(
    tiny_model_dir: TinyModelDir, new_sequence: Any, lengths: tuple[int, ...]
) -> None:
    runner = Runner(settings(tiny_model_dir("llama"), num_blocks=256))
    chunks = []
    for i, length in enumerate(lengths):
        sequence = new_sequence(range(i, i + length), temperature=0.0, logprobs=4)
        sequence.block_ids = list(range(4 * i, 4 * i + 4))
        runner.run(Step(0, [Chunk(sequence, 0, length, False)], length))
        chunks.append(Chunk(sequence, length - 1, 1, True))
    together = runner.run(Step(1, chunks, len(chunks))).logprobs
    for i, chunk in enumerate(chunks):
        alone = runner.run(Step(2, [chunk], 1)).logprobs
        assert alone[0].sampled == together[i].sampled


def test_float32_attends_with_the_compiled_kernels_and_multiplies_with_torch(tiny_model_dir: TinyModelDir) -> None:
    runner = Runner(settings(tiny_model_dir("llama"), dtype="float32"))
    assert isinstance(runner._decoder, Decoder)
    assert runner._cpu is not None
    assert runner._cpu.attends(runner.kv)


@pytest.mark.parametrize("fast", [False, True])
def test_products_are_compiled_by_default_where_that_is_known_to_be_faster(
    tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(Cpu, "multiplies_fast", fast)
    runner = Runner(settings(tiny_model_dir("llama"), cpu_kernels="auto"))
    assert isinstance(runner._decoder, NativeDecoder if fast else Decoder)
    assert runner._cpu is not None


def test_a_runner_without_a_compiler_computes_in_torch(
    tiny_model_dir: TinyModelDir, new_sequence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(part_module, "open_cpu", lambda directory, threads: None)
        runner = Runner(settings(tiny_model_dir("llama"), dtype="float32"))
    assert isinstance(runner._decoder, Decoder)
    sequence = new_sequence(range(20), temperature=0.0)
    sequence.block_ids = [5, 2]
    token = runner.run(Step(0, [Chunk(sequence, 0, 20, True)], 20)).token_ids
    native = Runner(settings(tiny_model_dir("llama"), dtype="float32"))
    assert native._cpu is not None
    assert native.run(Step(0, [Chunk(sequence, 0, 20, True)], 20)).token_ids == token
