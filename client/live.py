"""Points of a sweep measured on real workers: a cluster is brought into shape, loaded and watched.

Owns: re-shaping a running cluster, somebody's or one of our own on this machine; the load, by `client.bench`;
what status and timelines say, in the words of `capacity.outcome`.
Refuses to know: which points there are, and what their figures mean.

    shape    pools are scaled until there are as many workers, then surplus ones become what is missing (SetRole)
    load     the very arrivals that a simulated point gets, sent at their times
    account  timelines of requests; counters of workers before and after, and their load twice a second in between.
             Busy time is steps times their smoothed length, so it is an estimate
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Protocol

from baton.capacity.cluster import ClusterSetup
from baton.capacity.cores import shared_cores
from baton.capacity.cost import CostModel
from baton.capacity.grid import Shape
from baton.capacity.outcome import End, Histogram, PoolOutcome, RequestOutcome, RoleChange, RunOutcome, Stages
from baton.capacity.summary import STAGES, Recorder, Summary
from baton.capacity.sweep import Backend, Point
from baton.client import bench, calibrate
from baton.client.bench import Message, Sample
from baton.client.client import AsyncClient
from baton.client.errors import BatonError
from baton.client.resume import Finish
from baton.client.servers import GrpcServer
from baton.proto import cluster_pb2 as cluster
from baton.proto.credentials import ClientTls, is_loopback
from baton.proto.messages import Role
from baton.router.config import ClusterConfig, ConfigError

REQUEST_TIMEOUT_S = 300.0
RESHAPE_TIMEOUT_S = 300.0
_WATCH_INTERVAL_S = 0.5
_POLL_S = 0.2
_QUIET_S = 60.0
_WARM_UP_REQUESTS = 4
_REFUSED = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")


class LiveError(Exception):
    """A cluster that cannot be brought into shape or does not come to rest; the message says which and why."""


@contextmanager
def backend(
    config: ClusterConfig, target: str | None, token: str | None, tls: ClientTls | None = None
) -> Iterator[Backend]:
    """One point at a time: on the cluster at `target`, or else on one of our own for each shape."""
    with ThreadPoolExecutor(1, "live") as executor:
        host = _Local(config) if target is None else _Remote(target, token, tls)
        try:
            # The machine is part of what results depend on; so is whose cluster it is.
            yield Backend("live", Live(host, token, tls), executor, [target, calibrate.machine()])
        finally:
            # By the thread that started it.
            executor.submit(host.close).result()


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def notes(config: ClusterConfig, shapes: Sequence[Shape]) -> Iterator[str]:
    """What a reader of live figures must know about this machine."""
    most = max(shape.total for shape in shapes)
    on_gpus = any(pool.engine.device == "cuda" for pool in config.pools)
    if most >= num_cores() and not on_gpus:
        yield (
            f"Up to {most} workers, the router and the client that measured shared {num_cores()} cores. They took time "
            "from each other, which workers on machines of their own would not: shapes with more workers than cores "
            "cannot show their worth here. Compare rows of equal size, and take absolute figures from elsewhere"
        )


async def is_on_this_machine(
    config: ClusterConfig, target: str | None, token: str | None, tls: ClientTls | None
) -> bool:
    """Whether all that is measured computes on this machine's cores: a cluster of our own does."""
    if any(pool.engine.device == "cuda" for pool in config.pools):
        return False
    if target is None:
        return True
    if not is_loopback(target.rpartition(":")[0].strip("[]")):
        return False
    async with AsyncClient(target, token=token, tls=tls) as client:
        try:
            status = await client.status()
        except BatonError as error:
            raise LiveError(f"{target} does not say where its workers are: {error.message}") from error
    return all(is_loopback(worker.host) for pool in status.pools for worker in pool.workers)


def on_this_machine(setup: ClusterSetup, cost: CostModel) -> ClusterSetup:
    """The set-up as it is where all of it and its client share the cores of this machine."""
    threads = max(1, cost.origin.threads) * sum(pool.size for pool in setup.pools)
    return replace(setup, shared_cores=shared_cores(num_cores(), threads))


class _Host(Protocol):
    """Where a cluster of a wanted shape is."""

    def shaped(self, setup: ClusterSetup) -> tuple[str, tuple[RoleChange, ...]]:
        """Its address, and the roles that had to be changed for it."""
        ...

    def close(self) -> None:
        """Ends what was started for it."""
        ...


