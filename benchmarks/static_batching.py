"""One worker against transformers on one core: 28 short and 4 long outputs, all asked for at once.

Owns: the table and its JSON. `python benchmarks/static_batching.py [--model M] [--short N] [--long N] [--rounds N]`.
Each round runs, in turn, the same 32 prompts through

    baton       this project's scheduler and runner: who has finished makes room, the step shrinks
    static      `generate` with the whole batch: every row is computed until the longest has finished
    continuous  `generate_batch`, transformers' own continuous batching over a paged cache

in the same process, on one thread, in the model's dtype, greedily. Tokens/s are those that were asked for over the wall
time from the first prompt token to the last output token. Figures are medians over rounds; `agree` is the share of
output tokens equal to those of `static`, where bf16 rounds differently from one batch to another.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import random
import statistics
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers

from baton.engine.checkpoint import resolve_model
from baton.engine.runner import Runner
from baton.proto.messages import Request, Role, Sampling
from baton.proto.settings import EngineSettings, SchedulerSettings
from baton.scheduler.plan import Emitted
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig

NUM_SHORT, NUM_LONG = 28, 4
BLOCK_SIZE = 16

Outputs = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--short", type=int, default=16, help="tokens of each short output")
    parser.add_argument("--long", type=int, default=384, help="tokens of each long output")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lengths, seconds, outputs = measure(options.model, options.prompt, options.short, options.long, options.rounds)
    print(f"{'':<12}{'tokens/s':>10}{'seconds':>10}{'spread':>8}{'baton is':>10}{'agree':>8}")
    rows = {}
    for way, times in seconds.items():
        pairs = zip(chain(*outputs[way]), chain(*outputs["static"]), strict=True)
        same = [ours == theirs for ours, theirs in pairs]
        rows[way] = {
            "tokens_per_s": round(sum(lengths) / statistics.median(times), 1),
            "seconds": [round(s, 2) for s in times],
            "times_baton": round(statistics.median(t / b for t, b in zip(times, seconds["baton"], strict=True)), 2),
            "agree": round(sum(same) / len(same), 3),
        }
        print(
            f"{way:<12}{rows[way]['tokens_per_s']:>10}{statistics.median(times):>10.2f}"
            f"{(max(times) - min(times)) / statistics.median(times):>8.0%}"
            f"{rows[way]['times_baton']:>9}x{rows[way]['agree']:>8}"
        )
    result = {**vars(options), "num_short": NUM_SHORT, "num_long": NUM_LONG, "ways": rows}
    path = Path(__file__).parent / "results" / f"static-batching-{datetime.date.today()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(path)


def measure(
    model_name: str, prompt: int, short: int, long: int, rounds: int
) -> tuple[list[int], dict[str, list[float]], dict[str, Outputs]]:
    """The output lengths, and each way's seconds by round and outputs of the last round."""
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40_000) for _ in range(prompt)] for _ in range(NUM_SHORT + NUM_LONG)]
    lengths = [short] * NUM_SHORT + [long] * NUM_LONG
    rng.shuffle(lengths)
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(model_name), dtype="auto")
    runner = Runner(EngineSettings(model=model_name, threads=1, num_blocks=2048, block_size=BLOCK_SIZE))
    ways: dict[str, Callable[[], Outputs]] = {
        "baton": lambda: _baton(runner, prompts, lengths),
        "static": lambda: _static(model, prompts, lengths),
        "continuous": lambda: _continuous(model, prompts, lengths),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    outputs: dict[str, Outputs] = {}
    for _ in range(rounds):
        for way, run in ways.items():
            start = time.perf_counter()
            outputs[way] = run()
            seconds[way].append(time.perf_counter() - start)
            assert list(map(len, outputs[way])) == lengths, f"{way} gave outputs of other lengths than asked for"
    return lengths, seconds, outputs


def _baton(runner: Runner, prompts: Outputs, lengths: list[int]) -> Outputs:
    settings = SchedulerSettings(prefix_cache=False)
    config = SchedulerConfig(
        Role.COLOCATED, runner.description.num_blocks, runner.description.max_model_len, BLOCK_SIZE, settings
    )
    scheduler = Scheduler(config)
    outputs: dict[str, list[int]] = {}
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = Sampling(temperature=0.0, max_tokens=length)
        outcome = scheduler.add(Request(str(index), tuple(prompt), len(prompt), sampling), 0.0)
        assert not isinstance(outcome, Refusal)
        outputs[str(index)] = []
    left = len(prompts)
    while left:
        step = scheduler.plan(0.0)
        for event in scheduler.commit(step, runner.run(step), 0.0):
            if isinstance(event, Emitted):
                outputs[event.sequence.sequence_id].append(event.token_id)
                left -= event.finish is not None
    return list(outputs.values())


def _static(model: Any, prompts: Outputs, lengths: list[int]) -> Outputs:
    """Prompts are equally long, so no padding is lost: what is lost is all that follows a short output's end."""
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max(lengths),
        min_new_tokens=max(lengths),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [row[len(prompts[0]) :][:length].tolist() for row, length in zip(out, lengths, strict=True)]


def _continuous(model: Any, prompts: Outputs, lengths: list[int]) -> Outputs:
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048, use_cuda_graph=False)
    outputs: Outputs = [[] for _ in prompts]
    with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as manager:
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            manager.add_request(prompt, request_id=str(index), max_new_tokens=length, eos_token_id=-1)
        left = len(prompts)
        while left:
            result = manager.get_result(timeout=120)
            assert result is not None, "transformers' continuous batching gave nothing for two minutes"
            if result.is_finished():
                outputs[int(result.request_id)] = list(result.generated_tokens)
                left -= 1
    return outputs


if __name__ == "__main__":
    main()
