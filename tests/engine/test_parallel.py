"""A model that is split over ranks gives the tokens of the whole one, and a lost rank is noticed."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Nursery

from baton.engine import parallel
from baton.engine.models.config import ModelConfig, RopeConfig, UnsupportedModel
from baton.engine.parallel import RankLost, Ranks
from baton.engine.runner import Runner
from baton.engine.split import split
from baton.engine.step_inputs import StepInputs
from baton.engine.weights import Piece, Weights
from baton.proto.messages import Request, Role, Sampling
from baton.proto.settings import EngineSettings, RankSettings, SchedulerSettings
from baton.scheduler.plan import Chunk, Emitted, Step
from baton.scheduler.scheduler import Scheduler, SchedulerConfig

TinyModelDir = Callable[..., Path]
LOST_WITHIN_S = 10.0
NUM_BLOCKS = 10  # of 16 tokens: so few that one sequence has to be set back
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 4, "vocab_size": 323}),
    ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    ("qwen3", {"num_key_value_heads": 2}),
]


CONFIG = ModelConfig(
    family="llama",
    vocab_size=8,
    hidden_size=64,
    intermediate_size=8,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    max_model_len=512,
    sliding_window=None,
    bos_token_id=None,
    eos_token_ids=(),
    digest="",
)


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def settings(directory: Path, size: int, **options: Any) -> EngineSettings:
    defaults = {"dtype": "float32", "num_blocks": 256, "threads": 1}
    return EngineSettings(model=str(directory), tensor_parallel=size, **(defaults | options))


def requests(vocabulary: int) -> list[Request]:
    """Prompts of all sizes, some with a common start; every other one is sampled."""
    made = []
    for index, length in enumerate((14, 15, 60, 12, 30, 28)):
        rng = random.Random(length)
        prompt = tuple(rng.choices(range(vocabulary), k=length))
        sampling = Sampling(temperature=0.8 * (index % 2), top_p=0.95, max_tokens=24, seed=index)
        made.append(Request(f"r{index}", prompt, length, sampling))
    return made


def served(runner: Runner, num_blocks: int) -> tuple[list[list[int]], int]:
    """The outputs of all requests at once, in chunks of a small budget, and how often one was preempted."""
    scheduling = SchedulerSettings(max_num_batched_tokens=48)
    scheduler = Scheduler(SchedulerConfig(Role.COLOCATED, num_blocks, 512, settings=scheduling))
    sequences = [scheduler.add(request, 0.0) for request in requests(runner.description.vocab_size)]
    outputs: dict[str, list[int]] = {}
    while not all(sequence.ended for sequence in sequences):
        step = scheduler.plan(0.0)
        for event in scheduler.commit(step, runner.run(step), 0.0):
            if isinstance(event, Emitted):
                outputs.setdefault(event.sequence.sequence_id, []).append(event.token_id)
    return [outputs[sequence.sequence_id] for sequence in sequences], scheduler.counters.preemptions_recompute


@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(FAMILIES)])
def test_tokens_do_not_depend_on_the_number_of_ranks(
    tiny_model_dir: TinyModelDir, nursery: Nursery, family: str, overrides: dict[str, Any]
) -> None:
    directory = tiny_model_dir(family, num_hidden_layers=2, **overrides)
    expected = served(nursery.runner(settings(directory, 1)), NUM_BLOCKS)
    assert expected[1] > 0
    for size in (2, 4):
        assert served(nursery.runner(settings(directory, size)), NUM_BLOCKS) == expected
    assert nursery.failures == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_of_outputs_and_prompts_do_not_depend_on_the_number_of_ranks(
    tiny_model_dir: TinyModelDir, nursery: Nursery, new_sequence: Any, play: Any, dtype: str
) -> None:
    directory = tiny_model_dir("qwen3", vocab_size=321)
    found = []
    for size in (1, 2):
        runner = nursery.runner(settings(directory, size, dtype=dtype))
        sequences = [
            new_sequence(range(length), temperature=0.0, max_tokens=2, logprobs=3, prompt_logprobs=3)
            for length in (1, 30, 61)
        ]
        played = play(runner, sequences, seed=3)
        found.append([entry.logprob for each in played for entry in each.prompt])
        found[-1] += [each.sampled[0].logprob for each in played]
    # Scores are a few units wide; bf16 keeps 8 bits of each of the sums behind them.
    assert found[1] == pytest.approx(found[0], abs=1e-4 if dtype == "float32" else 0.25)


def test_each_rank_keeps_its_share_of_the_kv_heads(tiny_model_dir: TinyModelDir, nursery: Nursery) -> None:
    whole = nursery.runner(settings(tiny_model_dir("llama"), 1))
    part = nursery.runner(settings(tiny_model_dir("llama"), 2))
    assert part.kv.shape[2] * 2 == whole.kv.shape[2]
    assert part.description == whole.description
    assert part.geometry == replace(whole.geometry, tp_size=2)
    assert part.geometry.differs_in(whole.geometry) == ""


# --- what each rank gets


@pytest.mark.parametrize(
    ("overrides", "size", "problem"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, 2, "num_key_value_heads 3 is neither"),
        ({"num_heads": 4}, 3, "num_attention_heads 4 is no multiple"),
        ({"intermediate_size": 98}, 4, "intermediate_size 98 is no multiple"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_field(
    overrides: dict[str, Any], size: int, problem: str
) -> None:
    config = replace(CONFIG, **overrides)
    with pytest.raises(UnsupportedModel, match=f"tensor_parallel {size}: {problem}"):
        split(config, 0, size)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(8, 40), st.data())
def test_ranks_together_hold_the_model_and_each_the_kv_heads_of_its_heads(
    size: int, num_kv_heads: int, group_size: int, vocabulary: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group_size * (size if size > num_kv_heads else 1)
    config = replace(
        CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=size * 3, vocab_size=vocabulary
    )
    parts = [split(config, rank, size) for rank in range(size)]
    for whole, shares in (
        (num_heads, [part.heads for part in parts]),
        (size * 3, [part.middle for part in parts]),
        (vocabulary, [part.vocabulary for part in parts]),
    ):
        assert [i for share in shares for i in share] == list(range(whole))
    for part in parts:
        assert len(part.heads) == num_heads // size
        assert sorted({head * num_kv_heads // num_heads for head in part.heads}) == list(part.kv_heads)


@pytest.mark.parametrize("cut", [(range(3, 7), None), (None, range(16, 48)), (range(64), range(1))])
def test_a_piece_of_a_tensor_is_that_piece_of_the_whole(
    tiny_model_dir: TinyModelDir, cut: tuple[range | None, range | None]
) -> None:
    weights = Weights(tiny_model_dir("llama"), torch.float32, torch.device("cpu"))
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = weights.tensor(name, 64, 64)
    rows, columns = (slice(None) if one is None else slice(one.start, one.stop) for one in cut)
    assert torch.equal(weights.stacked([Piece(name, (64, 64), *cut)]), whole[rows, columns])


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4), st.lists(st.integers(0, 9)))
def test_the_numbers_of_a_step_survive_the_way_to_another_rank(shape: list[tuple[int, int]], rows: list[int]) -> None:
    lengths = torch.tensor([length for length, _ in shape]).numpy()
    inputs = StepInputs(
        token_ids=torch.arange(lengths.sum()).numpy() * 7,
        query_lens=lengths,
        context_lens=lengths + [past for _, past in shape],
        tables=[torch.arange(past + 1).numpy() + 2**30 for _, past in shape],
        rows=torch.tensor(rows, dtype=torch.int64).numpy(),
        scored=rows,
    )
    received = StepInputs.decode(inputs.encode())
    assert received.encode() == inputs.encode()
    assert received.tables[-1].tolist() == inputs.tables[-1].tolist()
    assert received.scored == rows


# --- ranks that are lost


def until_told(nursery: Nursery) -> str:
    end = time.monotonic() + LOST_WITHIN_S
    while not nursery.failures:
        assert time.monotonic() < end, "nobody has noticed"
        time.sleep(0.01)
    return str(nursery.failures[0])


def a_step(new_sequence: Any) -> Step:
    sequence = new_sequence(range(20), temperature=0.0)
    sequence.block_ids = [1, 2]
    return Step(0, [Chunk(sequence, 0, 20, True)], 20)


def test_a_killed_rank_fails_the_worker_and_the_step(
    tiny_model_dir: TinyModelDir, nursery: Nursery, new_sequence: Any
) -> None:
    runner = nursery.runner(settings(tiny_model_dir("llama"), 2))
    runner.run(a_step(new_sequence))
    os.kill(nursery.processes[0].pid or 0, signal.SIGKILL)
    assert until_told(nursery) == "rank 1 has ended"
    with pytest.raises(RuntimeError):
        runner.run(a_step(new_sequence))


def test_a_stopped_rank_fails_the_worker(
    tiny_model_dir: TinyModelDir, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery.runner(settings(tiny_model_dir("llama"), 2))
    monkeypatch.setattr(parallel, "SILENCE_S", 2.0)
    os.kill(nursery.processes[0].pid or 0, signal.SIGSTOP)
    try:
        assert until_told(nursery) == "rank 1 has been silent for 2 s"
    finally:
        os.kill(nursery.processes[0].pid or 0, signal.SIGCONT)


def test_a_rank_that_cannot_load_its_part_says_why(tiny_model_dir: TinyModelDir, nursery: Nursery) -> None:
    wanted = settings(tiny_model_dir("llama"), 2)
    ranks = nursery.ranks(wanted, theirs=replace(wanted, num_blocks=10**9))
    with pytest.raises(RankLost, match=r"rank 1: OutOfMemory: a KV cache of 1000000000 blocks"):
        Runner(wanted, ranks)


def test_a_rank_that_does_not_come_is_named(tiny_model_dir: TinyModelDir) -> None:
    with pytest.raises(RankLost, match=r"ranks \[1, 2\] have not come"):
        Ranks(settings(tiny_model_dir("llama"), 3), lambda place: None, lambda error: None, join_s=0.2)


def test_a_stranger_at_the_door_is_hung_up_on(tiny_model_dir: TinyModelDir, nursery: Nursery) -> None:
    strangers = []

    def start(place: RankSettings) -> None:
        strangers.append(socket.create_connection(("127.0.0.1", place.port), timeout=LOST_WITHIN_S))
        strangers[0].sendall(bytes(len(place.key)) + bytes((place.rank, 0)))

    with pytest.raises(RankLost, match=r"ranks \[1\] have not come"):
        Ranks(settings(tiny_model_dir("llama"), 2), start, nursery.failures.append, join_s=0.5)
    assert strangers[0].recv(1) == b""
