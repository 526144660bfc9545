"""Runners over tiny models, sequences built by hand, and a driver that plays scheduler without any policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.runner import Runner
from baton.proto.messages import Request, Sampling, TokenLogprob
from baton.proto.settings import EngineSettings
from baton.scheduler.plan import Chunk, Step
from baton.scheduler.sequence import Sequence

NUM_BLOCKS = 256


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def runner_for() -> Callable[..., Runner]:
    """A factory of fp32 runners, one for each directory and settings, whose pool holds loud numbers at first."""
    made: dict[tuple[Any, ...], Runner] = {}

    def make(directory: Path, **settings: Any) -> Runner:
        key = (directory, *sorted(settings.items()))
        if key not in made:
            options = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "block_size": 16, "threads": 1} | settings
            made[key] = Runner(EngineSettings(model=str(directory), **options))
            made[key].kv.normal_(std=50.0, generator=torch.Generator().manual_seed(0))
        return made[key]

    return make


@pytest.fixture(scope="session")
def new_sequence() -> Callable[..., Sequence]:
    """A factory of sequences; `sampling` is given as keyword arguments."""

    def make(token_ids: Items[int], num_prompt_tokens: int | None = None, **sampling: Any) -> Sequence:
        request = Request("s", tuple(token_ids), num_prompt_tokens or len(token_ids), Sampling(**sampling))
        return Sequence(request, 0, 0.0)

    return make


@dataclass
class Played:
    """What a sequence got: a log-probability for each sampled token, and those of the prompt, in order."""

    sampled: list[TokenLogprob] = field(default_factory=list)
    prompt: list[TokenLogprob] = field(default_factory=list)


@pytest.fixture(scope="session")
def play() -> Callable[..., list[Played]]:
    """Runs sequences to their end in randomly mixed steps, in random blocks: `play(runner, sequences, seed)`."""

    def run(runner: Runner, sequences: list[Sequence], seed: int = 0, longest_chunk: int = 40) -> list[Played]:
        rng = random.Random(seed)
        block_size = runner.description.block_size
        free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        played = [Played() for _ in sequences]
        computed = [0] * len(sequences)
        number = 0
        for sequence in sequences:
            while len(sequence.block_ids) * block_size < sequence.max_total_tokens:
                sequence.block_ids.append(free.pop())
        while live := [i for i, s in enumerate(sequences) if len(s.token_ids) < s.max_total_tokens]:
            chosen = rng.sample(live, rng.randint(1, len(live)))
            chunks = []
            for i in chosen:
                deficit = len(sequences[i].token_ids) - computed[i]
                length = rng.randint(1, min(deficit, longest_chunk))
                chunks.append(Chunk(sequences[i], computed[i], length, length == deficit))
            result = runner.run(Step(number, chunks, sum(chunk.num_tokens for chunk in chunks)))
            assert len(result.token_ids) == len(chunks)
            number += 1
            for k, i in enumerate(chosen):
                computed[i] += chunks[k].num_tokens
                entry = result.logprobs.get(k)
                if entry is not None:
                    played[i].prompt.extend(entry.prompt)
                    if entry.sampled is not None:
                        played[i].sampled.append(entry.sampled)
                if chunks[k].samples:
                    assert 0 <= result.token_ids[k] < runner.description.vocab_size
                    sequences[i].token_ids.append(result.token_ids[k])
                else:
                    assert result.token_ids[k] == -1
        return played

    return run
