"""Speed and memory of the simulator: simulated requests a second of CPU time, and resident memory against their number.

    python benchmarks/simulator_speed.py [--requests 10000,50000,100000] [--large 20000] [--halves 100000] [--json OUT]

Workload `chat`, the estimate for Llama 3 8B on H100s. 4P4D and eight co-located workers at 60 % and at 95 % of what
four such prefill workers can do, then as many requests as asked for at 80 %, then 64P64D at 80 %. Each row is a process
of its own, one after the other, so that its memory is its own; arrivals are made while it runs and nothing is kept of a
request that has ended. Time is CPU time of the process, arrivals included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from baton.capacity import workload
from baton.capacity.cluster import ClusterSetup, PoolSetup
from baton.capacity.outcome import End, RequestOutcome
from baton.capacity.presets import estimate, preset
from baton.capacity.simulate import simulate
from baton.capacity.simulation import large_pages
from baton.proto.messages import Role
from baton.router.config import RouterSettings

PRESET = "llama-3-8b@h100"
RATE_OF_A_PREFILL_WORKER = 19.0
"""Requests a second of `chat` that one prefill worker of this kind can do, decode being half idle then."""


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    requests: int
    rate: float
    cpu_s: float
    requests_per_cpu_s: float
    simulated_s: float
    peak_rss_mib: float
    not_finished: int


def cluster(prefill: int, decode: int, colocated: int = 0) -> ClusterSetup:
    chosen = preset(PRESET)
    sizes = {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: colocated}
    pools = tuple(PoolSetup(role, size, chosen.num_blocks()) for role, size in sizes.items() if size)
    router = replace(RouterSettings(), max_queued_requests=1 << 20, max_queued_tokens=1 << 40)
    label = f"{prefill}P{decode}D" if prefill else f"{colocated} co-located"
    return ClusterSetup(label, pools, 8192, kv_bytes_per_token=chosen.shape.kv_bytes_per_token, router=router)


def measure(setup: ClusterSetup, rate: float, number: int) -> Row:
    not_finished = 0

    def add(outcome: RequestOutcome) -> None:
        nonlocal not_finished
        not_finished += outcome.end is not End.FINISHED

    cost = estimate(PRESET)
    start = time.process_time()
    result = simulate(setup, cost, islice(workload.arrivals("chat", rate, seed=1), number), seed=1, sink=add)
    cpu_s = time.process_time() - start
    peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Row(setup.label, number, rate, cpu_s, number / cpu_s, result.duration_s, peak_rss_mib, not_finished)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="10000,50000,100000")
    parser.add_argument("--large", type=int, default=20_000, help="requests to 64P64D; 0 leaves it out")
    parser.add_argument(
        "--halves", type=int, default=100_000, help="requests in two processes at once; 0: leave it out"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    four, eight = cluster(4, 4), cluster(0, 0, 8)
    full = 4 * RATE_OF_A_PREFILL_WORKER
    plan = [(setup, full * load, 10_000) for setup in (four, eight) for load in (0.6, 0.95)]
    plan += [(four, full * 0.8, int(number)) for number in arguments.requests.split(",")]
    if arguments.large:
        plan.append((cluster(64, 64), full * 16 * 0.8, arguments.large))
    rows = []
    if arguments.halves:
        halves = [(four, full * 0.8, arguments.halves // 2)] * 2
        began = time.monotonic()
        with large_pages(), multiprocessing.get_context("spawn").Pool(2) as processes:
            processes.starmap(measure, halves)
        print(
            f"{arguments.halves} requests to 4P4D in two processes at once: {time.monotonic() - began:.0f} s",
            flush=True,
        )
    print("| cluster | requests | offered/s | CPU s | requests per CPU s | simulated s | peak RSS MiB | not finished |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for work in plan:
        # A process for each row, started afresh: peak memory is what this row has needed.
        with large_pages(), multiprocessing.get_context("spawn").Pool(1) as process:
            row = process.apply(measure, work)
        rows.append(row)
        print(
            f"| {row.label} | {row.requests} | {row.rate:.0f} | {row.cpu_s:.1f} | {row.requests_per_cpu_s:.0f} | "
            f"{row.simulated_s:.0f} | {row.peak_rss_mib:.0f} | {row.not_finished} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
