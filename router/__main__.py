"""Composition: one process that brings a cluster up on this machine, keeps it, and takes it down.

Owns: the order of start and stop, what a person reads meanwhile, the exit code. Everything else is imported.

    check what can be checked -> local Ray -> router -> workers -> first request -> "ready" -> signal -> drain -> gone
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil

from baton.engine.checkpoint import CheckpointError, resolve_model
from baton.engine.models.config import UnsupportedModel, read_config
from baton.engine.split import split
from baton.fleet.actors import StartRank, Worker, WorkerFactory
from baton.fleet.fleet import FleetError
from baton.fleet.launch import RouterHandle, close_ray, open_ray, start_router
from baton.proto.credentials import CredentialsError
from baton.proto.messages import Role
from baton.proto.settings import ClusterTlsSettings, RankSettings, TlsSettings, WorkerSettings
from baton.router.certificates import check_certificates
from baton.router.config import ClusterConfig, PoolConfig
from baton.router.exposure import openings
from baton.router.keys import KeysError, read_keys

Failed = Callable[[BaseException], None]
Files = TypeVar("Files", TlsSettings, ClusterTlsSettings)

# The launcher and the router hold these functions and never call them. Their imports stand inside, so that torch, 1.5 s
# and 200 MiB for each process, is loaded by workers alone.


def worker(settings: WorkerSettings, failed: Failed, start_rank: StartRank) -> Worker:
    from baton.decode_worker.duty import DecodeDuty
    from baton.engine import roles
    from baton.engine.parallel import open_ranks
    from baton.engine.runner import Runner
    from baton.engine.worker import DutyFactory
    from baton.kvtransfer.connector import KvPool
    from baton.kvtransfer.sharded import open_sharded
    from baton.prefill_worker.duty import PrefillDuty

    ranks = open_ranks(settings.engine, partial(start_rank, further_rank, settings), failed)
    runner = Runner(settings.engine, ranks)
    connector = open_sharded(settings.transfer, ranks.side_lines if ranks is not None else (), failed)
    address = connector.attach(KvPool(runner.kv, runner.geometry))
    lends = partial(PrefillDuty, connector=connector, address=address)
    pulls = partial(DecodeDuty, connector=connector, pull_ids=itertools.count(1))
    duties: dict[Role, DutyFactory] = {Role.PREFILL: lends, Role.DECODE: pulls, Role.COLOCATED: pulls}
    return roles.Worker(settings, runner, connector, duties, failed)


def further_rank(settings: WorkerSettings, place: RankSettings) -> None:
    """What a process does that holds a part of a worker's model and of its KV, and is not rank 0."""
    from baton.engine.parallel import follow
    from baton.engine.part import ModelPart
    from baton.kvtransfer.connector import KvPool, open_connector
    from baton.kvtransfer.sharded import serve

    def hand_off(part: ModelPart, line: Connection) -> None:
        serve(line, open_connector(settings.transfer), KvPool(part.kv, part.geometry, part.first_kv_head))

    follow(settings.engine, place, hand_off)


# Whatever it begins as, a process can take any role later.
FACTORIES: dict[Role, WorkerFactory] = dict.fromkeys(Role, worker)


JOIN_S = 1.0
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))


class StartError(Exception):
    """Something that must be there before anything is started is not; the message is for a person."""


def serve(config: ClusterConfig) -> int:
    """Runs a cluster on this machine until SIGINT or SIGTERM; returns the process's exit code.

    0 if every request ended before it did, 130 if a signal came before it served.
    """
    began_s = time.monotonic()
    try:
        model_dir = check(config)
    except (StartError, CheckpointError) as error:
        _complain(error)
        return 1
    # From here on there are processes to end in order. Before, a signal may end a download or a conversion at once.
    stop = _stop_on_signals()
    config = sharing_cores(with_absolute_paths(config))
    print(f"starting {_described(config)}", flush=True)
    resources = {pool.resource: float(pool.size) for pool in config.pools if pool.resource}
    try:
        own = open_ray(sum(pool.num_cpus * num_processes(pool) for pool in config.pools), resources)
    except FleetError as error:
        _complain(error)
        return 1
    # Ray has set handlers of its own meanwhile.
    stop = _stop_on_signals(stop)
    router = start_router(config, model_dir, FACTORIES)
    drained = None
    try:
        addresses = router.ready(config.router.worker_start_timeout_s, stop)
        if addresses is None:
            return 130
        replicas = f"  {config.router.replicas} routers" if config.router.replicas > 1 else ""
        took_s = time.monotonic() - began_s
        print(f"ready  grpc {addresses.grpc}  http {addresses.http}{replicas}  {took_s:.1f} s after start", flush=True)
        teller = threading.Thread(target=_tell_incidents, args=(router, stop), name="incidents", daemon=True)
        teller.start()
        stop.wait()
        print("draining", flush=True)
        teller.join(JOIN_S)
        drained = router.stop(config.router.drain_timeout_s)
        return 0 if drained else 1
    except FleetError as error:
        _complain(error)
        return 1
    finally:
        # A Ray of our own ends router and workers too, in whatever state: who does not serve has nothing to drain.
        if drained is None and not own:
            router.stop(0.0)
        close_ray()


