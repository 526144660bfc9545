"""Speed of the scheduler alone: plan and commit, no model.

    PYTHONPATH=src python benchmarks/scheduler_speed.py [--running 64,256,1024] [--steps 400] [--json OUT]

Scenarios, all with prompts of 512 random tokens, a budget of 2048 tokens, blocks of 16 and the prefix cache on:
    decode   N sequences with their prompts computed; each step yields one token for each.
    mixed    N running, 64 output tokens each; whenever one finishes, a new one is added.
    shared   like mixed, but 448 of the 512 prompt tokens are one of 8 shared prefixes.
    add      constructing the request and adding it, in the last two.
Time is CPU time of the process; a figure is the median over windows of 20 steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass

from baton.proto.messages import Request, Role, Sampling
from baton.proto.settings import SchedulerSettings
from baton.scheduler.plan import Emitted, Step, StepResult
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig

PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS, BUDGET, BLOCK_SIZE, NUM_BLOCKS = 512, 448, 64, 2048, 16, 100_000
WINDOW = 20


@dataclass(frozen=True)
class Figures:
    """Microseconds of one scenario."""

    scenario: str
    running: int
    plan_us: float
    commit_us: float
    step_us: float
    sequences_a_step: float
    tokens_a_step: float
    us_a_sequence: float
    add_us: float | None


class Drive:
    """One scheduler, a supply of requests and a stand-in for the model."""

    def __init__(self, scenario: str, running: int, seed: int) -> None:
        self._scenario = scenario
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(8)]
        settings = SchedulerSettings(max_num_batched_tokens=max(BUDGET, running), max_num_seqs=running)
        self.scheduler = Scheduler(SchedulerConfig(Role.COLOCATED, NUM_BLOCKS, 8192, BLOCK_SIZE, settings))
        self.add_s: list[float] = []
        for _ in range(running):
            self.add()

    def add(self) -> None:
        if self._scenario == "shared":
            prompt = self._random.choice(self._prefixes) + self._tokens(PROMPT_TOKENS - SHARED_TOKENS)
        else:
            prompt = self._tokens(PROMPT_TOKENS)
        max_tokens = 7000 if self._scenario == "decode" else OUTPUT_TOKENS
        start = time.process_time()
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
        request = Request(f"sequence-{len(self.add_s)}", tuple(prompt), len(prompt), sampling)
        outcome = self.scheduler.add(request, 0.0)
        self.add_s.append(time.process_time() - start)
        assert not isinstance(outcome, Refusal)

    def step(self) -> tuple[Step, list[float]]:
        """One step, and the seconds of its plan and of its commit. Finished sequences are replaced."""
        scheduler = self.scheduler
        start = time.process_time()
        step = scheduler.plan(0.0)
        planned = time.process_time()
        result = StepResult([7 + i % 1000 if chunk.samples else -1 for i, chunk in enumerate(step.chunks)])
        computed = time.process_time()
        events = scheduler.commit(step, result, 0.0)
        committed = time.process_time()
        for event in events:
            if isinstance(event, Emitted) and event.finish is not None:
                self.add()
        return step, [planned - start, committed - computed]

    def warm_up(self, running: int) -> None:
        if self._scenario == "decode":
            while len(chunks := self.step()[0].chunks) < running or any(chunk.num_tokens > 1 for chunk in chunks):
                pass
        for _ in range(10 if self._scenario == "decode" else 150):
            self.step()

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(100, 40_000) for _ in range(num_tokens)]


def measure(scenario: str, running: int, num_steps: int, seed: int) -> Figures:
    drive = Drive(scenario, running, seed)
    drive.warm_up(running)
    gc.collect()
    gc.freeze()
    drive.add_s.clear()
    steps, times = zip(*(drive.step() for _ in range(num_steps)), strict=True)
    gc.unfreeze()
    plan_us = _median_of_windows([1e6 * plan_s for plan_s, _ in times])
    commit_us = _median_of_windows([1e6 * commit_s for _, commit_s in times])
    step_us = _median_of_windows([1e6 * sum(both) for both in times])
    sequences = _median_of_windows([float(len(step.chunks)) for step in steps])
    return Figures(
        scenario=scenario,
        running=running,
        plan_us=plan_us,
        commit_us=commit_us,
        step_us=step_us,
        sequences_a_step=sequences,
        tokens_a_step=sum(step.num_tokens for step in steps) / num_steps,
        us_a_sequence=step_us / sequences,
        add_us=1e6 * statistics.median(drive.add_s) if drive.add_s else None,
    )


def _median_of_windows(values: list[float]) -> float:
    windows = [values[first : first + WINDOW] for first in range(0, len(values) - WINDOW + 1, WINDOW)]
    return statistics.median(sum(window) / WINDOW for window in windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="64,256,1024")
    parser.add_argument("--scenarios", default="decode,mixed,shared")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file too")
    arguments = parser.parse_args()
    figures = []
    print("| scenario | plan us | commit us | step us | sequences/step | tokens/step | us/sequence | add us |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for scenario in arguments.scenarios.split(","):
        for running in map(int, arguments.running.split(",")):
            num_steps = arguments.steps if running < 1000 else max(100, arguments.steps // 4)
            runs = [measure(scenario, running, num_steps, seed) for seed in range(arguments.repeats)]
            row = sorted(runs, key=lambda run: run.step_us)[len(runs) // 2]
            figures.append(asdict(row))
            add = f"{row.add_us:.0f}" if row.add_us is not None else "-"
            print(
                f"| {scenario}-{running} | {row.plan_us:.0f} | {row.commit_us:.0f} | {row.step_us:.0f} | "
                f"{row.sequences_a_step:.0f} | {row.tokens_a_step:.0f} | {row.us_a_sequence:.2f} | {add} |",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