class _Local:
    """A cluster of our own, which lives as long as its points differ in how many workers of each role there are."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._running = ExitStack()
        self._kept: object = None
        self._target = ""

    def close(self) -> None:
        self._running.close()

    def shaped(self, setup: ClusterSetup) -> tuple[str, tuple[RoleChange, ...]]:
        schedulers = {pool.scheduler for pool in setup.pools}
        # A worker that changes its role keeps the scheduler's settings with which it was started.
        kept = (setup.router, schedulers) if len(schedulers) == 1 else setup
        if kept == self._kept:
            return self._target, tuple(asyncio.run(_reshaped(self._target, None, None, setup)))
        self._running.close()
        self._kept = None
        self._target = self._running.enter_context(calibrate.running(_configured(self._config, setup)))
        self._kept = kept
        return self._target, ()


class _Remote:
    """A cluster that serves already."""

    def __init__(self, target: str, token: str | None, tls: ClientTls | None) -> None:
        self._target = target
        self._token = token
        self._tls = tls

    def close(self) -> None:
        """It is somebody else's."""

    def shaped(self, setup: ClusterSetup) -> tuple[str, tuple[RoleChange, ...]]:
        return self._target, tuple(asyncio.run(_reshaped(self._target, self._token, self._tls, setup)))


async def _reshaped(target: str, token: str | None, tls: ClientTls | None, setup: ClusterSetup) -> list[RoleChange]:
    async with AsyncClient(target, token=token, tls=tls, timeout_s=RESHAPE_TIMEOUT_S) as client:
        return await reshape(client, sizes(setup))


@dataclass(frozen=True, slots=True)
class Live:
    """Measures a point on the cluster of a host."""

    host: _Host
    token: str | None = None
    tls: ClientTls | None = None

    def __call__(self, point: Point) -> Summary:
        target, changes = self.host.shaped(point.setup)
        return asyncio.run(measured(target, self.token, point, changes, self.tls))


def _configured(config: ClusterConfig, setup: ClusterSetup) -> ClusterConfig:
    """The cluster file's cluster as the setup wants it, on free ports."""
    found = sizes(setup)
    try:
        resized = config.resized(
            prefill=found[Role.PREFILL], decode=found[Role.DECODE], colocated=found[Role.COLOCATED]
        ).with_port(0, 0)
    except ConfigError as error:
        raise LiveError(f"{setup.label}: {error}") from error
    schedulers = {pool.role: pool.scheduler for pool in setup.pools}
    pools = tuple(replace(pool, scheduler=schedulers[pool.role]) for pool in resized.pools if pool.role in schedulers)
    return replace(resized, pools=pools, router=replace(setup.router, port=0, http_port=0))


def sizes(setup: ClusterSetup) -> dict[Role, int]:
    return {role: sum(pool.size for pool in setup.pools if pool.role is role) for role in Role}


async def reshape(client: AsyncClient, wanted: dict[Role, int]) -> list[RoleChange]:
    """Brings a running cluster to these numbers of workers. Raises LiveError."""
    began = time.monotonic()
    await _rescale(client, wanted)
    changes: list[RoleChange] = []
    for worker, role in _to_change(await client.status(), wanted):
        at_s = time.monotonic() - began
        try:
            done = await client.set_role(worker.worker_id, role.value)
        except BatonError as error:
            raise LiveError(f"worker {worker.worker_id} cannot become {role.value}: {error.message}") from error
        changes.append(RoleChange(worker.worker_id, Role(worker.role), role, at_s, done.drain_s, done.total_s))
    await _until_ready(client, wanted)
    return changes


async def _rescale(client: AsyncClient, wanted: dict[Role, int]) -> None:
    """As many workers as are wanted, whatever their roles; pools grow of whose role there are too few."""
    model, status = await client.model(), await client.status()
    now = {pool.name: 0 for pool in model.pools}
    now |= {pool.name: len(pool.workers) for pool in status.pools}
    excess = {pool.name: now[pool.name] - wanted[Role(pool.role)] for pool in model.pools}
    missing = sum(wanted.values()) - sum(now.values())
    goal = dict(now)
    for _ in range(abs(missing)):
        name = min(excess, key=excess.__getitem__) if missing > 0 else max(excess, key=excess.__getitem__)
        change = 1 if missing > 0 else -1
        goal[name] += change
        excess[name] += change
    for name, size in goal.items():
        if size != now[name]:
            try:
                await client.scale(name, size)
            except BatonError as error:
                raise LiveError(f"pool {name} cannot be scaled from {now[name]} to {size}: {error.message}") from error


