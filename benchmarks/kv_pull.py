"""How fast a connector pulls KV from another process, beside the transport alone and beside a copy in memory.

Two processes, `--mib` MiB in blocks of the demo model (360 KiB), in runs of `--runs` blocks that are consecutive on
both sides. Each round measures every way once, so that a busy machine slows all of them; the table shows medians.

    pull    the connector: pull() until SETTLED
    raw     nixl: one post of all blocks by an agent of its own, asked for its state without rest
            nccl: as many bytes over a gloo group of its own, in messages of 4 MiB, from one place to one place
    copy    both sides in this process: numpy; on a GPU one copy of all blocks

    python benchmarks/kv_pull.py [--connector nccl] [--transport tcp] [--checksums always] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed

from baton.kernels.cpu.pages import large_pages
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


@dataclass(frozen=True, slots=True)
class Export:
    """Asks the source process for a checksum."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Meet:
    """Tells the source process where the other end of its bare gloo group is."""

    port: int


@dataclass(frozen=True, slots=True)
class Send:
    """Makes the source process send over the bare gloo group."""

    num_bytes: int


class RawNixl:
    """An agent without a connector."""

    def __init__(self, settings: TransferSettings, pool: KvPool, address: bytes) -> None:
        self.pool = pool
        self._agent = NixlAgent("raw", settings)
        self._agent.register(pool)
        self._link = self._agent.link(PoolAddress.decode(address))

    def move(self, sources: tuple[int, ...], destinations: tuple[int, ...]) -> None:
        blocks = np.array(sources, np.int32), np.array(destinations, np.int32)
        handle = self._agent.read(self._link, *blocks, self.pool.block_bytes)
        while handle is not None and not self._agent.finished(handle, self._link):
            pass

    def close(self) -> None:
        self._agent.shutdown([self._link], [])


