"""What the runner promises beyond equality with transformers: who may change what, batches, restarts, descriptions."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import baton
from baton.engine.layers import refine_all, refine_few
from baton.engine.models.config import UnsupportedModel
from baton.engine.runner import Runner
from baton.proto.messages import KvGeometry, Leg, Request, Role, Sampling
from baton.proto.settings import EngineSettings, SchedulerSettings
from baton.scheduler.plan import Chunk, Step, StepResult
from baton.scheduler.scheduler import Scheduler, SchedulerConfig
from baton.scheduler.sequence import Sequence

TinyModelDir = Callable[..., Path]
RANDOM = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.3, "seed": 11}


@pytest.fixture(scope="module")
def runner(tiny_model_dir: TinyModelDir, runner_for: Any) -> Runner:
    made: Runner = runner_for(tiny_model_dir("llama"))
    return made


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(320), k=length)


def step_of(*chunks: Chunk) -> Step:
    return Step(0, list(chunks), sum(chunk.num_tokens for chunk in chunks))


def test_a_step_without_chunks_has_an_empty_result(runner: Runner) -> None:
    assert runner.run(step_of()) == StepResult([])


def test_a_chunk_that_does_not_sample_yields_no_token_and_still_leaves_its_kv(
    runner: Runner, new_sequence: Any
) -> None:
    sequence = new_sequence(prompt_of(20), temperature=0.0)
    sequence.block_ids = [4, 2]
    whole = runner.run(step_of(Chunk(sequence, 0, 20, True))).token_ids
    runner.kv[[4, 2]] = 0.0
    assert runner.run(step_of(Chunk(sequence, 0, 13, False))).token_ids == [-1]
    assert runner.run(step_of(Chunk(sequence, 13, 7, True))).token_ids == whole


def test_sequences_are_read_only_to_the_runner(runner: Runner, new_sequence: Any) -> None:
    sequence = new_sequence(prompt_of(30), 25, logprobs=2, prompt_logprobs=1, **RANDOM)
    sequence.block_ids = [7, 8]
    before = {name: copy.deepcopy(getattr(sequence, name)) for name in sequence.__slots__}
    runner.run(step_of(Chunk(sequence, 0, 30, True)))
    assert {name: getattr(sequence, name) for name in sequence.__slots__} == before


def test_only_the_blocks_of_computed_tokens_are_written(runner: Runner, new_sequence: Any) -> None:
    sequence = new_sequence(prompt_of(40), temperature=0.0)
    sequence.block_ids = [30, 31, 32]
    before = runner.kv.clone()
    runner.run(step_of(Chunk(sequence, 0, 18, False)))
    changed = (runner.kv != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [30, 31]
    assert torch.equal(runner.kv[31, ..., 2:, :], before[31, ..., 2:, :])


def test_results_come_in_the_order_of_the_chunks(runner: Runner, new_sequence: Any) -> None:
    sequences = [new_sequence(prompt_of(length, length), temperature=0.0, logprobs=0) for length in (9, 1, 33, 17, 2)]
    alone = []
    for i, sequence in enumerate(sequences):
        sequence.block_ids = list(range(i * 4, i * 4 + 4))
        alone.append(runner.run(step_of(Chunk(sequence, 0, len(sequence.token_ids), True))))
    # The prompt of every other sequence is computed already: its last token alone makes a one-token chunk.
    starts = [len(s.token_ids) - 1 if i % 2 else 0 for i, s in enumerate(sequences)]
    chunks = [Chunk(s, start, len(s.token_ids) - start, True) for s, start in zip(sequences, starts, strict=True)]
    together = runner.run(step_of(*chunks))
    assert together.token_ids == [result.token_ids[0] for result in alone]
    for i, result in enumerate(alone):
        one, other = together.logprobs[i].sampled, result.logprobs[0].sampled
        assert one is not None
        assert other is not None
        assert (one.token_id, one.logprob) == (other.token_id, pytest.approx(other.logprob, abs=1e-4))


def test_sequences_may_share_the_blocks_of_a_common_prefix(runner: Runner, new_sequence: Any) -> None:
    prefix = prompt_of(32)
    first = new_sequence([*prefix, 1, 2, 3], temperature=0.0)
    second = new_sequence([*prefix, 9, 8], temperature=0.0)
    second.block_ids = [50, 51, 52]
    expected = runner.run(step_of(Chunk(second, 0, 34, True))).token_ids
    first.block_ids = [40, 41, 42]
    runner.run(step_of(Chunk(first, 0, 35, True)))
    second.block_ids = [40, 41, 43]
    assert runner.run(step_of(Chunk(second, 32, 2, True))).token_ids == expected


def test_a_request_that_moves_to_another_worker_continues_with_the_same_tokens(
    tiny_model_dir: TinyModelDir, runner_for: Any, new_sequence: Any, play: Any
) -> None:
    here = runner_for(tiny_model_dir("qwen3"))
    there = runner_for(tiny_model_dir("qwen3"), block_size=8)
    prompt = prompt_of(29)
    uninterrupted = new_sequence(prompt, max_tokens=30, **RANDOM)
    play(here, [uninterrupted], seed=1)
    for moved_after in (0, 1, 13, 29):
        known = uninterrupted.token_ids[: len(prompt) + moved_after]
        moved = new_sequence(known, len(prompt), max_tokens=30, **RANDOM)
        others = [new_sequence(prompt_of(12, n), max_tokens=20, temperature=1.0, seed=n) for n in range(4)]
        play(there, [*others, moved], seed=moved_after)
        assert moved.token_ids == uninterrupted.token_ids


@pytest.mark.parametrize("ends", [[10], [1, 10], [3, 4, 8, 10], list(range(1, 11))])
def test_prompt_logprobs_cover_each_prompt_token_but_the_first_once(
    runner: Runner, new_sequence: Any, ends: list[int]
) -> None:
    # Seven prompt tokens, three more that an earlier attempt emitted: those are not prompt tokens.
    sequence = new_sequence(prompt_of(10), 7, temperature=0.0, prompt_logprobs=2)
    sequence.block_ids = [60]
    entries = []
    start = 0
    for end in ends:
        result = runner.run(step_of(Chunk(sequence, start, end - start, end == 10)))
        entries.extend(result.logprobs[0].prompt if result.logprobs else ())
        start = end
    assert [entry.token_id for entry in entries] == sequence.token_ids[1:7]
    assert all(len(entry.top_ids) == 2 for entry in entries)


def test_more_prompt_logprobs_than_fit_at_once_are_complete(
    runner: Runner, new_sequence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = new_sequence(prompt_of(40), temperature=0.0, prompt_logprobs=0)
    sequence.block_ids = [60, 61, 62]
    expected = runner.run(step_of(Chunk(sequence, 0, 40, True))).logprobs[0].prompt
    monkeypatch.setattr("baton.engine.runner._PROMPT_ROWS", 7)
    actual = runner.run(step_of(Chunk(sequence, 0, 40, True))).logprobs[0].prompt
    assert [entry.token_id for entry in actual] == [entry.token_id for entry in expected]
    assert [e.logprob for e in actual] == pytest.approx([e.logprob for e in expected], abs=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_in_mixed_steps(
    tiny_model_dir: TinyModelDir, runner_for: Any, new_sequence: Any, play: Any, dtype: str
) -> None:
    runner = runner_for(tiny_model_dir("qwen2"), dtype=dtype)
    exact = runner_for(tiny_model_dir("qwen2"))
    assert runner.kv.dtype == getattr(torch, dtype)
    prompts = [prompt_of(length) for length in (3, 21, 70)]
    played = {}
    for name, each in (("half", runner), ("exact", exact)):
        sequences = [new_sequence(prompt, max_tokens=1, temperature=0.0, prompt_logprobs=0) for prompt in prompts]
        played[name] = play(each, sequences, seed=3)
    for half, full in zip(played["half"], played["exact"], strict=True):
        # Scores are a few units wide; bf16 keeps 8 bits of each of the sums behind them.
        assert [e.logprob for e in half.prompt] == pytest.approx([e.logprob for e in full.prompt], abs=0.5)


def test_description_and_geometry_name_the_model(tiny_model_dir: TinyModelDir, runner: Runner) -> None:
    directory = tiny_model_dir("llama")
    description = runner.description
    assert (description.name, description.path) == (directory.name, directory)
    assert (description.vocab_size, description.max_model_len, description.eos_token_ids) == (320, 512, (257,))
    assert (description.block_size, description.num_blocks, description.dtype) == (16, 256, "float32")
    assert description.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert runner.kv.shape == (256, 3, 2, 2, 16, 16)
    assert runner.kv.is_contiguous()
    assert runner.kv[0].nbytes == description.kv_bytes_per_token * 16
    geometry = runner.geometry
    assert geometry == KvGeometry(geometry.model, baton.__version__, "float32", 16, 3, 2, 16)


def test_geometry_tells_other_weights_of_the_same_configuration_apart(
    tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    def settings(name: str) -> EngineSettings:
        return EngineSettings(model=str(tmp_path / name / "same"), dtype="float32", num_blocks=1, threads=1)

    for name, source in (
        ("a", tiny_model_dir("llama")),
        ("b", tiny_model_dir("llama")),
        ("c", tiny_model_dir("qwen2")),
    ):
        (tmp_path / name / "same").mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / "same" / file).write_bytes((source / file).read_bytes())
    tuned = tmp_path / "b" / "same" / "model.safetensors"
    content = bytearray(tuned.read_bytes())
    content[-40:] = bytes(40)  # the end of the last tensor in the file, which is the final norm
    a, c = Runner(settings("a")), Runner(settings("c"))
    assert a.geometry == Runner(settings("b")).geometry
    tuned.write_bytes(content)
    assert a.geometry.differs_in(Runner(settings("b")).geometry) == "model"
    assert a.geometry.differs_in(c.geometry) == "model"


def test_pool_size_follows_from_gigabytes(tiny_model_dir: TinyModelDir) -> None:
    runner = Runner(EngineSettings(model=str(tiny_model_dir("llama")), dtype="float32", kv_cache_gib=0.01, threads=1))
    assert runner.description.num_blocks == int(0.01 * 2**30) // (768 * 16)


def test_a_model_length_beyond_the_positions_is_refused(tiny_model_dir: TinyModelDir) -> None:
    with pytest.raises(UnsupportedModel, match=r"max_model_len 513.*512"):
        Runner(EngineSettings(model=str(tiny_model_dir("llama")), max_model_len=513, num_blocks=1))


def test_a_sliding_window_is_refused_unless_the_model_length_stays_inside(tiny_model_dir: TinyModelDir) -> None:
    directory = str(tiny_model_dir("mistral", sliding_window=100))
    with pytest.raises(UnsupportedModel, match="sliding_window 100 is shorter than max_model_len 512"):
        Runner(EngineSettings(model=directory, num_blocks=1))
    assert Runner(EngineSettings(model=directory, num_blocks=1, max_model_len=100)).description.max_model_len == 100


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_steps_launched_before_the_one_before_is_read_give_the_same_tokens(
    tiny_model_dir: Callable[..., Path], runner_for: Callable[..., Runner], family: str
) -> None:
    runner = runner_for(tiny_model_dir(family))
    outputs = []
    for ahead in (False, True):
        runner.kv.normal_(std=50.0, generator=torch.Generator().manual_seed(1))
        settings = SchedulerSettings(max_num_batched_tokens=24, prefix_cache=False)
        scheduler = Scheduler(SchedulerConfig(Role.COLOCATED, 13, 200, 16, settings, plans_ahead=ahead))
        emitted: dict[str, list[int]] = {}
        for i, length in enumerate((1, 9, 17, 40)):
            sampling = Sampling(
                max_tokens=75, temperature=0.9 * (i % 2), seed=i, stop_token_ids=(5, 6, 7, 8) if i == 3 else ()
            )
            request = Request(str(i), tuple(range(length)), length, sampling, Leg.WHOLE)
            assert isinstance(scheduler.add(request, 0.0), Sequence)
            emitted[str(i)] = []
        flights = deque()
        preempted = 0
        while scheduler.load().running + scheduler.load().waiting:
            step = scheduler.plan(0.0)
            preempted += len(step.preempted)
            if step.chunks:
                flights.append((step, runner.launch(step)))
            if len(flights) > ahead or not step.chunks:
                step, launched = flights.popleft()
                for event in scheduler.commit(step, launched.read(), 0.0):
                    emitted[event.sequence.sequence_id].append(event.token_id)
        assert preempted
        outputs.append(emitted)
    assert outputs[0] == outputs[1]


def test_refining_a_few_scores_finds_the_same_best_as_refining_all() -> None:
    torch.manual_seed(3)
    hidden, head = torch.randn(6, 64).bfloat16(), torch.randn(400, 64).bfloat16()
    rounded = (hidden @ head.T).float()
    near = rounded.amax(dim=1, keepdim=True) - 0.5
    few, every = rounded.clone(), rounded.clone()
    refine_few(few, near, hidden, head)
    refine_all(every, near, hidden, head)
    assert (every >= near).sum(1).max() <= 8
    torch.testing.assert_close(few, every)
    assert not torch.equal(few, rounded)