def _to_change(status: cluster.ClusterStatus, wanted: dict[Role, int]) -> list[tuple[cluster.WorkerStatus, Role]]:
    """Workers of roles of which there are too many, each with a role of which there are too few."""
    workers = [worker for pool in status.pools for worker in pool.workers]
    here = {role: [worker for worker in workers if worker.role == role.value] for role in Role}
    surplus = [worker for role in Role for worker in here[role][wanted[role] :]]
    lacking = [role for role in Role for _ in range(wanted[role] - len(here[role]))]
    return list(zip(surplus, lacking, strict=True))


async def _until_ready(client: AsyncClient, wanted: dict[Role, int]) -> None:
    try:
        async with asyncio.timeout(RESHAPE_TIMEOUT_S):
            while True:
                status = await client.status()
                ready = [worker for pool in status.pools for worker in pool.workers if worker.state == "ready"]
                if all(sum(worker.role == role.value for worker in ready) == size for role, size in wanted.items()):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        found = {role.value: size for role, size in wanted.items() if size}
        raise LiveError(f"the cluster was not in shape within {RESHAPE_TIMEOUT_S:g} s: wanted {found}") from None


async def measured(
    target: str,
    token: str | None,
    point: Point,
    changes: Sequence[RoleChange] = (),
    tls: ClientTls | None = None,
) -> Summary:
    """Loads the cluster at `target` with the point's arrivals. Raises LiveError if it does not come to rest before."""
    server = _Telling(target, token, tls)
    recorder = Recorder(point.slo)
    itl = Histogram()
    async with AsyncClient(target, token=token, tls=tls) as client:
        try:
            model = await server.model()
            await _until_quiet(client)
            await _warm_up(server, model, point)
            jobs = bench.jobs(list(point.traffic.arrivals(point.setup.max_model_len)), model, point.traffic.seed)
            watch = Watch()
            async with watch.during(client):
                samples = await bench.run(server, jobs, seed=point.traffic.seed)
        finally:
            await server.close()
    for sample in samples:
        recorder.add(outcome(sample, server.finishes.get(point.traffic.seed + sample.number)))
        for before, after in pairwise(sample.token_times_s):
            itl.add(after - before)
    handoff_s = sum(finish.timeline.handoff_transfer for finish in server.finishes.values())
    duration_s = max((sample.ended_s for sample in samples), default=0.0)
    return recorder.summary(RunOutcome(duration_s, watch.pools(handoff_s), itl, tuple(changes)))


async def _warm_up(server: _Telling, model: bench.ServedModel, point: Point) -> None:
    """A few requests like those to come: memory is touched, connections between workers are made."""
    few = list(islice(point.traffic.arrivals(point.setup.max_model_len), _WARM_UP_REQUESTS))
    await bench.run(server, bench.jobs(few, model, seed=-1), concurrency=1, seed=-_WARM_UP_REQUESTS - 1)
    server.finishes.clear()


async def _until_quiet(client: AsyncClient) -> None:
    try:
        async with asyncio.timeout(_QUIET_S):
            while True:
                router = (await client.status()).router
                if not router.running and not router.queued:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        problem = f"still had requests of others after {_QUIET_S:g} s"
        raise LiveError(f"the cluster {problem}: measure on one that is idle") from None


class _Telling(GrpcServer):
    """A Baton router whose accounts are kept, by the seed of their requests."""

    def __init__(self, target: str, token: str | None, tls: ClientTls | None) -> None:
        super().__init__(target, token, REQUEST_TIMEOUT_S, tls)
        self.finishes: dict[int, Finish] = {}

    async def stream(self, prompt: Sequence[int], output_tokens: int, seed: int) -> AsyncIterator[Message]:
        async with self.generation(prompt, output_tokens, seed) as generation:
            num_tokens = 0
            async for output in generation:
                num_tokens += len(output.token_ids)
                if output.finish is not None:
                    self.finishes[seed] = output.finish
                yield Message(num_tokens, has_tokens=bool(output.token_ids))


