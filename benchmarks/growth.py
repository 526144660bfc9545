"""How costs grow: a plan with the waiting queue, a step with the batch and with the context.

Owns: the table, its JSON and its plot. `python benchmarks/growth.py [--model M] [--plot]`; `--plot` needs matplotlib.

    waiting   the scheduler alone with 64 running and 100 to 100,000 waiting: plan + commit, load report, add, abort
    batch     one decode step of the model at context 256, 1 to 128 sequences
    context   one decode step of 8 sequences, each with 64 to 7,680 tokens before it
    prefill   one step that computes a whole prompt of 64 to 4,096 tokens
    memory    what 8 sequences with 64 to 7,680 tokens hold: KV in blocks, and the scheduler's own Python objects

The last column of each part is the exponent between that row and the one above: time ~ x^exponent, so 0 is flat, 1 is
linear, and a knee is a row whose exponent jumps. Times are CPU time of one thread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from offline import seconds_of_step

from baton.engine.runner import Runner
from baton.proto.messages import Request, Role, Sampling
from baton.proto.settings import EngineSettings, SchedulerSettings
from baton.scheduler.plan import Emitted, StepResult
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig

WAITING = (100, 1_000, 10_000, 100_000)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 7680)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096)
PARTS = {"waiting": WAITING, "batch": BATCHES, "context": CONTEXTS, "prefill": PROMPTS, "memory": CONTEXTS}
SEQUENCES = 8
RUNNING, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 257, 32
BLOCK_SIZE = 16

Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--plot", action="store_true", help="also draw it, beside the JSON")
    options = parser.parse_args()
    runner = open_runner(options.model)
    parts = {part: [measure(runner, part, x) for x in points] for part, points in PARTS.items()}
    for rows in parts.values():
        print("".join(f"{name:>14}" for name in (*rows[0], "exponent")))
        for row, growth in zip(rows, _exponents(rows), strict=True):
            print("".join(f"{value:>14.4g}" for value in row.values()) + f"{growth:>14.2f}")
    path = Path(__file__).parent / "results" / f"growth-{datetime.date.today()}.json"
    path.write_text(json.dumps({"model": options.model, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    print(path)
    if options.plot:
        plot(parts, path.with_suffix(".png"))


def open_runner(model: str) -> Runner:
    """With blocks for the largest batch and the longest contexts."""
    blocks = max(SEQUENCES * (max(CONTEXTS) + BLOCK_SIZE), max(BATCHES) * 512) // BLOCK_SIZE + 64
    return Runner(EngineSettings(model=model, threads=1, num_blocks=blocks, block_size=BLOCK_SIZE))


def measure(runner: Runner, part: str, x: int) -> Row:
    """One point of one part: `x`, then its figures."""
    match part:
        case "waiting":
            return _waiting(x)
        case "batch":
            return _step(runner, part, x, [256] * x, 1)
        case "context":
            return _step(runner, part, x, [x + 1] * SEQUENCES, 1)
        case "prefill":
            return _step(runner, part, x, [x], x)
        case "memory":
            return _memory(runner.kv.nbytes // runner.description.num_blocks, x)
    raise ValueError(f"no part is called {part!r}: {', '.join(PARTS)}")


def exponent(low: Row, high: Row, column: str) -> float:
    """Of the figure's growth from one row to another: time ~ x^exponent."""
    x = next(iter(low))
    return math.log(high[column] / low[column]) / math.log(high[x] / low[x])


def _exponents(rows: list[Row]) -> Iterator[float]:
    """Of the part's main figure, its second column."""
    column = list(rows[0])[1]
    yield math.nan
    yield from (exponent(low, high, column) for low, high in pairwise(rows))


def _memory(block_bytes: int, context: int) -> Row:
    settings = SchedulerSettings(max_num_batched_tokens=2048, max_num_seqs=SEQUENCES)
    rng = random.Random(context)
    prompts = [tuple(rng.choices(range(40_000), k=context)) for _ in range(SEQUENCES)]
    tracemalloc.start()
    try:
        scheduler = Scheduler(SchedulerConfig(Role.COLOCATED, 8000, 8192, BLOCK_SIZE, settings))
        empty, _ = tracemalloc.get_traced_memory()
        for number, prompt in enumerate(prompts):
            request = Request(str(number), prompt, context, Sampling(temperature=0.0, max_tokens=256))
            assert not isinstance(scheduler.add(request, 0.0), Refusal)
        while scheduler.load().queued_tokens:
            step = scheduler.plan(0.0)
            scheduler.commit(step, StepResult([7] * len(step.chunks)), 0.0)
        held = scheduler.load().held_blocks
        own, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return {"memory": context, "KV MiB": held * block_bytes / 2**20, "scheduler KiB": (own - empty) / 2**10}


def _waiting(num_waiting: int) -> Row:
    settings = SchedulerSettings(max_num_batched_tokens=2048, max_num_seqs=RUNNING)
    scheduler = Scheduler(SchedulerConfig(Role.COLOCATED, 4000, 8192, BLOCK_SIZE, settings))
    rng = random.Random(0)
    tail = tuple(rng.randrange(40_000) for _ in range(PROMPT_TOKENS - 1))
    num_added = 0

    def add() -> None:
        nonlocal num_added
        prompt = (num_added % 40_000, *tail)
        request = Request(str(num_added), prompt, len(prompt), Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS))
        assert not isinstance(scheduler.add(request, 0.0), Refusal)
        num_added += 1

    adds = [_seconds(add) for _ in range(num_waiting + RUNNING)]
    steps, loads = [], []
    for _ in range(300):
        start = time.thread_time()
        step = scheduler.plan(0.0)
        events = scheduler.commit(step, StepResult([7] * len(step.chunks)), 0.0)
        steps.append(time.thread_time() - start)
        loads.append(_seconds(scheduler.load))
        for event in events:
            if isinstance(event, Emitted) and event.finish is not None:
                add()
    assert scheduler.load().waiting >= num_waiting
    aborts = [_seconds(lambda name=str(name): scheduler.abort(name, 0.0)) for name in range(num_added - 50, num_added)]
    return {
        "waiting": num_waiting,
        "step us": 1e6 * statistics.median(steps[50:]),
        "load us": 1e6 * statistics.median(loads[50:]),
        "add us": 1e6 * statistics.median(adds[-1000:]),
        "abort us": 1e6 * statistics.median(aborts),
    }


def _step(runner: Runner, name: str, x: int, contexts: list[int], num_tokens: int) -> Row:
    times = 3 if num_tokens > 1 else 6
    step_ms = 1e3 * seconds_of_step(runner, contexts, num_tokens, times, time.thread_time)
    return {name: x, "step ms": step_ms, "us a token": 1e3 * step_ms / (num_tokens * len(contexts))}


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def plot(parts: dict[str, list[Row]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("a plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(parts), figsize=(4 * len(parts), 3.6), layout="constrained")
    labels = {
        "waiting": "sequences waiting",
        "batch": "sequences that decode, context 256",
        "context": "context of each of 8 sequences, tokens",
        "prefill": "prompt tokens in one step",
        "memory": "context of each of 8 sequences, tokens",
    }
    for axis, (part, rows) in zip(axes, parts.items(), strict=True):
        x = [row[part] for row in rows]
        columns = [name for name in rows[0] if name not in (part, "us a token")]
        for column in columns:
            axis.plot(x, [row[column] for row in rows], marker="o", label=column)
        axis.set(xscale="log", yscale="log", xlabel=labels[part], title=f"{part}: {', '.join(columns)}")
        axis.grid(alpha=0.3, which="both")
        if len(columns) > 1:
            axis.legend()
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()
