"""Composition: a load that shows a cluster's steps from all sides, and the cost model that follows from its step logs.

Owns: which requests are sent, start and end of a cluster of our own, what belongs to the model's origin.
Refuses to know: the regression (`capacity.calibrate`), and what the cost model is used for.

    probes   a short prompt and one token, on an idle cluster: the way to a worker and back
    prompts  one token each: chunks of all sizes, short ones together and long ones in parts
    decode   so many streams at a time: batches from 1 to 64, contexts from 16 tokens on
    mixed    prompts that come while others decode: what co-located workers compute in one step, and what prefill and
             decode workers do to each other where they share a machine
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import platform
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import psutil

from baton.capacity import calibrate
from baton.capacity.calibrate import Probe, TooLittleData, UnlikeWorkers
from baton.capacity.core_use import Window
from baton.capacity.cost import CostModel
from baton.client.bench import ServedModel
from baton.client.client import AsyncClient
from baton.client.errors import BatonError
from baton.client.servers import GrpcServer
from baton.engine.checkpoint import CheckpointError
from baton.fleet.fleet import FleetError
from baton.fleet.launch import close_ray, open_ray, start_router
from baton.fleet.worker import FACTORIES
from baton.proto import cluster_pb2 as cluster
from baton.proto import step_log
from baton.proto.credentials import is_loopback
from baton.proto.messages import Role
from baton.proto.step_log import StepLogError
from baton.router.__main__ import StartError, check, sharing_cores, with_absolute_paths
from baton.router.config import ClusterConfig

REQUEST_TIMEOUT_S = 300.0
MIN_SECONDS = 20.0
_PROBES = 20
_PROBE_PAUSE_S = 0.15  # longer than a worker stays awake, so each step of a probe begins from idleness
_SETTLE_S = 1.0
_QUIET_CORES = 0.15  # Ray's own processes take some
_BURST_TOKENS = 4096
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class NotStarted(Exception):
    """A cluster of our own that does not come up; the message is for a person."""


class CalibrationError(Exception):
    """Notes to which nothing can be fitted, or a load that the cluster did not serve."""


class Kind(StrEnum):
    PROMPTS = "prompts"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that start together, (prompt tokens, output tokens) each, and prompts that come one after the other.

    `trailing` are the lengths of the latter; each is sent when the one before it has its tokens.
    """

    kind: Kind
    together: tuple[tuple[int, int], ...]
    trailing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """What the cluster can hold at a time, so that calibration never waits for blocks.

    `kv_tokens` of one worker; `workers` that decode.
    """

    max_model_len: int
    kv_tokens: int
    workers: int


@dataclass(frozen=True, slots=True)
class Driven:
    """What was seen from outside while the cluster was driven. `windows`: one a burst, if all of it is on this machine;
    `token_cpu_s`: of router and client; `other_cores`: how many were busy with none of these processes."""

    probes: tuple[Probe, ...]
    token_cpu_s: float
    tokens: int
    windows: tuple[Window, ...] = ()
    other_cores: float = 0.0


