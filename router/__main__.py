"""Composition: one process that brings a cluster up, on this machine or in a Ray that is there, and takes it down.

Owns: the order of start and stop, what a person reads meanwhile, the exit code. Everything else is imported.

    check what can be checked -> local Ray -> router -> workers -> first request -> "ready" -> signal -> drain -> gone

In a Ray that was joined (RAY_ADDRESS), as `ray up` makes one, machines come and go: router and workers live in it
whatever becomes of this process, which waits for machines as long as it takes, and finds a cluster that runs already.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TypeVar

import psutil

from baton.engine.checkpoint import CheckpointError, resolve_model
from baton.engine.models.config import UnsupportedModel, read_config
from baton.engine.split import split
from baton.fleet.fleet import FleetError
from baton.fleet.launch import (
    RouterHandle,
    clear,
    close_ray,
    find_router,
    join_ray,
    joins_ray,
    open_ray,
    start_router,
)
from baton.fleet.worker import FACTORIES
from baton.proto.credentials import CredentialsError
from baton.proto.settings import ClusterTlsSettings, TlsSettings
from baton.router.certificates import check_certificates
from baton.router.config import ClusterConfig, PoolConfig
from baton.router.exposure import openings
from baton.router.keys import KeysError, read_keys

Files = TypeVar("Files", TlsSettings, ClusterTlsSettings)

JOIN_S = 1.0
LOOK_S = 5.0
"""How often it is looked whether somebody else has ended the cluster."""
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))


class StartError(Exception):
    """Something that must be there before anything is started is not; the message is for a person."""


def serve(config: ClusterConfig) -> int:
    """Runs a cluster until SIGINT or SIGTERM, or until `stop` ends it; returns the process's exit code.

    0 if every request ended before it did, 130 if a signal came before it served.
    """
    began_s = time.monotonic()
    joins = joins_ray()
    try:
        model_dir = check(config, joins)
    except (StartError, CheckpointError) as error:
        _complain(error)
        return 1
    # From here on there are processes to end in order. Before, a signal may end a download or a conversion at once.
    stop = _stop_on_signals()
    config = with_absolute_paths(config)
    config = on_machines(config) if joins else sharing_cores(config)
    print(f"starting {_described(config)}", flush=True)
    resources = {pool.resource: float(pool.size) for pool in config.pools if pool.resource}
    try:
        own = open_ray(sum(pool.num_cpus * num_processes(pool) for pool in config.pools), resources)
    except FleetError as error:
        _complain(error)
        return 1
    # Ray has set handlers of its own meanwhile.
    stop = _stop_on_signals(stop)
    router = start_router(config, model_dir, FACTORIES, find_model=None if own else resolve_model)
    ends_with_us, drained = True, None
    try:
        if not own and not router.runs_as(config):
            ends_with_us = False
            raise FleetError("another configuration runs in this Ray already: end it with baton stop, then start again")
        with _incidents_told(router, stop):
            addresses = router.ready(config.router.worker_start_timeout_s if own else math.inf, stop)
            if addresses is None:
                return 130
            replicas = f"  {config.router.replicas} routers" if config.router.replicas > 1 else ""
            took = f"{time.monotonic() - began_s:.1f} s after start"
            print(f"ready  grpc {addresses.grpc}  http {addresses.http}{replicas}  {took}", flush=True)
            while not stop.wait(LOOK_S):
                if not own and router.gone():
                    ends_with_us = False
                    print("stopped", flush=True)
                    return 0
        print("draining", flush=True)
        drained = router.stop(config.router.drain_timeout_s)
        return 0 if drained else 1
    except FleetError as error:
        _complain(error)
        return 1
    finally:
        # A Ray of our own ends router and workers too, in whatever state: who does not serve has nothing to drain.
        if drained is None and ends_with_us and not own:
            router.stop(0.0)
        close_ray()


def stop(drain_s: float) -> int:
    """Ends the cluster that runs in this machine's Ray, which lives on; returns the process's exit code.

    0 if every request ended before, or if nothing ran.
    """
    try:
        join_ray()
    except FleetError as error:
        _complain(error)
        return 1
    try:
        router = find_router()
        drained = True
        if router is not None:
            print("draining", flush=True)
            drained = router.stop(drain_s)
        left = clear()
        print("stopped" if router is not None or left else "no cluster runs in this Ray", flush=True)
        return 0 if drained else 1
    except FleetError as error:
        _complain(error)
        return 1
    finally:
        close_ray()


@contextmanager
def _incidents_told(router: RouterHandle, stop: threading.Event) -> Iterator[None]:
    """Tells a person at the terminal what happens, until `stop` is set or the block is left."""
    over = threading.Event()

    def tell() -> None:
        for line in router.incidents(lambda: stop.is_set() or over.is_set()):
            print("baton:", line, file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="incidents", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join(JOIN_S)


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


def check(config: ClusterConfig, elsewhere: bool = False) -> Path:
    """Looks for what would fail later, in many processes at once. Returns the model's directory.

    `elsewhere`: router and workers will be on machines of which this one tells nothing: its ports, its memory and its
    GPUs are not looked at. Raises StartError or CheckpointError.
    """
    transfer = config.transfer
    if not elsewhere:
        _check_machine(config)
    if transfer.connector == "nixl" and not any(map(_installed, ("nixl", "nixl_cu12", "nixl_cu13"))):
        raise StartError("the connector nixl needs the package nixl, which is not installed")
    check_access(config)
    model_dir = resolve_model(config.model)
    for pool in config.pools:
        if pool.engine.tensor_parallel > 1:
            try:
                split(read_config(model_dir), 0, pool.engine.tensor_parallel)
            except UnsupportedModel as error:
                raise StartError(f"metadata.baton.pools.{pool.name}.engine: {error}") from error
    return model_dir


def _check_machine(config: ClusterConfig) -> None:
    router = config.router
    if router.replicas > 1 and not hasattr(socket, "SO_REUSEPORT"):
        raise StartError(f"{router.replicas} router replicas on one port need SO_REUSEPORT, which this system lacks")
    for port in filter(None, (router.port, router.http_port)):
        with socket.socket(socket.AF_INET6 if ":" in router.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((router.host, port))
            except OSError as error:
                raise StartError(f"{router.host}:{port} cannot be bound: {error.strerror}") from error
    if any(pool.engine.device == "cuda" for pool in config.pools) and not any(map(Path.exists, GPU_DEVICES)):
        raise StartError("the device cuda needs a GPU, and this machine shows none; use --device cpu")
    needed = sum(num_processes(pool) * pool.engine.kv_cache_gib for pool in config.pools if pool.engine.device == "cpu")
    available = psutil.virtual_memory().available / (1 << 30)
    if needed > available:
        raise StartError(
            f"the KV pools need {needed:.1f} GiB of memory, {available:.1f} GiB are available: lower "
            "metadata.baton.engine.kv_cache_gib or the pools' sizes"
        )


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


def on_machines(config: ClusterConfig) -> ClusterConfig:
    """The same cluster for a Ray of other machines: each rank has as many threads as Ray sets aside for it."""
    pools = tuple(
        pool if pool.engine.threads else replace(pool, engine=replace(pool.engine, threads=max(1, int(pool.num_cpus))))
        for pool in config.pools
    )
    return replace(config, pools=pools).on_machines()


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
