"""Composition: one process that brings a cluster up on this machine, keeps it, and takes it down.

Owns: the order of start and stop, what a person reads meanwhile, the exit code. Everything else is imported.

    check what can be checked -> local Ray -> router -> workers -> first request -> "ready" -> signal -> drain -> gone
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil

from baton.engine.checkpoint import CheckpointError, resolve_model
from baton.proto.messages import Role
from baton.proto.settings import WorkerSettings
from baton.router.config import ClusterConfig
from baton.router.fleet import FleetError, Worker, WorkerFactory, close_ray, open_ray, start_router
from baton.router.keys import KeysError, read_keys

# The launcher and the router hold these two functions and never call them. Their imports stand inside, so that torch,
# 1.5 s and 200 MiB for each process, is loaded by workers alone.


def prefill_worker(settings: WorkerSettings, failed: Callable[[BaseException], None]) -> Worker:
    from baton.engine.runner import Runner
    from baton.prefill_worker.worker import PrefillWorker

    return PrefillWorker(settings, Runner(settings.engine), failed)


def decode_worker(settings: WorkerSettings, failed: Callable[[BaseException], None]) -> Worker:
    from baton.decode_worker.worker import DecodeWorker
    from baton.engine.runner import Runner

    return DecodeWorker(settings, Runner(settings.engine), failed)


FACTORIES: dict[Role, WorkerFactory] = {
    Role.PREFILL: prefill_worker,
    Role.DECODE: decode_worker,
    Role.COLOCATED: decode_worker,
}


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
        own = open_ray(sum(pool.num_cpus * pool.size for pool in config.pools), resources)
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
        print(
            f"ready  grpc {addresses.grpc}  http {addresses.http}  {time.monotonic() - began_s:.1f} s after start",
            flush=True,
        )
        stop.wait()
        print("draining", flush=True)
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
    if router.api_keys_file:
        try:
            read_keys(Path(router.api_keys_file))
        except KeysError as error:
            raise StartError(str(error)) from error
    model_dir = resolve_model(config.model)
    needed = sum(pool.size * pool.engine.kv_cache_gib for pool in config.pools if pool.engine.device == "cpu")
    available = psutil.virtual_memory().available / (1 << 30)
    if needed > available:
        raise StartError(
            f"the KV pools need {needed:.1f} GiB of memory, {available:.1f} GiB are available: lower "
            "metadata.baton.engine.kv_cache_gib or the pools' sizes"
        )
    return model_dir


def with_absolute_paths(config: ClusterConfig) -> ClusterConfig:
    """The same cluster with files that are found from other working directories too: the router's is another's."""
    keys, steps = config.router.api_keys_file, config.observability.step_log
    if keys:
        config = replace(config, router=replace(config.router, api_keys_file=str(Path(keys).resolve())))
    if steps:
        config = replace(config, observability=replace(config.observability, step_log=str(Path(steps).resolve())))
    return config


def sharing_cores(config: ClusterConfig) -> ClusterConfig:
    """The same cluster with the machine's cores shared out to workers that do not say how many threads they want."""
    num_workers = sum(pool.size for pool in config.pools)
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, num_workers))
    pools = tuple(
        pool if pool.engine.threads else replace(pool, engine=replace(pool.engine, threads=threads))
        for pool in config.pools
    )
    return replace(config, pools=pools)


def _described(config: ClusterConfig) -> str:
    pools = ", ".join(f"{pool.size} {pool.role.value} ({pool.engine.threads} threads)" for pool in config.pools)
    return f"{config.model}: {pools}, {config.transfer.connector}, {config.router.binding} binding"


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def _complain(error: Exception) -> None:
    """One line for a person, also of an error whose own text has many."""
    print("baton:", " ".join(str(error).split()), file=sys.stderr)
