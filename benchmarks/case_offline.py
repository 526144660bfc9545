"""S1: one worker on one core, no wire: decode and prefill against vLLM's CPU build and against this core's limits.

Owns: the generations that both sides do, and the rows. Both are asked in turn, in every round, on the same core; who is
not asked waits for its next question and computes nothing.

    decode   so many sequences from 128 tokens of context to 512: tokens/s from the moment when each has its first one
    prefill  one prompt of random tokens in one step: tokens/s until its first token

A row passes at 1.3 times the peer, or at 85 % of the limit that the same round measures for its shape (offline.py):
for one row the weights' bytes over the speed of reading memory, else the step's matrix products alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from bars import Better, Measure, Row
from case import Options
from offline import limit, native_decoder
from peers import MAX_MODEL_LEN, OFFLINE_BUDGET, script

from baton.engine.checkpoint import resolve_model
from baton.engine.runner import Runner
from baton.proto.messages import Request, Role, Sampling
from baton.proto.settings import EngineSettings, SchedulerSettings
from baton.scheduler.plan import Emitted
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig

BAR, BAR_OF_LIMIT = 1.3, 0.85
BATCHES, PROMPTS = (1, 8, 32), (512, 2048)
DECODE_PROMPT, DECODE_OUTPUT = 128, 384
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Generation:
    """What both sides are asked for: so many sequences, all at once."""

    what: str
    batch: int
    prompt: int
    output: int

    @property
    def is_prefill(self) -> bool:
        return self.output == 1

    def tokens_per_s(self, times: Times) -> float:
        return self.batch * self.prompt / times.first_s if self.is_prefill else times.rest_tokens / times.rest_s


@dataclass(frozen=True, slots=True)
class Times:
    """Until every sequence has its first token, from there to the end, and the tokens of that second part."""

    first_s: float
    rest_s: float
    rest_tokens: int


Side = Callable[[Generation, int], Times]


def rows(options: Options) -> Iterator[Row]:
    options.pin_here()
    torch.set_num_threads(1)
    output = 8 if options.quick else DECODE_OUTPUT
    wanted = [Generation(f"decode, batch {batch}", batch, DECODE_PROMPT, output) for batch in BATCHES]
    wanted += [Generation(f"prefill, {length} tokens", 1, length, 1) for length in PROMPTS]
    runner = Runner(EngineSettings(model=options.model, threads=1, num_blocks=BATCHES[-1] * 40, block_size=BLOCK_SIZE))
    decoder = native_decoder(runner)
    with ExitStack() as stack:
        sides: dict[str, Side] = {"ours": lambda generation, seed: generate(runner, generation, seed)}
        if options.peers is not None:
            model = resolve_model(options.model)
            arguments = [str(model), str(OFFLINE_BUDGET), str(MAX_MODEL_LEN)]
            peer = stack.enter_context(script(options.peers, "peer_offline.py", arguments, options.core))

            def theirs(generation: Generation, seed: int) -> Times:
                question = {"batch": generation.batch, "prompt": generation.prompt, "output": generation.output}
                return Times(**peer.ask(question | {"seed": seed}))

            sides["theirs"] = theirs
        for generation in wanted:
            for side in sides.values():  # what is done for the first time takes longer
                side(Generation("", generation.batch, generation.prompt, min(generation.output, 4)), 0)
            found: dict[str, list[float]] = {"ours": [], "theirs": [], "limit": []}
            for number in range(options.rounds_or(3)):
                for name, side in sides.items():
                    found[name].append(generation.tokens_per_s(side(generation, number + 1)))
                num_rows = generation.prompt if generation.is_prefill else generation.batch
                found["limit"].append(limit(decoder, num_rows, time.perf_counter))
            ours = tuple(found["ours"])
            yield Row(
                "S1",
                generation.what,
                "tokens/s",
                (
                    Measure("vLLM", Better.MORE, BAR, ours, tuple(found["theirs"])),
                    Measure("limit", Better.MORE, BAR_OF_LIMIT, ours, tuple(found["limit"])),
                ),
            )


def generate(runner: Runner, generation: Generation, seed: int) -> Times:
    """The whole of a worker's step loop, without the wire: plan, run, commit."""
    settings = SchedulerSettings(max_num_batched_tokens=OFFLINE_BUDGET, prefix_cache=False)
    description = runner.description
    scheduler = Scheduler(
        SchedulerConfig(Role.COLOCATED, description.num_blocks, description.max_model_len, BLOCK_SIZE, settings)
    )
    rng = random.Random(seed)
    counts = {}
    for index in range(generation.batch):
        prompt = tuple(rng.randrange(100, 40_000) for _ in range(generation.prompt))
        sampling = Sampling(temperature=0.0, max_tokens=generation.output)
        outcome = scheduler.add(Request(str(index), prompt, len(prompt), sampling), 0.0)
        assert not isinstance(outcome, Refusal)
        counts[str(index)] = 0
    left = generation.batch
    began_s = ended_s = time.perf_counter()
    first_s, at_first = None, 0
    while left:
        step = scheduler.plan(0.0)
        for event in scheduler.commit(step, runner.run(step), 0.0):
            if isinstance(event, Emitted):
                counts[event.sequence.sequence_id] += 1
                left -= event.finish is not None
        ended_s = time.perf_counter()
        if first_s is None and all(counts.values()):
            first_s, at_first = ended_s, sum(counts.values())
    assert first_s is not None
    total = sum(counts.values())
    assert total == generation.batch * generation.output, f"{total} tokens came"
    return Times(first_s - began_s, ended_s - first_s, total - at_first)
