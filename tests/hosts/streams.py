"""What the tests of several hosts ask: streams of a fixed mix, and the pace at which their tokens come.

Owns: prompts, what one client has received while it receives, and the check against transformers.
Refuses to know: hosts and how they fail.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
import transformers

from baton.client.client import AsyncClient

NUM_STREAMS = 20
NUM_TOKENS = 800  # so many that a stream can be hit in its middle
TIMEOUT_S = 600.0


@dataclass
class Stream:
    """What one client has received. `times` are those of its messages, by this machine's clock."""

    index: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    moves: int = 0

    def pause_s(self, since: float) -> float:
        """The longest time without a token that ended after a moment."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - max(before, since) for before, after in pairs if after > since), default=0.0)


def prompt_of(index: int) -> list[int]:
    random = Random(index)
    return [random.randrange(256) for _ in range(40 + 60 * index)]


async def receive(client: AsyncClient, stream: Stream, salt: str) -> None:
    """One stream to its end, greedy or sampled by its index; fails for a token too many, too few or out of order."""
    generation = client.generate(
        token_ids=prompt_of(stream.index),
        max_tokens=NUM_TOKENS,
        temperature=0.0 if stream.index % 2 else 0.8,
        seed=stream.index,
        ignore_eos=True,
        cache_salt=salt,
        timeout_s=TIMEOUT_S,
    )
    async for output in generation:
        if output.token_ids:
            assert output.first_token_index == len(stream.tokens), "a gap or a repeat"
            stream.tokens += output.token_ids
            stream.times.append(time.monotonic())
    result = await generation.result()
    stream.moves = result.finish.retries + result.num_resumes
    assert len(stream.tokens) == NUM_TOKENS


async def receive_all(client: AsyncClient, streams: list[Stream]) -> list[list[int]]:
    """All streams at once; `streams` is filled while they run. No prompt is in a prefix cache from an earlier round."""
    salt = secrets.token_hex(4)
    streams += [Stream(index) for index in range(NUM_STREAMS)]
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(receive(client, stream, salt))
    return [stream.tokens for stream in streams]


def wrong_tokens(model_dir: Path, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[str]:
    """Where outputs are not what transformers would say greedily, which it tells of a whole output in one pass.

    Each token is compared with the likeliest one after those before it, so the first that differs is found.
    """
    # Threads that wait for one another crawl on a machine whose cores are busy with eight hosts.
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    wrong = []
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        with torch.inference_mode():
            scores = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        likeliest = scores.argmax(dim=-1).tolist()
        wrong += [
            f"output {index}, token {place}: {token}, not {best}"
            for place, (token, best) in enumerate(zip(output, likeliest, strict=True))
            if token != best
        ]
    return wrong
