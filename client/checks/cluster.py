"""What is wrong with a running cluster, from its router's examination of it.

Owns: the bounds of clocks and round trips, and which of several findings says why. Refuses to know: how the
examination was made.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.client.checks.finding import Finding, duration, gib
from baton.client.checks.machine import room_to_run
from baton.proto import cluster_pb2 as cluster
from baton.proto import worker_pb2 as wire

MAX_CLOCK_S = 1.0
MAX_ROUND_TRIP_S = 0.05

NAMES = ("version", "clock", "workers", "lanes", "memory", "shm", "gpus")
"""The checks that are made here."""


def check(found: cluster.ClusterExamination) -> Iterator[Finding]:
    for worker in found.workers:
        yield from _worker(worker, found)
    yield from _roles(found)
    yield from _lanes(found)
    yield from _machines(found)


def clock(subject: str, ahead_s: float, round_trip_s: float, than: str) -> Iterator[Finding]:
    """`ahead_s` is known to half a round trip."""
    if abs(ahead_s) - round_trip_s / 2 > MAX_CLOCK_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        yield Finding(
            "clock",
            subject,
            f"its clock is {duration(abs(ahead_s))} {side} that of {than}, at most {duration(MAX_CLOCK_S)} is allowed",
            "let chrony or systemd-timesyncd set the clocks: logs, traces and certificates are wrong otherwise",
        )


def version(subject: str, its: str, ours: str, whose: str) -> Iterator[Finding]:
    if its != ours:
        yield Finding(
            "version",
            subject,
            f"runs Baton {its or 'of an unknown version'}, {whose} runs {ours}",
            "install one version everywhere and restart what was changed: workers of two versions do not hand over",
        )


def _worker(worker: cluster.ExaminedWorker, found: cluster.ClusterExamination) -> Iterator[Finding]:
    name = worker.worker_id
    if worker.silence:
        yield Finding(
            "workers",
            name,
            f"the {worker.role} worker at {worker.address or 'an unknown address'} is {worker.state} and does not "
            f"answer: {worker.silence}",
            "if it does not come back by itself, read its log and look whether its host is up and its port is open to "
            "the router's host",
        )
        return
    if worker.state != "ready":
        yield Finding(
            "workers", name, f"is {worker.state}", "nothing if that is meant: it takes no requests", is_fault=False
        )
    if worker.restarts:
        yield Finding(
            "workers",
            name,
            f"has been started again {worker.restarts} times",
            "read its log for the reason",
            is_fault=False,
        )
    examination = worker.examination
    yield from version(name, examination.worker.version, found.version, "the router")
    yield from clock(name, worker.clock_ahead_s, worker.round_trip_s, "the router")


def _roles(found: cluster.ClusterExamination) -> Iterator[Finding]:
    """A role of which every worker is missing: requests wait, whatever else is well."""
    for role in sorted({worker.role for worker in found.workers}):
        ready = [worker for worker in found.workers if worker.role == role and worker.state == "ready"]
        if not ready:
            yield Finding(
                "workers",
                f"{role} workers",
                "none is ready: requests wait, and fail after router.no_worker_grace_s",
                "see the findings of the single workers",
            )
    if not found.workers:
        yield Finding(
            "workers", "the cluster", "has no worker", "see the pools' sizes and whether Ray has room for them"
        )


def _lanes(found: cluster.ClusterExamination) -> Iterator[Finding]:
    sources = [worker for worker in found.workers if worker.role == "prefill" and not worker.silence]
    for reader in found.workers:
        if reader.role != "decode" or reader.silence:
            continue
        lanes = {lane.source_incarnation: lane for lane in reader.examination.lanes}
        for source in sources:
            lane = lanes.get(source.examination.worker.incarnation)
            yield from _lane(lane, f"{source.worker_id} to {reader.worker_id}", source.address)


def _lane(lane: wire.Lane | None, pair: str, address: str) -> Iterator[Finding]:
    if lane is not None and lane.state == "open" and lane.reason:
        yield Finding(
            "lanes",
            pair,
            f"the two speak with one another, but KV cannot be read by {lane.transport or 'any way'}: {lane.reason}",
            "look whether the ports of the transport are open between the two hosts, and at kvtransfer.network_device",
        )
    elif lane is not None and lane.state == "open":
        yield from _speed(lane, pair)
    elif lane is not None and lane.state == "refused":
        yield Finding(
            "lanes", pair, f"the two do not fit: {lane.reason}", "give both the same version, model and engine settings"
        )
    elif lane is not None and lane.state == "lost":
        yield Finding(
            "lanes",
            pair,
            f"both answer the router, but not one another: {lane.reason} (at {lane.source_address})",
            "the port is closed to the reader's host, or the link is half-open: what is sent one way does not arrive. "
            "Look at firewalls and routes between the two hosts, in both directions",
        )
    else:
        yield Finding(
            "lanes",
            pair,
            f"the two have not met in the time of the examination (at {address})",
            "look at firewalls and routes between the two hosts, in both directions; --timeout gives more time",
        )


def _speed(lane: wire.Lane, pair: str) -> Iterator[Finding]:
    if lane.is_slow:
        yield Finding(
            "lanes",
            pair,
            f"KV comes at {lane.gb_per_s:.3g} GB/s by {lane.transport}, {lane.expected_gb_per_s:g} GB/s are expected "
            "(kvtransfer.expected_gb_per_s)",
            "look which transport and network device it takes (kvtransfer.transport, kvtransfer.network_device), and "
            "what else uses the link",
        )
    if lane.round_trip_s > MAX_ROUND_TRIP_S:
        yield Finding(
            "lanes",
            pair,
            f"a round trip takes {duration(lane.round_trip_s)}, at most {duration(MAX_ROUND_TRIP_S)} is good",
            "put pools that hand over to one another into one site, and look what else loads the link and the hosts",
        )


def _machines(found: cluster.ClusterExamination) -> Iterator[Finding]:
    answers = [worker.examination for worker in found.workers if not worker.silence]
    machines = {(it.host, it.boot_id): it for it in (*(answer.machine for answer in answers), found.machine)}
    for place, machine in machines.items():
        here = [it for it in answers if (it.machine.host, it.machine.boot_id) == place]
        yield from room_to_run(machine)
        pools = sum(_pool_bytes(it.worker) for it in here if it.device == "cpu")
        if pools > machine.memory_bytes:
            yield Finding(
                "memory",
                machine.host,
                f"its {len(here)} workers have KV pools of {gib(pools)}, it has {gib(machine.memory_bytes)} of memory",
                "lower metadata.baton.engine.kv_cache_gib or the pools' sizes",
            )
        wanted = sum(it.device == "cuda" for it in here)
        if wanted and not machine.num_gpus:
            yield Finding(
                "gpus",
                machine.host,
                f"{wanted} workers use GPUs, the machine shows none",
                "look whether driver and container show the GPUs (nvidia-smi)",
            )


def _pool_bytes(worker: wire.WorkerDescription) -> int:
    return worker.num_blocks * worker.block_size * worker.kv_bytes_per_token
