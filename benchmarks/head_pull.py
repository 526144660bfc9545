"""What it costs to hand KV off between workers whose heads are split over other numbers of ranks.

    python benchmarks/head_pull.py [--blocks 32] [--rounds 9] [--json]

Pools of 8B-shaped blocks (32 layers, 8 KV heads, 16 tokens, bf16: 2 MiB a block) in this process, one NIXL agent a
rank, one sharded connector a worker. Each line is the median pull of all blocks in shuffled runs of 8, timed from the
call to the last event; the pieces are what the connectors ask NIXL for before neighbours are merged. Equal numbers of
ranks move whole blocks. Ranks share this process's cores, so more of them are not faster here: compare bytes a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from kv_pull import shuffled_runs

from baton.kvtransfer.connector import KvPool, Pull, PullState, open_connector
from baton.kvtransfer.layout import HeadCut, head_map
from baton.kvtransfer.sharded import ShardedConnector
from baton.proto.messages import KvGeometry
from baton.proto.settings import TransferSettings

LAYERS, HEADS, TOKENS, DIM = 32, 8, 16, 128
GEOMETRY = KvGeometry("8b", "1", "bfloat16", TOKENS, LAYERS, HEADS, DIM)
WAYS = [(1, 1), (2, 2), (1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (8, 2)]
RUN = 8


@dataclass(frozen=True, slots=True)
class Result:
    """One way from source to destination ranks."""

    source_ranks: int
    destination_ranks: int
    pieces: int
    piece_kib: float
    ms: float
    gb_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(way, options.blocks, options.rounds) for way in WAYS]
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()[0], "results": list(map(asdict, results))}))
        return
    print(f"{options.blocks} blocks of 2 MiB; load average {os.getloadavg()[0]:.1f}")
    print(f"{'ranks':>10} {'pieces':>8} {'KiB each':>9} {'ms':>8} {'GB/s':>7}")
    for found in results:
        ranks = f"{found.source_ranks} -> {found.destination_ranks}"
        print(f"{ranks:>10} {found.pieces:8} {found.piece_kib:9.0f} {found.ms:8.1f} {found.gb_s:7.2f}")


def measure(way: tuple[int, int], num_blocks: int, rounds: int) -> Result:
    with worker(way[0], num_blocks, 1.0) as (source, lent), worker(way[1], num_blocks, 0.0) as (destination, taken):
        address = source.attach(lent[0])
        destination.attach(taken[0])
        sources, targets = shuffled_runs(num_blocks, RUN), tuple(range(num_blocks))
        seconds = []
        for number in range(rounds + 1):
            began = time.perf_counter()
            destination.pull(Pull(number, "peer", address, sources, targets))
            wait(destination)
            seconds.append(time.perf_counter() - began)
        assert all(bool((pool.tensor == 1).all()) for pool in taken)
    median = statistics.median(seconds[1:])
    moved = sum(pool.block_bytes for pool in taken) * num_blocks
    cuts = [
        HeadCut(len(lent[0].heads), len(taken[0].heads), part.source_head, part.destination_head, part.num_heads)
        for part in head_map(*way, HEADS)
    ]
    pieces = sum(num_blocks if cut.is_whole else num_blocks * LAYERS * cut.num_heads // cut.unit for cut in cuts)
    return Result(*way, pieces, moved / pieces / 1024, median * 1e3, moved / median / 1e9)


@contextmanager
def worker(size: int, num_blocks: int, value: float) -> Iterator[tuple[ShardedConnector, list[KvPool]]]:
    """A connector over ranks in this process. The first attaches with the worker, the others have."""
    heads = HEADS // size
    pools = [
        KvPool(
            torch.full((num_blocks, LAYERS, heads, 2, TOKENS, DIM), value, dtype=torch.bfloat16),
            replace(GEOMETRY, tp_size=size),
            rank * heads,
        )
        for rank in range(size)
    ]
    members = [open_connector(TransferSettings(connector="nixl")) for _ in pools]
    connector = ShardedConnector([members[0], *map(Attached, members[1:], pools[1:])])
    try:
        yield connector, pools
    finally:
        connector.close()


class Attached:
    """A rank's connector whose pool is attached already, as a remote one's is."""

    def __init__(self, connector, pool: KvPool) -> None:
        self._connector = connector
        self._address = connector.attach(pool)

    def attach(self, pool: KvPool) -> bytes:
        return self._address

    def __getattr__(self, name: str):
        return getattr(self._connector, name)


def wait(connector: ShardedConnector) -> None:
    for _ in itertools.repeat(None):
        events = connector.poll()
        if any(event.state is PullState.FAILED for event in events):
            raise RuntimeError(events[0].reason)
        if any(event.state is PullState.SETTLED for event in events):
            return
        time.sleep(0.0002)


if __name__ == "__main__":
    main()
