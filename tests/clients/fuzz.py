"""Ten thousand random and malformed requests to a server that runs, and what it looks like afterwards.

Owns: the count, the clients that send them at once, the bounds on what may be left behind.
Refuses to know: what is wrong with a request (`rubbish`) and how an answer is judged (`raw_http`).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from clients.server import Server
from raw_http import HEALTH, exchange, fault
from rubbish import shot

from baton.proto import cluster_pb2, cluster_pb2_grpc

CLIENTS = 12
ROUND = 500
REST_S = 30.0
# Bodies of megabytes come and go and leave holes in the heap, so the router's size goes up and down by some 50 MiB.
GROWTH_BYTES = 48 << 20
SPARE_FDS = 4
MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Exchange:
    name: str
    statuses: tuple[int, ...]
    fault: str


def fuzz(server: Server, num_requests: int, seed: int) -> str:
    """Sends them; returns what came back, in a few words. Raises AssertionError with all faults."""
    router = server.router()
    wait_until_at_rest(server)
    num_fds, sizes = router.num_fds(), []
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    began_s = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        for first in range(0, num_requests, ROUND):
            seeds = range(seed + first, seed + min(first + ROUND, num_requests))
            for done in clients.map(lambda number: _one(server.http, number), seeds):
                statuses.update(done.statuses)
                if done.fault:
                    faults.append(done.fault)
            sizes.append(router.memory_info().rss)
            _tell(first + len(seeds), num_requests, time.monotonic() - began_s, sizes[-1], len(faults))
    wait_until_at_rest(server)
    health = exchange(server.http, HEALTH)
    if not health.answers or health.answers[0].status != 200:
        faults.append(f"/health says {health} afterwards")
    if router.num_fds() > num_fds + SPARE_FDS:
        faults.append(f"the router had {num_fds} open files before and {router.num_fds()} after")
    grown = _grown(sizes)
    if grown > GROWTH_BYTES:
        faults.append(f"the router grew by {grown >> 20} MiB, the bound is {GROWTH_BYTES >> 20} MiB: {sizes}")
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:MAX_SHOWN])
    answers = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    return f"{num_requests} requests: {answers}; router {sizes[0] >> 20} -> {sizes[-1] >> 20} MiB"


def wait_until_at_rest(server: Server) -> None:
    """Until no request runs and no block of any worker is held, lent or quarantined."""
    deadline = time.monotonic() + REST_S
    with grpc.insecure_channel(server.grpc) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        while busy := _busy(stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=10.0)):
            assert time.monotonic() < deadline, f"not at rest after {REST_S:g} s: {busy}"
            time.sleep(0.2)


def _busy(status: cluster_pb2.ClusterStatus) -> str:
    """What keeps a cluster from being at rest; empty if nothing does."""
    if status.router.running or status.router.queued:
        return f"router: {status.router}"
    for pool in status.pools:
        for worker in pool.workers:
            load = worker.load
            counts = (worker.in_flight, load.running, load.waiting)
            blocks = (load.held_blocks, load.lent_blocks, load.quarantined_blocks)
            if any(counts) or any(blocks):
                return f"{worker.worker_id}: {load}"
            if worker.state != "ready" or worker.restarts:
                return f"{worker.worker_id} is {worker.state} after {worker.restarts} restarts"
    return ""


def _grown(sizes: list[int]) -> int:
    """From the second fifth, when caches are full, to the last: by the least that was seen in each."""
    fifth = max(1, len(sizes) // 5)
    return min(sizes[-fifth:]) - min(sizes[fifth : 2 * fifth] or sizes)


def _one(address: str, seed: int) -> _Exchange:
    sent = shot(random.Random(seed))
    try:
        reply = exchange(address, sent)
    except OSError as error:
        return _Exchange(sent.name, (), f"{error!r} after request {seed}, {sent}")
    wrong = fault(sent, reply)
    statuses = tuple(answer.status for answer in reply.answers) or (0,)
    return _Exchange(sent.name, statuses, f"{wrong} after request {seed}, {sent}" if wrong else "")


def _tell(done: int, of: int, took_s: float, rss: int, faults: int) -> None:
    print(f"    {done} of {of} in {took_s:.0f} s, router {rss >> 20} MiB, {faults} faults", flush=True)
