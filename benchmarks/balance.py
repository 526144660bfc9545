"""TTFT under two placement policies on the same arrivals: does looking at queues keep the slowest requests short?

    python benchmarks/balance.py [--load 0.8] [--requests 300 | --duration 120] [--repeats 3] [--json OUT]

Workload `chat` with all lengths times 0.1, Poisson arrivals, on a real cluster (2 prefill, 2 decode, demo model, one
thread a worker). First a saturated run measures how many requests a second the cluster can finish; the runs then offer
`--load` of that. Policies alternate (A B A B A B); within a repeat each gets the same arrivals, prompts and seeds. Each
run has a cluster of its own, so that nothing is in a cache, and a few requests to warm it up.

The figure is the ratio of the first policy's p99 TTFT to that of each other, one a repeat, and their median. All
processes share the machine's cores, the client's among them: a worker that has nothing to do leaves its core to the
others, which makes up for a part of a bad choice. On machines of their own the policies differ more
(benchmarks/virtual.py).

Owns: the order of the runs and what is compared. Measuring is `baton.client.bench`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from clusters import RESULTS, Machine, local_ray, model_directory, running, shape

from baton.capacity import workload
from baton.client import bench
from baton.client.servers import GrpcServer
from baton.router.placement import POLICIES

SCALE_LENGTHS = 0.1
TIMEOUT_S = 300.0
NUM_WARM_UP = 8
WARM_UP_SEED, CAPACITY_SEED = 900_001, 900_002


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one set of arrivals."""

    policy: str
    repeat: int
    load_average: float
    report: bench.Report
    ttft_s: list[float]

    @property
    def ttft(self) -> bench.Distribution:
        assert self.report.ttft is not None
        return self.report.ttft


class Rig:
    """Clusters of one shape, one after the other, each under a policy of its own."""

    def __init__(self, model: str, arguments: argparse.Namespace) -> None:
        self._model = model
        self._arguments = arguments

    @contextmanager
    def _cluster(self, policy: str) -> Iterator[str]:
        arguments = self._arguments
        config = shape(
            self._model,
            arguments.prefill,
            arguments.decode,
            dtype="bfloat16",
            budget=arguments.budget,
            policy=policy,
        )
        with running(config) as address:
            asyncio.run(_measure(address, _plan(NUM_WARM_UP, math.inf, WARM_UP_SEED), WARM_UP_SEED, 4))
            yield address

    def capacity(self) -> float:
        """Requests a second of a saturated cluster, between the first and the last fifth of the ends."""
        plan = _plan(self._arguments.capacity_requests, math.inf, CAPACITY_SEED)
        with self._cluster(self._arguments.policies[0]) as address:
            samples = asyncio.run(_measure(address, plan, CAPACITY_SEED, self._arguments.concurrency)).samples
        ends = sorted(sample.ended_s for sample in samples if not sample.error)
        first, last = len(ends) // 5, len(ends) * 4 // 5
        return (last - first) / (ends[last] - ends[first])

    def run(self, policy: str, repeat: int, num_requests: int, rate: float) -> Run:
        with self._cluster(policy) as address:
            before = Machine.now().load_average[0]
            measured = asyncio.run(_measure(address, _plan(num_requests, rate, repeat), repeat, None))
        report = bench.summarize(measured.work, measured.samples, bench.Objectives())
        ttft_s = [sample.ttft_s for sample in measured.samples if not sample.error]
        return Run(policy, repeat, before, report, ttft_s)


@dataclass(frozen=True, slots=True)
class _Measured:
    work: list[bench.Job]
    samples: list[bench.Sample]


def _plan(num_requests: int, rate: float, seed: int) -> list[workload.Arrival]:
    return workload.requests("chat", num_requests, rate, seed, SCALE_LENGTHS)


async def _measure(address: str, plan: Sequence[workload.Arrival], seed: int, concurrency: int | None) -> _Measured:
    server = GrpcServer(address, None, TIMEOUT_S)
    try:
        work = bench.jobs(plan, await server.model(), seed)
        return _Measured(work, await bench.run(server, work, concurrency=concurrency, seed=seed))
    finally:
        await server.close()


def ratios(runs: Sequence[Run], policy: str, other: str) -> list[float]:
    """p99 TTFT of `policy` over that of `other`, one a repeat."""
    p99 = {(run.policy, run.repeat): run.ttft.p99 for run in runs}
    repeats = sorted({run.repeat for run in runs})
    return [p99[policy, repeat] / p99[other, repeat] for repeat in repeats]


def _show(run: Run) -> None:
    ttft = run.ttft
    print(
        f"| {run.policy} | {run.repeat} | {1e3 * ttft.p50:.0f} | {1e3 * ttft.p90:.0f} | {1e3 * ttft.p99:.0f} | "
        f"{run.report.num_finished} of {run.report.num_requests} | {run.report.requests_per_s:.2f} | "
        f"{run.load_average:.1f} |",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="in each run")
    parser.add_argument("--duration", type=float, help="seconds of arrivals in each run, instead of --requests")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.8, help="share of the measured capacity")
    parser.add_argument("--rate", type=float, help="requests a second, instead of measuring the capacity")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["queue_depth", "round_robin"])
    parser.add_argument("--capacity-requests", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=32, help="of the run that measures the capacity")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--budget", type=int, default=2048, help="max_num_batched_tokens of every worker")
    parser.add_argument("--model", default="demo", help="tiny, demo, a directory or a Hugging Face id")
    parser.add_argument("--json", type=Path, default=RESULTS / "balance.json")
    arguments = parser.parse_args()
    before = Machine.now()
    num_processes = arguments.prefill + arguments.decode
    print(f"{num_processes} workers, router and client share {before}", flush=True)
    runs: list[Run] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        model_directory(arguments.model, Path(directory)) as model,
        local_ray(),
    ):
        rig = Rig(model, arguments)
        capacity = rig.capacity() if arguments.rate is None else None
        rate = arguments.rate if capacity is None else arguments.load * capacity
        num_requests = arguments.requests if arguments.duration is None else max(round(arguments.duration * rate), 1)
        known = f"capacity {capacity:.2f}/s, " if capacity is not None else ""
        print(f"{known}offered {rate:.2f}/s, {num_requests} requests a run\n")
        print("| policy | repeat | TTFT p50 ms | p90 | p99 | finished | per s | load average |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for repeat in range(1, arguments.repeats + 1):
            for policy in arguments.policies:
                runs.append(rig.run(policy, repeat, num_requests, rate))
                _show(runs[-1])
    first, *others = arguments.policies
    compared = {other: ratios(runs, first, other) for other in others}
    print()
    for other, values in compared.items():
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"p99 TTFT {first} / {other}: median {statistics.median(values):.2f}  ({each})")
    print(f"after: {Machine.now()}")
    content = {
        "settings": {name: value for name, value in vars(arguments).items() if name != "json"},
        "machine": {"before": asdict(before), "after": asdict(Machine.now())},
        "capacity_per_s": capacity,
        "rate_per_s": rate,
        "p99_ttft_ratio": {
            f"{first}/{other}": {"median": statistics.median(values), "repeats": values}
            for other, values in compared.items()
        },
        "runs": [asdict(run) for run in runs],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"written to {arguments.json}")
    return 0 if all(run.report.num_finished == run.report.num_requests for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
