"""What one worker computes without a wire: tokens/s of decode and prefill, compiled kernels and torch side by side.

Owns: the table and its JSON. `python benchmarks/offline.py [--model M] [--threads N] [--rounds N]`. Each round runs
every case on both paths in turn, then measures the limits; figures are the best round's, from the CPU time of the
thread that computes, which other work on the machine blurs little. With more than one thread it is wall time.

Decode is a sequence's context from 128 to 512: the mean of steps at 128, 256, 384 and 512. Limits: for one row, the
weights' bytes over the speed at which this thread reads memory; for more, the step's matrix products alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from baton.engine.native import NativeDecoder
from baton.engine.runner import Runner
from baton.kernels.cpu.library import LayerWeights, Packed
from baton.kernels.cpu.pages import LargePages
from baton.proto.messages import Request, Sampling
from baton.proto.settings import EngineSettings
from baton.scheduler.plan import Chunk, Step
from baton.scheduler.sequence import Sequence

CONTEXTS = (128, 256, 384, 512)
BATCHES = (1, 8, 32)
PROMPTS = (512, 2048)
STEPS = 8
READ_BYTES = 512 << 20
BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    runners = {kind: _runner(options.model, options.threads, kind) for kind in ("native", "torch")}
    weights = native_decoder(runners["native"])
    best: dict[str, dict[str, float]] = {}

    def record(case: str, column: str, tokens_per_s: float) -> None:
        row = best.setdefault(case, {})
        row[column] = max(row.get(column, 0.0), tokens_per_s)

    for _ in range(options.rounds):
        for batch in BATCHES:
            for kind, runner in runners.items():
                seconds = [seconds_of_step(runner, [context] * batch, 1, STEPS, clock) for context in CONTEXTS]
                record(f"decode {batch}", kind, batch * len(CONTEXTS) / sum(seconds))
            record(f"decode {batch}", "limit", limit(weights, batch, clock))
        for length in PROMPTS:
            for kind, runner in runners.items():
                record(f"prefill {length}", kind, length / seconds_of_step(runner, [length], length, 1, clock))
            record(f"prefill {length}", "limit", limit(weights, length, clock))

    print(f"{'tokens/s':<14}{'native':>9}{'torch':>9}{'limit':>9}{'x torch':>9}{'of limit':>10}")
    for case, row in best.items():
        row["times_torch"] = row["native"] / row["torch"]
        row["of_limit"] = row["native"] / row["limit"]
        print(
            f"{case:<14}{row['native']:>9.0f}{row['torch']:>9.0f}{row['limit']:>9.0f}"
            f"{row['times_torch']:>9.2f}{row['of_limit']:>10.2f}"
        )
    result = {
        "model": options.model,
        "threads": options.threads,
        "rounds": options.rounds,
        "instructions": weights.cpu.instructions,
        "tokens_per_s": {case: {name: round(value, 3) for name, value in row.items()} for case, row in best.items()},
    }
    path = Path(__file__).parent / "results" / f"offline-{datetime.date.today()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(path)


def _runner(model: str, threads: int, kernels: str) -> Runner:
    num_blocks = max(BATCHES) * max(CONTEXTS) // BLOCK_SIZE
    runner = Runner(
        EngineSettings(model=model, threads=threads, num_blocks=num_blocks, block_size=BLOCK_SIZE, cpu_kernels=kernels)
    )
    runner.kv.normal_(generator=torch.Generator().manual_seed(0))
    return runner


def native_decoder(runner: Runner) -> NativeDecoder:
    """What computes the runner's steps. Ends the process where that is torch."""
    decoder = runner._decoder
    if not isinstance(decoder, NativeDecoder):
        raise SystemExit("the compiled kernels are not to be had here, see the log; there is nothing to compare")
    return decoder


def seconds_of_step(
    runner: Runner, contexts: list[int], num_tokens: int, steps: int, clock: Callable[[], float]
) -> float:
    """The fastest of some equal steps; each sequence has blocks of its own, in random order."""
    rng = random.Random(0)
    free = rng.sample(range(runner.description.num_blocks), runner.description.num_blocks)
    chunks = []
    for context in contexts:
        token_ids = tuple(rng.choices(range(runner.description.vocab_size), k=context))
        sequence = Sequence(Request("s", token_ids, context, Sampling(temperature=0.0)), 0, 0.0)
        sequence.block_ids = [free.pop() for _ in range(-(-context // BLOCK_SIZE))]
        chunks.append(Chunk(sequence, context - num_tokens, num_tokens, True))
    step = Step(0, chunks, num_tokens * len(contexts))
    return _fastest(lambda: runner.run(step), steps, clock)


def limit(decoder: NativeDecoder, rows: int, clock: Callable[[], float]) -> float:
    """Tokens/s if nothing but the weights were read (one row) or nothing but the products were computed."""
    cpu, layers = decoder.cpu, decoder.model.layers
    if rows == 1:
        weight_bytes = sum(w.data.nbytes for layer in layers for w, _ in _products(layer)) + decoder.head.data.nbytes
        memory = LargePages().take(READ_BYTES).view(torch.float32).fill_(1.0)
        return READ_BYTES / _fastest(memory.sum, STEPS, clock) / weight_bytes
    inputs = {w.depth: torch.randn(rows, w.depth).bfloat16() for w, _ in _products(layers[0])}

    def products() -> None:
        for layer in layers:
            for weight, bias in _products(layer):
                cpu.linear(inputs[weight.depth], weight, bias)
        scored = rows if rows in BATCHES else 1
        cpu.scores(inputs[decoder.head.depth][:scored], decoder.head, decoder.memory)

    return rows / _fastest(products, 2, clock)


def _products(layer: LayerWeights) -> tuple[tuple[Packed, torch.Tensor | None], ...]:
    return (layer.qkv, layer.output, layer.gate_up, layer.down)


def _fastest(call: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(times):
        start = clock()
        call()
        best = min(best, clock() - start)
    return best


if __name__ == "__main__":
    main()