def bursts(room: Room, seed: int) -> Iterator[Burst]:
    """Endless; the first few dozen contain each batch size and the whole span of lengths."""
    generator = random.Random(f"{seed}/calibrate")
    longest = max(min(room.max_model_len - 64, room.kv_tokens // 2), 1)
    batches = itertools.cycle(generator.sample(_BATCHES, len(_BATCHES)))

    def length(low: float, high: float) -> int:
        return min(round(low * math.pow(max(high, low) / low, generator.random())), longest)

    while True:
        lengths = [length(2, _BURST_TOKENS)]
        while sum(lengths) < min(_BURST_TOKENS, longest) // 2:
            lengths.append(length(2, _BURST_TOKENS // 2))
        alone = tuple(length(2, _BURST_TOKENS // 4) for _ in range(8))
        yield Burst(Kind.PROMPTS, tuple((tokens, 1) for tokens in lengths), alone)
        for kind in (Kind.DECODE, Kind.DECODE, Kind.MIXED):
            batch = next(batches) * room.workers
            share = min(_BURST_TOKENS * room.workers // batch, room.kv_tokens * room.workers // (2 * batch) - 48)
            if share < 1:
                continue
            context = length(min(16, share), share)
            together = tuple(
                (max(1, min(round(context * generator.uniform(0.7, 1.3)), longest)), generator.randint(24, 48))
                for _ in range(batch)
            )
            trailing = tuple(length(16, _BURST_TOKENS // 2) for _ in range(6 * room.workers))
            yield Burst(kind, together, trailing if kind is Kind.MIXED else ())


async def drive(
    target: str,
    seconds: float,
    seed: int = 0,
    progress: Callable[[float, str], None] = lambda share, doing: None,
) -> Driven:
    """Sends bursts for about so long. Raises CalibrationError as soon as a request fails: the notes would mislead."""
    try:
        return await _drive(target, seconds, seed, progress)
    except* BatonError as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise CalibrationError(f"{target} did not serve what it was sent: {first}") from first
    except* psutil.NoSuchProcess as gone:
        raise CalibrationError(f"{target}: the router or a worker ended while it was driven") from gone


async def _drive(target: str, seconds: float, seed: int, progress: Callable[[float, str], None]) -> Driven:
    server = GrpcServer(target, None, REQUEST_TIMEOUT_S)
    async with AsyncClient(target) as client:
        try:
            model, status = await server.model(), await client.status()
            room, meter = _room(status, model), _CpuMeter(status, target)
            asker = _Asker(server, model, seed)
            progress(0.0, "probes")
            probes = await asker.probe()
            asker.tokens = 0
            windows: list[Window] = []
            started, busy_s = time.monotonic(), _busy_s()
            for burst in bursts(room, seed):
                spent_s = time.monotonic() - started
                if spent_s >= seconds:
                    break
                progress(spent_s / seconds, burst.kind.value)
                windows.append(await _observed(asker, burst, meter))
            took_s, busy_s = time.monotonic() - started, _busy_s() - busy_s
            progress(1.0, "")
            await asyncio.sleep(_SETTLE_S)  # idle workers bring their notes to the disk
        finally:
            await server.close()
    token_cpu_s = sum(window.cpu_s for window in windows) / max(asker.tokens, 1)
    if not meter.sees_all:
        return Driven(tuple(probes), token_cpu_s, asker.tokens)
    ours_s = sum(window.cpu_s + window.workers_cpu_s for window in windows)
    other_cores = max(busy_s - ours_s, 0.0) / max(took_s, 1e-9)
    return Driven(tuple(probes), token_cpu_s, asker.tokens, tuple(windows), other_cores)


async def _observed(asker: _Asker, burst: Burst, meter: _CpuMeter) -> Window:
    """Sends a burst; what it took."""
    start_s, requests, tokens = time.monotonic(), asker.requests, asker.tokens
    cpu_s, workers_cpu_s = meter.beside_s(), meter.workers_s()
    await asker.send(burst)
    return Window(
        start_s,
        time.monotonic(),
        asker.requests - requests,
        asker.tokens - tokens,
        meter.beside_s() - cpu_s,
        meter.workers_s() - workers_cpu_s,
    )


def calibrated(
    config: ClusterConfig,
    seconds: float = 90.0,
    seed: int = 0,
    progress: Callable[[float, str], None] = lambda share, doing: None,
) -> CostModel:
    """Starts a cluster of that shape with step logs, drives it, ends it and fits.

    Raises NotStarted or CalibrationError.
    """
    with tempfile.TemporaryDirectory(prefix="baton-steps-") as directory:
        observability = replace(config.observability, step_log=directory)
        progress(0.0, "starting")
        with running(replace(config, observability=observability).with_port(0, 0)) as target:
            driven = asyncio.run(drive(target, seconds, seed, progress))
        return fitted(Path(directory), driven)


def fitted(directory: Path, driven: Driven | None = None) -> CostModel:
    """The cost model of the step logs in a directory, those of a cluster that served others included.

    Raises CalibrationError.
    """
    try:
        logs = step_log.read_directory(directory)
        origin = calibrate.origin_of(logs, machine(), datetime.now(UTC).date().isoformat())
        if driven is None:
            return calibrate.fit(logs, (), origin)
        windows = driven.windows if all(log.header.device == "cpu" for log in logs) else ()
        fate = "of which the fit has cleared the steps" if windows else "which the steps had to share"
        cpu = f"router and client used {1e6 * driven.token_cpu_s:.0f} us of CPU a token, {fate}"
        if driven.other_cores > _QUIET_CORES:
            cpu += f"; other programs kept {driven.other_cores:.2f} cores busy, so calibrate again on an idle machine"
        origin = replace(origin, note=f"{origin.note}; {cpu}")
        return calibrate.fit(logs, driven.probes, origin, windows, len(os.sched_getaffinity(0)))
    except (StepLogError, UnlikeWorkers, TooLittleData) as error:
        raise CalibrationError(f"{directory}: {error}") from error


@contextmanager
def running(config: ClusterConfig) -> Iterator[str]:
    """A cluster on this machine, and the Ray that it needs; the router's gRPC address. Raises NotStarted."""
    config = sharing_cores(with_absolute_paths(config))
    try:
        model_dir = check(config)
        open_ray(
            sum(pool.num_cpus * pool.size for pool in config.pools),
            {pool.resource: float(pool.size) for pool in config.pools if pool.resource},
        )
    except (StartError, CheckpointError, FleetError) as error:
        raise NotStarted(str(error)) from error
    try:
        router = start_router(config, model_dir, FACTORIES, namespace=f"calibrate-{os.getpid()}")
        try:
            addresses = router.ready(config.router.worker_start_timeout_s, threading.Event())
        except FleetError as error:
            router.stop(0.0)
            raise NotStarted(str(error)) from error
        assert addresses is not None
        try:
            yield addresses.grpc
        finally:
            router.stop(0.0)
    finally:
        close_ray()


def machine() -> str:
    """Cores and processor, as people name them."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{len(os.sched_getaffinity(0))} cores, {name}"


class _Asker:
    """Sends prompts that are all different: nothing comes out of a prefix cache."""

    def __init__(self, server: GrpcServer, model: ServedModel, seed: int) -> None:
        self._server = server
        self._words = model.token_ids
        self._seed = seed
        self._numbers = itertools.count()
        self.requests = 0
        self.tokens = 0

    async def probe(self) -> list[Probe]:
        found = []
        for _ in range(_PROBES):
            await asyncio.sleep(_PROBE_PAUSE_S)
            sent_s = time.monotonic()
            found.append(Probe(sent_s, await self._ask(16, 1)))
        return found

    async def send(self, burst: Burst) -> None:
        async with asyncio.TaskGroup() as group:
            for prompt_tokens, output_tokens in burst.together:
                group.create_task(self._ask(prompt_tokens, output_tokens))
            for prompt_tokens in burst.trailing:
                await self._ask(prompt_tokens, 1 if burst.kind is Kind.PROMPTS else 2)

    async def _ask(self, prompt_tokens: int, output_tokens: int) -> float:
        """Reads the whole answer; the moment of its first token."""
        number = next(self._numbers)
        prompt: Sequence[int] = random.Random(f"{self._seed}/{number}").choices(self._words, k=prompt_tokens)
        first_s = 0.0
        async for message in self._server.stream(prompt, output_tokens, number):
            if message.has_tokens and not first_s:
                first_s = time.monotonic()
        self.requests += 1
        self.tokens += output_tokens
        return first_s


def _room(status: cluster.ClusterStatus, model: ServedModel) -> Room:
    workers = [worker for pool in status.pools for worker in pool.workers]
    decoding = [worker for worker in workers if worker.role != Role.PREFILL.value]
    return Room(
        max_model_len=model.max_model_len,
        kv_tokens=min(worker.load.total_blocks * worker.block_size for worker in workers),
        workers=len(decoding),
    )


class _CpuMeter:
    """CPU time of this process, the router's and the workers'. `sees_all`: they are on this machine, each a process of
    its own."""

    def __init__(self, status: cluster.ClusterStatus, target: str) -> None:
        workers = [worker for pool in status.pools for worker in pool.workers]
        host = target.rpartition(":")[0].strip("[]")
        self._router = _process(status.router.pid, host)
        self._workers = [_process(worker.pid, host if is_loopback(worker.host) else "") for worker in workers]
        self.sees_all = self._router is not None and None not in self._workers

    def beside_s(self) -> float:
        return time.process_time() + _cpu_s(self._router)

    def workers_s(self) -> float:
        return sum(map(_cpu_s, self._workers))


def _process(pid: int, host: str) -> psutil.Process | None:
    """That of another program on this machine, if it is one."""
    try:
        return psutil.Process(pid) if is_loopback(host) and pid != os.getpid() else None
    except (ValueError, psutil.NoSuchProcess):
        return None


def _busy_s() -> float:
    """CPU time of all that this machine has run, and what it was denied by a host of its own."""
    times = psutil.cpu_times()
    return sum(float(getattr(times, name, 0.0)) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)
