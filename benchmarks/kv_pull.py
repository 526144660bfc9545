"""How fast a connector pulls KV from another process, beside the transport alone and beside a copy in memory.

Two processes, `--mib` MiB in blocks of the demo model (360 KiB), in runs of `--runs` blocks that are consecutive on
both sides. Each round measures every way once, so that a busy machine slows all of them; the table shows medians.

    pull    NixlConnector: pull() until SETTLED
    raw     one post of all blocks by an agent of its own, asked for its state without rest
    copy    numpy, both sides in this process

    python benchmarks/kv_pull.py [--transport tcp] [--checksums always] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from baton.kvtransfer.address import PoolAddress
from baton.kvtransfer.connector import Connector, KvPool, Pull, PullState, open_connector
from baton.kvtransfer.layout import coalesce, copy_runs
from baton.kvtransfer.nixl_agent import NixlAgent
from baton.proto.messages import KvGeometry
from baton.proto.settings import TransferSettings

DEMO = KvGeometry("demo", "1", "bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
BLOCK_SHAPE = (30, 3, 2, 16, 64)
START_WAIT_S = 60.0
PULL_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """In 10^9 bytes a second: each round's, and medians."""

    run_blocks: int
    pulls_gb_s: tuple[float, ...]
    raws_gb_s: tuple[float, ...]
    pull_gb_s: float
    raw_gb_s: float
    copy_gb_s: float
    one_block_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 16, 64], help="blocks in a run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", default="", help="UCX_TLS; empty lets UCX choose")
    parser.add_argument("--device", default="lo", help="UCX_NET_DEVICES")
    parser.add_argument("--checksums", default="off", choices=("off", "always"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = TransferSettings(
        connector="nixl", transport=options.transport, network_device=options.device, checksums=options.checksums
    )
    results = between_processes(settings, options.mib, options.runs, options.rounds)
    if options.json:
        figures = {"cores": os.cpu_count(), "mib": options.mib, "transport": options.transport}
        figures |= {"checksums": options.checksums, "results": [asdict(result) for result in results]}
        print(json.dumps(figures))
    else:
        show(results, options)


def between_processes(settings: TransferSettings, mib: int, runs: list[int], rounds: int) -> list[Result]:
    """From a process that is started for it."""
    num_blocks = max(1, (mib << 20) // block_bytes())
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    source = spawn.Process(target=lend, args=(theirs, settings, num_blocks), daemon=True)
    source.start()
    try:
        return measure(ours, settings, num_blocks, runs, rounds)
    finally:
        source.kill()
        source.join(START_WAIT_S)


def block_bytes() -> int:
    return int(np.prod(BLOCK_SHAPE)) * torch.bfloat16.itemsize


def lend(answer: Connection, settings: TransferSettings, num_blocks: int) -> None:
    """The source process: lends its whole pool until it is killed."""
    connector = open_connector(settings)
    pool = KvPool(torch.ones((num_blocks, *BLOCK_SHAPE), dtype=torch.bfloat16), DEMO)
    address = connector.attach(pool)
    answer.send((address, connector.export("all", tuple(range(num_blocks)))))
    while answer.poll(None):
        answer.send(connector.export("some", answer.recv()))


def measure(
    source: Connection, settings: TransferSettings, num_blocks: int, runs: list[int], rounds: int
) -> list[Result]:
    connector = open_connector(settings)
    pool = KvPool(torch.zeros((num_blocks, *BLOCK_SHAPE), dtype=torch.bfloat16), DEMO)
    connector.attach(pool)
    if not source.poll(START_WAIT_S):
        raise TimeoutError(f"the source process has not started within {START_WAIT_S} s")
    address, _ = source.recv()

    agent = NixlAgent("raw", settings)
    raw_pool = KvPool(torch.zeros_like(pool.tensor), DEMO)
    agent.register(raw_pool)
    link = agent.link(PoolAddress.decode(address))

    def pull(sources: tuple[int, ...], destinations: tuple[int, ...], crc: int) -> float:
        return pull_s(connector, Pull(next(numbers), "source", address, sources, destinations, crc))

    def raw(sources: tuple[int, ...], destinations: tuple[int, ...], crc: int) -> float:
        began = time.perf_counter()
        handle = agent.read(link, np.array(sources, np.int32), np.array(destinations, np.int32), raw_pool.block_bytes)
        while handle is not None and not agent.finished(handle, link):
            pass
        return time.perf_counter() - began

    def copy(sources: tuple[int, ...], destinations: tuple[int, ...], crc: int) -> float:
        began = time.perf_counter()
        copy_runs(raw_pool.tensor, pool.tensor, coalesce(sources, destinations))
        return time.perf_counter() - began

    numbers = iter(range(1 << 30))
    ways: dict[str, Callable[[tuple[int, ...], tuple[int, ...], int], float]] = {"pull": pull, "raw": raw, "copy": copy}
    results = []
    for run_blocks in runs:
        destinations = tuple(range(num_blocks))
        sources = shuffled_runs(num_blocks, run_blocks)
        source.send(sources)
        crc = source.recv()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, way in ways.items():
                seconds[name].append(way(sources, destinations, crc))
        if not bool((pool.tensor == 1).all()) or not bool((raw_pool.tensor == 1).all()):
            raise AssertionError("the bytes that have landed are not the source's")
        speeds = {
            name: tuple(num_blocks * block_bytes() / each_s / 1e9 for each_s in times[1:])
            for name, times in seconds.items()
        }
        medians = (statistics.median(speeds[name]) for name in ways)
        one_block = statistics.median(pull((0,), (0,), 0) for _ in range(20))
        results.append(Result(run_blocks, speeds["pull"], speeds["raw"], *medians, one_block * 1e3))
    agent.shutdown([link], [])
    connector.close()
    return results


def shuffled_runs(num_blocks: int, run_blocks: int) -> tuple[int, ...]:
    """All blocks, in runs whose order is shuffled."""
    starts = list(range(0, num_blocks, run_blocks))
    random.Random(run_blocks).shuffle(starts)
    return tuple(block for start in starts for block in range(start, min(start + run_blocks, num_blocks)))


def pull_s(connector: Connector, pull: Pull) -> float:
    """Seconds until the pull has settled, looking for it every 50 microseconds."""
    began = time.perf_counter()
    connector.pull(pull)
    while time.perf_counter() - began < PULL_WAIT_S:
        for event in connector.poll():
            if event.state is PullState.FAILED:
                raise RuntimeError(event.reason)
            if event.state is PullState.SETTLED:
                return time.perf_counter() - began
        time.sleep(50e-6)
    raise TimeoutError(f"pull {pull.pull_id} has not settled within {PULL_WAIT_S} s")


def show(results: list[Result], options: argparse.Namespace) -> None:
    print(
        f"{options.mib} MiB in blocks of {block_bytes() >> 10} KiB, UCX_TLS={options.transport or '(UCX chooses)'}, ",
        end="",
    )
    print(f"checksums {options.checksums}, GB/s")
    print(f"{'run':>5} {'pull':>7} {'raw':>7} {'copy':>7} {'pull/raw':>9} {'one block':>10}")
    for result in results:
        print(
            f"{result.run_blocks:5d} {result.pull_gb_s:7.2f} {result.raw_gb_s:7.2f} {result.copy_gb_s:7.2f} "
            f"{result.pull_gb_s / result.raw_gb_s:9.2f} {result.one_block_ms:7.2f} ms"
        )


if __name__ == "__main__":
    main()