class BareGloo:
    """One end of a gloo group: rank 0 sends, rank 1 receives. With port 0 it opens the store where both meet."""

    def __init__(self, port: int, rank: int) -> None:
        distributed: Any = torch.distributed
        limit = timedelta(seconds=PULL_WAIT_S)
        self._rank = rank
        self._store = distributed.TCPStore("127.0.0.1", port, None, port == 0, limit, wait_for_workers=False)
        self._buffer = torch.ones(4 << 20, dtype=torch.uint8)
        self._group: Any = None
        if rank == 0:
            self.meet()

    @property
    def port(self) -> int:
        return int(self._store.port)

    def meet(self) -> None:
        distributed: Any = torch.distributed
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = distributed.ProcessGroupGloo(self._store, self._rank, 2, options)

    def move(self, num_bytes: int) -> None:
        """Two messages are under way at a time, as one cannot be announced while another is copied."""
        act, works = (self._group.send if self._rank == 0 else self._group.recv), deque[Any]()
        for left in range(num_bytes, 0, -len(self._buffer)):
            works.append(act([self._buffer[:left]], 1 - self._rank, 0))
            if len(works) == 2:
                works.popleft().wait()
        for work in works:
            work.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 16, 64], help="blocks in a run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--connector", default="nixl", choices=("nixl", "nccl"))
    parser.add_argument("--transport", default="", help="UCX_TLS for nixl; empty lets UCX choose")
    parser.add_argument("--device", default="lo", help="UCX_NET_DEVICES, or an interface for nccl")
    parser.add_argument("--checksums", default="off", choices=("off", "always"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = TransferSettings(
        connector=options.connector,
        transport=options.transport,
        network_device=options.device,
        checksums=options.checksums,
    )
    results = between_processes(settings, options.mib, options.runs, options.rounds)
    if options.json:
        figures = {
            "cores": os.cpu_count(),
            "mib": options.mib,
            "connector": options.connector,
            "transport": options.transport,
        }
        figures |= {"checksums": options.checksums, "results": [asdict(result) for result in results]}
        print(json.dumps(figures))
    else:
        show(results, options)


def between_processes(
    settings: TransferSettings, mib: int, runs: list[int], rounds: int, device: str = "cpu"
) -> list[Result]:
    """From a process that is started for it; both pools lie on the device."""
    num_blocks = max(1, (mib << 20) // block_bytes())
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    source = spawn.Process(target=lend, args=(theirs, settings, num_blocks, device), daemon=True)
    source.start()
    try:
        return measure(ours, settings, num_blocks, runs, rounds, device)
    finally:
        source.kill()
        source.join(START_WAIT_S)


def block_bytes() -> int:
    return int(np.prod(BLOCK_SHAPE)) * torch.bfloat16.itemsize


def _memory(num_blocks: int, device: str) -> torch.Tensor:
    """Zeros as workers have them: on a CPU in large pages."""
    if device != "cpu":
        return torch.zeros((num_blocks, *BLOCK_SHAPE), dtype=torch.bfloat16, device=device)
    return large_pages(num_blocks * block_bytes()).view(torch.bfloat16).view(-1, *BLOCK_SHAPE)


def lend(answer: Connection, settings: TransferSettings, num_blocks: int, device: str) -> None:
    """The source process: lends its whole pool until it is killed."""
    connector = open_connector(settings)
    pool = KvPool(_memory(num_blocks, device).fill_(1.0), DEMO)
    address = connector.attach(pool)
    answer.send((address, connector.export("all", tuple(range(num_blocks)))))
    raw: BareGloo | None = None
    while answer.poll(None):
        match answer.recv():
            case Meet(port):
                raw = BareGloo(port, rank=0)
            case Send(num_bytes) if raw is not None:
                raw.move(num_bytes)
            case Export(block_ids):
                answer.send(connector.export("some", block_ids))


def measure(
    source: Connection, settings: TransferSettings, num_blocks: int, runs: list[int], rounds: int, device: str
) -> list[Result]:
    connector = open_connector(settings)
    pool = KvPool(_memory(num_blocks, device), DEMO)
    connector.attach(pool)
    if not source.poll(START_WAIT_S):
        raise TimeoutError(f"the source process has not started within {START_WAIT_S} s")
    address, _ = source.recv()

    raw_pool = KvPool(_memory(num_blocks, device), DEMO)
    nixl = RawNixl(settings, raw_pool, address) if settings.connector == "nixl" else None
    gloo = BareGloo(0, rank=1) if nixl is None else None
    if gloo is not None:
        source.send(Meet(gloo.port))
        gloo.meet()

    def pull(sources: tuple[int, ...], destinations: tuple[int, ...], crc: int) -> float:
        return pull_s(connector, Pull(next(numbers), "source", address, sources, destinations, crc))

    def raw(sources: tuple[int, ...], destinations: tuple[int, ...], crc: int) -> float:
        began = time.perf_counter()
        if nixl is not None:
            nixl.move(sources, destinations)
        if gloo is not None:
            source.send(Send(num_blocks * block_bytes()))
            gloo.move(num_blocks * block_bytes())
        return time.perf_counter() - began

    def copy(sources: tuple[int, ...], destinations: tuple[int, ...], crc: int) -> float:
        began = time.perf_counter()
        if device == "cpu":
            copy_runs(raw_pool.tensor, pool.tensor, coalesce(sources, destinations))
        else:
            pool.tensor.copy_(raw_pool.tensor)
            torch.cuda.synchronize()
        return time.perf_counter() - began

    numbers = iter(range(1 << 30))
    ways: dict[str, Callable[[tuple[int, ...], tuple[int, ...], int], float]] = {"pull": pull, "raw": raw, "copy": copy}
    results = []
    for run_blocks in runs:
        destinations = tuple(range(num_blocks))
        sources = shuffled_runs(num_blocks, run_blocks)
        source.send(Export(sources))
        crc = source.recv()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        pool.tensor.zero_()
        pull(sources, destinations, crc)
        if not bool((pool.tensor == 1).all()):
            raise AssertionError("the bytes that have landed are not the source's")
        for _ in range(rounds + 1):
            for name, way in ways.items():
                seconds[name].append(way(sources, destinations, crc))
        landed = [pool.tensor, *([nixl.pool.tensor] if nixl is not None else [])]
        if not all(bool((tensor == 1).all()) for tensor in landed):
            raise AssertionError("the bytes that have landed are not the source's")
        speeds = {
            name: tuple(num_blocks * block_bytes() / each_s / 1e9 for each_s in times[1:])
            for name, times in seconds.items()
        }
        medians = (statistics.median(speeds[name]) for name in ways)
        one_block = statistics.median(pull((0,), (0,), 0) for _ in range(20))
        results.append(Result(run_blocks, speeds["pull"], speeds["raw"], *medians, one_block * 1e3))
    if nixl is not None:
        nixl.close()
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
    lane = f"nixl, UCX_TLS={options.transport or '(UCX chooses)'}" if options.connector == "nixl" else "nccl (gloo)"
    print(f"{options.mib} MiB in blocks of {block_bytes() >> 10} KiB, {lane}, checksums {options.checksums}, GB/s")
    print(f"{'run':>5} {'pull':>7} {'raw':>7} {'copy':>7} {'pull/raw':>9} {'one block':>10}")
    for result in results:
        print(
            f"{result.run_blocks:5d} {result.pull_gb_s:7.2f} {result.raw_gb_s:7.2f} {result.copy_gb_s:7.2f} "
            f"{result.pull_gb_s / result.raw_gb_s:9.2f} {result.one_block_ms:7.2f} ms"
        )


if __name__ == "__main__":
    main()