def _tell_incidents(router: RouterHandle, stop: threading.Event) -> None:
    for line in router.incidents(stop):
        print("baton:", line, file=sys.stderr, flush=True)


def _stop_on_signals(stop: threading.Event | None = None) -> threading.Event:
    """An event that SIGINT and SIGTERM set; a second one ends the process without more waiting."""
    stop = stop or threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop


def check(config: ClusterConfig) -> Path:
    """Looks for what would fail later, in many processes at once. Returns the model's directory.

    Raises StartError or CheckpointError.
    """
    router, transfer = config.router, config.transfer
    if router.replicas > 1 and not hasattr(socket, "SO_REUSEPORT"):
        raise StartError(f"{router.replicas} router replicas on one port need SO_REUSEPORT, which this system lacks")
    for port in filter(None, (router.port, router.http_port)):
        with socket.socket(socket.AF_INET6 if ":" in router.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((router.host, port))
            except OSError as error:
                raise StartError(f"{router.host}:{port} cannot be bound: {error.strerror}") from error
    if transfer.connector == "nixl" and not any(map(_installed, ("nixl", "nixl_cu12", "nixl_cu13"))):
        raise StartError("the connector nixl needs the package nixl, which is not installed")
    if any(pool.engine.device == "cuda" for pool in config.pools) and not any(map(Path.exists, GPU_DEVICES)):
        raise StartError("the device cuda needs a GPU, and this machine shows none; use --device cpu")
    check_access(config)
    model_dir = resolve_model(config.model)
    for pool in config.pools:
        if pool.engine.tensor_parallel > 1:
            try:
                split(read_config(model_dir), 0, pool.engine.tensor_parallel)
            except UnsupportedModel as error:
                raise StartError(f"metadata.baton.pools.{pool.name}.engine: {error}") from error
    needed = sum(num_processes(pool) * pool.engine.kv_cache_gib for pool in config.pools if pool.engine.device == "cpu")
    available = psutil.virtual_memory().available / (1 << 30)
    if needed > available:
        raise StartError(
            f"the KV pools need {needed:.1f} GiB of memory, {available:.1f} GiB are available: lower "
            "metadata.baton.engine.kv_cache_gib or the pools' sizes"
        )
    return model_dir


def check_access(config: ClusterConfig) -> None:
    """Keys and certificates that can be used, and who may come in without. Raises StartError; warns of the rest."""
    try:
        if config.router.api_keys_file:
            read_keys(Path(config.router.api_keys_file))
        warnings = check_certificates(config.security, datetime.now(UTC))
    except (KeysError, CredentialsError) as error:
        raise StartError(str(error)) from error
    found = openings(config)
    if found and config.security.require_auth:
        raise StartError(f"with require_auth nothing may be open to anybody, but {'; '.join(found)}")
    if found:
        warnings = [*warnings, f"open to whoever reaches {config.router.host}: {'; '.join(found)} (docs/security.md)"]
    for warning in warnings:
        print("baton: warning:", warning, file=sys.stderr, flush=True)


def with_absolute_paths(config: ClusterConfig) -> ClusterConfig:
    """The same cluster with files that are found from other working directories too: the router's is another's."""
    keys, steps, security = config.router.api_keys_file, config.observability.step_log, config.security
    if keys:
        config = replace(config, router=replace(config.router, api_keys_file=_absolute(keys)))
    tls, cluster_tls = _with_absolute_files(security.tls), _with_absolute_files(security.cluster_tls)
    config = replace(config, security=replace(security, tls=tls, cluster_tls=cluster_tls))
    if steps:
        config = replace(config, observability=replace(config.observability, step_log=str(Path(steps).resolve())))
    return config


def _with_absolute_files(section: Files) -> Files:
    return replace(section, **{each.name: _absolute(getattr(section, each.name)) for each in fields(section)})


def _absolute(file: str) -> str:
    """Below a home it stays so: each machine has its own."""
    return str(Path(file).resolve()) if file and not file.startswith("~") else file


def sharing_cores(config: ClusterConfig) -> ClusterConfig:
    """The same cluster with the machine's cores shared out to workers that do not say how many threads they want."""
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, sum(map(num_processes, config.pools))))
    pools = tuple(
        pool if pool.engine.threads else replace(pool, engine=replace(pool.engine, threads=threads))
        for pool in config.pools
    )
    return replace(config, pools=pools)


def num_processes(pool: PoolConfig) -> int:
    """How many processes a pool has: one for each rank of each worker."""
    return pool.size * pool.engine.tensor_parallel


def _described(config: ClusterConfig) -> str:
    pools = ", ".join(
        f"{pool.size} {pool.role.value} ({_ranks(pool)}{pool.engine.threads} threads)" for pool in config.pools
    )
    return f"{config.model}: {pools}, {config.transfer.connector}, {config.router.binding} binding"


def _ranks(pool: PoolConfig) -> str:
    return f"{pool.engine.tensor_parallel} ranks, each " if pool.engine.tensor_parallel > 1 else ""


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def _complain(error: Exception) -> None:
    """One line for a person, also of an error whose own text has many."""
    print("baton:", " ".join(str(error).split()), file=sys.stderr)