def outcome(sample: Sample, finish: Finish | None) -> RequestOutcome:
    """What the client measured, with the router's account of it."""
    gaps = [after - before for before, after in pairwise(sample.token_times_s)]
    end = End.FINISHED
    if sample.error:
        end = End.REFUSED if sample.error in _REFUSED else End.FAILED
        end = End.DEADLINE if sample.error == "DEADLINE_EXCEEDED" else end
    stages = Stages()
    if finish is not None:
        stages = Stages(**{name: getattr(finish.timeline, name) for name in STAGES})
    has_tokens = bool(sample.token_times_s)
    return RequestOutcome(
        number=sample.number,
        arrived_s=sample.sent_s,
        prompt_tokens=sample.prompt_tokens,
        output_tokens=sample.output_tokens,
        end=end,
        ttft_s=sample.ttft_s if has_tokens else math.nan,
        e2e_s=sample.e2e_s if has_tokens else math.nan,
        worst_gap_s=max(gaps, default=0.0),
        stages=stages,
        cached_tokens=finish.usage.cached_tokens if finish is not None else 0,
        recomputed_tokens=finish.usage.recomputed_tokens if finish is not None else 0,
        retries=finish.retries if finish is not None else 0,
        reason=sample.error,
    )


@dataclass
class Watch:
    """Pictures of a cluster, from the beginning of a load to its end."""

    pictures: list[cluster.ClusterStatus] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def during(self, client: AsyncClient) -> AsyncIterator[None]:
        self.pictures.append(await client.status())
        watching = asyncio.create_task(self._watch(client))
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            self.pictures.append(await client.status())

    async def _watch(self, client: AsyncClient) -> None:
        with contextlib.suppress(BatonError):
            async for status in client.watch_status(_WATCH_INTERVAL_S):
                self.pictures.append(status)

    def pools(self, handoff_s: float) -> tuple[PoolOutcome, ...]:
        """What the workers of each role did in that time; all hand-offs are told of those that pull."""
        workers = [worker for pool in self.pictures[-1].pools for worker in pool.workers]
        found = []
        for role in Role:
            deeds = [self._deeds(worker.worker_id) for worker in workers if worker.role == role.value]
            if not deeds:
                continue
            found.append(
                PoolOutcome(
                    name=role.value,
                    role=role,
                    workers=len(deeds),
                    busy_s=sum(deed.busy_s for deed in deeds),
                    steps=sum(deed.steps for deed in deeds),
                    prompt_tokens_computed=sum(deed.prompt_tokens for deed in deeds),
                    tokens_generated=sum(deed.tokens for deed in deeds),
                    tokens_recomputed=sum(deed.recomputed for deed in deeds),
                    preemptions=sum(deed.preemptions for deed in deeds),
                    kv_usage=_mean([deed.kv_usage for deed in deeds]),
                    queued_tokens=sum(deed.queued_tokens for deed in deeds),
                    handoff_bytes=sum(deed.pulled for deed in deeds),
                    handoff_s=handoff_s if role is Role.DECODE else 0.0,
                )
            )
        return tuple(found)

    def _deeds(self, worker_id: str) -> _Deeds:
        loads = [
            worker.load
            for picture in self.pictures
            for pool in picture.pools
            for worker in pool.workers
            if worker.worker_id == worker_id and worker.HasField("load")
        ]
        if not loads:
            return _Deeds()
        first, last = loads[0].counters, loads[-1].counters
        return _Deeds(
            busy_s=sum(
                max(after.counters.steps - before.counters.steps, 0) * after.step_s for before, after in pairwise(loads)
            ),
            steps=last.steps - first.steps,
            prompt_tokens=last.prompt_tokens_computed - first.prompt_tokens_computed,
            tokens=last.tokens_generated - first.tokens_generated,
            recomputed=last.tokens_recomputed - first.tokens_recomputed,
            preemptions=last.preemptions_recompute - first.preemptions_recompute,
            pulled=last.bytes_pulled - first.bytes_pulled,
            kv_usage=_mean([1 - load.free_blocks / load.total_blocks for load in loads if load.total_blocks]),
            queued_tokens=_mean([load.queued_tokens for load in loads]),
        )


@dataclass(frozen=True, slots=True)
class _Deeds:
    """Of one worker. Of one that was restarted meanwhile, counters begin anew and say too little."""

    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    recomputed: int = 0
    preemptions: int = 0
    pulled: int = 0
    kv_usage: float = 0.0
    queued_tokens: float = 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
