"""Random bytes on every port of a real cluster, port after port: no process may end, and memory may not go on growing.

    python benchmarks/fuzz_ports.py [--seconds 60] [--streams 10000] [--tls] [--replicas 2] [--seed 0]
        [--model tiny|demo] [--only NAME]

Before that, three waves of half-open streams on the port of gRPC's clients: calls whose requests never come.

The ports are those that Baton opens: gRPC and HTTP for clients, those of each router replica alone, those on which the
replicas speak with each other, each worker's for gRPC and for metrics. Ray's, UCX's and NCCL's own are theirs.

    checked on each port      somebody still listens; a request gets its tokens; the port's process has not grown by
                              more than MAX_GROWTH_MIB from half of the attack to its end
    checked after each wave   the router has ended every stream, a request gets its tokens during and after it, and the
                              last wave's memory is that of the second
    checked at the end        every process is the one that it was

Owns: the cluster, the order of ports and the checks. The noise is `port_noise`. The exit code is 1 after any violation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from clusters import Machine, local_ray, model_directory, serving, shape, workers
from port_noise import Port, accepts, bombard, ended_streams

from baton.client.certs import make_certificates
from baton.client.client import Client
from baton.proto import cluster_pb2 as cluster
from baton.proto.credentials import ClientTls
from baton.proto.settings import ClusterTlsSettings, SecuritySettings, TlsSettings
from baton.router.server import Addresses

MAX_GROWTH_MIB = 48
WAVES, STREAMS_A_CONNECTION = 3, 1000
SETTLE_S = 15.0
"""Longer than anything waits for somebody who has connected and says nothing."""


@dataclass(frozen=True, slots=True)
class Secured:
    """What the cluster has, and what its clients need."""

    settings: SecuritySettings
    tls: ClientTls | None


def main(arguments: list[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    print(Machine.now())
    violations: list[str] = []
    with _cluster(options) as (addresses, secured), Client(addresses.grpc, tls=secured.tls) as client:
        right = _tokens(client)
        status = client.status()
        ports, pids = list(_ports(status, addresses, secured)), _pids(status)
        ports = [port for port in ports if options.only in port.name]
        if options.streams:
            violations += _half_opened(client, right, next(_ports(status, addresses, secured)), options.streams)
        for port in ports:
            violations += _attacked(port, options.seconds, options.seed)
            if _tokens(client) != right:
                violations.append(f"{port.name}: other tokens than before")
        if _pids(client.status()) != pids:
            violations.append(f"processes were {sorted(pids)}, are {sorted(_pids(client.status()))}")
    for violation in violations:
        print("VIOLATION", violation, file=sys.stderr)
    print(f"{len(ports)} ports, {len(violations)} violations")
    return 1 if violations else 0


def _half_opened(client: Client, right: tuple[int, ...], port: Port, streams: int) -> list[str]:
    """Waves of half-open streams; what was wrong."""
    violations: list[str] = []
    peaks: list[float] = []

    async def wave() -> tuple[int, float]:
        per_connection = [min(STREAMS_A_CONNECTION, streams - at) for at in range(0, streams, STREAMS_A_CONNECTION)]
        attack = asyncio.gather(*(ended_streams(port, number) for number in per_connection))
        asked = asyncio.create_task(asyncio.to_thread(_tokens, client))
        peak = 0.0
        while not attack.done():
            await asyncio.wait({attack}, timeout=0.1)
            peak = max(peak, _memory_mib(port.pid))
        if await asked != right:
            violations.append("half-open streams: other tokens beside them")
        return sum(await attack), peak

    before = _memory_mib(port.pid)
    for _ in range(WAVES):
        began = time.monotonic()
        ended, peak = asyncio.run(wave())
        peaks.append(peak)
        print(
            f"half-open streams      {ended:6} of {streams} ended after {time.monotonic() - began:.1f} s, memory "
            f"{before:.0f} -> {peak:.0f} MiB at most -> {_memory_mib(port.pid):.0f} MiB",
            flush=True,
        )
        if ended != streams:
            violations.append(f"half-open streams: {ended} of {streams} were ended")
    if peaks[-1] - peaks[1] > MAX_GROWTH_MIB:
        violations.append(
            f"half-open streams: at most {peaks[1]:.0f} MiB in the second wave, {peaks[-1]:.0f} in the last"
        )
    return violations


def _attacked(port: Port, seconds: float, seed: int) -> list[str]:
    """One port under attack; what was wrong afterwards."""
    before = _memory_mib(port.pid)
    first = asyncio.run(bombard(port, seconds / 2, seed))
    time.sleep(SETTLE_S)
    half = _memory_mib(port.pid)
    second = asyncio.run(bombard(port, seconds / 2, seed + 1))
    time.sleep(SETTLE_S)
    end = _memory_mib(port.pid)
    connections, sent_mb = first.connections + second.connections, (first.sent_bytes + second.sent_bytes) / 1e6
    print(
        f"{port.name:22} {connections:6} connections, {sent_mb:7.1f} MB sent, memory {before:.0f} -> {half:.0f} -> "
        f"{end:.0f} MiB",
        flush=True,
    )
    violations = []
    if not end:
        violations.append(f"{port.name}: process {port.pid} has ended")
    elif end - half > MAX_GROWTH_MIB:
        violations.append(f"{port.name}: its process grew from {half:.0f} to {end:.0f} MiB")
    if not accepts(port):
        violations.append(f"{port.name}: nobody listens any more")
    return violations


@contextmanager
def _cluster(options: argparse.Namespace) -> Iterator[tuple[Addresses, Secured]]:
    with (
        tempfile.TemporaryDirectory() as scratch,
        model_directory(options.model, Path(scratch) / "model") as model,
        local_ray(),
    ):
        config = shape(model, prefill=1, decode=1)
        config = replace(config, router=replace(config.router, replicas=options.replicas))
        secured = _secured(Path(scratch) / "certs") if options.tls else Secured(SecuritySettings(), None)
        with serving(replace(config, security=secured.settings)) as addresses:
            yield addresses, secured


def _secured(directory: Path) -> Secured:
    make_certificates(directory, [], [], days=1)
    front = TlsSettings(str(directory / "router.pem"), str(directory / "router-key.pem"))
    files = (directory / "cluster" / name for name in ("ca.pem", "node.pem", "node-key.pem"))
    return Secured(
        SecuritySettings(tls=front, cluster_tls=ClusterTlsSettings(*map(str, files))),
        ClientTls(ca_file=str(directory / "ca.pem")),
    )


def _ports(status: cluster.ClusterStatus, addresses: Addresses, secured: Secured) -> Iterator[Port]:
    by_tls = secured.tls is not None
    keeper = status.routers[0]
    yield _port("clients, gRPC", addresses.grpc, keeper.pid, by_tls)
    yield _port("clients, HTTP", addresses.http, keeper.pid, by_tls)
    for router in status.routers:
        if router.peer_address:
            yield _port(f"router {router.number}, replicas", router.peer_address, router.pid, by_tls)
        if len(status.routers) > 1:
            yield _port(f"router {router.number}, gRPC", router.grpc_address, router.pid, by_tls)
            yield _port(f"router {router.number}, HTTP", router.http_address, router.pid, by_tls)
    metrics = _metrics_addresses(addresses, secured)
    for worker in workers(status):
        yield _port(f"{worker.worker_id}, gRPC", worker.address, worker.pid, by_tls)
        yield _port(f"{worker.worker_id}, metrics", metrics[worker.worker_id], worker.pid, False)


def _metrics_addresses(addresses: Addresses, secured: Secured) -> dict[str, str]:
    context: ssl.SSLContext | None = secured.tls.context() if secured.tls is not None else None
    scheme = "https" if context is not None else "http"
    with urllib.request.urlopen(f"{scheme}://{addresses.http}/metrics/targets", timeout=10, context=context) as page:
        return {group["labels"]["worker_id"]: group["targets"][0] for group in json.load(page)}


def _port(name: str, address: str, pid: int, tls: bool) -> Port:
    host, _, number = address.rpartition(":")
    return Port(name, host.strip("[]"), int(number), pid, tls)


def _pids(status: cluster.ClusterStatus) -> set[int]:
    return {router.pid for router in status.routers} | {worker.pid for worker in workers(status)}


def _memory_mib(pid: int) -> float:
    """0 for a process that has ended."""
    try:
        return float(psutil.Process(pid).memory_info().rss) / (1 << 20)
    except psutil.NoSuchProcess:
        return 0.0


def _tokens(client: Client) -> tuple[int, ...]:
    result = client.generate(token_ids=list(range(1, 60)), max_tokens=16, temperature=0.0, ignore_eos=True).result()
    return tuple(result.token_ids)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="on each port")
    parser.add_argument("--streams", type=int, default=10_000, help="half-open ones in each wave; 0 leaves them out")
    parser.add_argument("--tls", action="store_true", help="a cluster with certificates")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--only", default="", metavar="NAME", help="ports with this in their name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
