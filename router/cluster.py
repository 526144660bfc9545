"""What an operator may see, and by the Cluster service change.

Owns: the picture of router, pools, workers and recent requests as one message, the same for gRPC and the status page.
Refuses to know: Ray (`baton.fleet`), how load is estimated (`load`), and how the picture is drawn.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from enum import StrEnum
from typing import NamedTuple, Protocol

import grpc
import psutil

from baton import __version__
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc
from baton.proto import inference_pb2 as inference
from baton.proto import worker_pb2 as worker
from baton.proto.context import Context
from baton.proto.messages import Role, WorkerDescription
from baton.router.admission import FieldViolation
from baton.router.examination import examine
from baton.router.logs import NoLog, router_tail, worker_tail
from baton.router.placement import WorkerView
from baton.router.router import Router
from baton.router.status import refuse, refuse_fields
from baton.telemetry import machine

DEFAULT_WATCH_INTERVAL_S, MIN_WATCH_INTERVAL_S = 1.0, 0.1
DEFAULT_DRAIN_S = 30.0
DEFAULT_EXAMINE_S, MAX_EXAMINE_S = 10.0, 120.0
MAX_POOL_SIZE = 1024
DEFAULT_LOG_LINES, MAX_LOG_LINES = 100, 10_000
ROUTER = "router"


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class Member(Protocol):
    """One place in a pool, as the status shows it."""

    @property
    def worker_id(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def state(self) -> WorkerState: ...
    @property
    def restarts(self) -> int: ...
    @property
    def description(self) -> WorkerDescription | None: ...
    @property
    def note(self) -> str:
        """Why it does not serve, for a person; empty if it does, or if that is not known."""
        ...


class WorkforceError(Exception):
    """A change that could not be made; the message is for a person."""


class Changed(Protocol):
    """How a change of role went: see RoleChange, which is one."""

    @property
    def drain_s(self) -> float: ...
    @property
    def num_moved(self) -> int: ...


class Departure(NamedTuple):
    """Who has left, and how many legs had to move because of it."""

    workers: tuple[str, ...]
    num_moved: int


class Workforce(Protocol):
    """What the service asks of the fleet.

    All changes raise KeyError for a name that does not exist, WorkforceError for what cannot be done. Those of one
    worker are made one after the other.
    """

    def members(self) -> list[Member]: ...

    async def drain(self, worker_id: str, timeout_s: float) -> int:
        """Takes a worker out of placement; it stays. Returns how many legs did not end in time and had to move."""
        ...

    async def dismiss(self, worker_id: str, timeout_s: float, force: bool) -> Departure:
        """Drains a worker, then ends it; its pool is smaller by one. `force`: also if nothing could be served then."""
        ...

    async def vacate(self, host: str, timeout_s: float, force: bool) -> Departure:
        """Drains all workers of a host and ends them; their pools keep their sizes, and the host gets no worker again.

        `force`: also if nothing could be served until others have taken their places.
        """
        ...

    async def set_role(self, worker_id: str, role: Role, timeout_s: float | None, force: bool) -> Changed:
        """Returns when the worker serves in its role, drained before or not. `timeout_s`: for its running legs; None is
        the router's `drain_timeout_s`. `force`: also if nothing could be served afterwards."""
        ...

    async def scale(self, pool: str, size: int) -> None: ...


class Picture:
    """Takes pictures of one router's cluster."""

    def __init__(self, router: Router, workforce: Workforce) -> None:
        self._router = router
        self._workforce = workforce

    def take(self) -> cluster.ClusterStatus:
        now = time.monotonic()
        views = {view.worker_id: view for view in self._router.book.views(now)}
        # A pool keeps its role, whatever becomes of its workers.
        roles = {pool.name: pool.role for pool in self._router.config.pools}
        pools: dict[str, cluster.PoolStatus] = {}
        for member in self._workforce.members():
            role = roles.get(member.pool, member.role)
            pool = pools.setdefault(member.pool, cluster.PoolStatus(name=member.pool, role=role.value))
            pool.size += 1
            pool.workers.append(self._worker(member, views.get(member.worker_id), now))
        router, replicas = self.router(), self._router.replicas
        routers = sorted([router, *replicas.others], key=lambda status: status.number)
        return cluster.ClusterStatus(
            model=self._router.config.model,
            router=router,
            routers=routers,
            router_replicas=replicas.count,
            pools=list(pools.values()),
            recent=self._router.recent.messages(),
            version=__version__,
        )

    def _worker(self, member: Member, view: WorkerView | None, now: float) -> cluster.WorkerStatus:
        router, description = self._router, member.description
        status = cluster.WorkerStatus(
            worker_id=member.worker_id,
            pool=member.pool,
            role=member.role.value,
            state=member.state.value,
            restarts=member.restarts,
            note=member.note,
        )
        if description is not None:
            status.host = description.address.rpartition(":")[0].strip("[]")
            status.incarnation = description.incarnation
            status.address = description.address
            status.rss_bytes = _rss_bytes(description.pid)
            status.pid = description.pid
            status.block_size = description.block_size
            status.kv_bytes_per_token = description.kv_bytes_per_token
            status.queue_budget_tokens = int(router.config.router.credit_steps * description.max_num_batched_tokens)
            status.connector = description.connector
            status.version = description.version
        load, pace = router.book.last_report(member.worker_id), router.paces.pace(member.worker_id)
        if view is not None and load is not None:
            status.load.CopyFrom(load.to_wire())
            status.load_age_s = view.age_s or 0.0
            status.in_flight = view.in_flight
        if link := router.links.get(member.worker_id):
            alive = {other.description.incarnation for other in router.links.values()}
            status.lanes.extend(lane for lane in link.lanes if lane.source_incarnation in alive)
            for lane in status.lanes:
                lane.age_s += max(0.0, now - link.lanes_s)
        if pace is not None:
            status.pace.CopyFrom(cluster.WorkerPace(**asdict(pace)))
        return status

    def router(self) -> cluster.RouterStatus:
        """This replica alone."""
        router, settings, replicas = self._router, self._router.config.router, self._router.replicas
        return cluster.RouterStatus(
            incarnation=router.incarnation,
            queued=router.dispatcher.num_requests,
            queued_tokens=router.dispatcher.num_tokens,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            running=router.num_running,
            requests_total=router.num_requests,
            retries_total=router.num_retries,
            refused_total=router.recent.num_refused,
            failed_total=router.recent.num_failed,
            draining=router.draining,
            uptime_s=time.monotonic() - router.started_s,
            rss_bytes=psutil.Process().memory_info().rss,
            pid=os.getpid(),
            number=replicas.number,
            keeper=replicas.is_keeper,
            grpc_address=replicas.grpc_address,
            http_address=replicas.http_address,
            peer_address=replicas.peer_address,
        )


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """Serves `Cluster` for one router."""

    def __init__(self, router: Router, workforce: Workforce) -> None:
        self._router = router
        self._workforce = workforce
        self._picture = Picture(router, workforce)

    async def GetStatus(self, request: cluster.GetStatusRequest, context: Context) -> cluster.ClusterStatus:
        return self._picture.take()

    async def WatchStatus(
        self, request: cluster.WatchStatusRequest, context: Context
    ) -> AsyncIterator[cluster.ClusterStatus]:
        await _refuse_no_time(context, "interval_s", request.interval_s)
        interval_s = max(request.interval_s or DEFAULT_WATCH_INTERVAL_S, MIN_WATCH_INTERVAL_S)
        while True:
            yield self._picture.take()
            await asyncio.sleep(interval_s)

    async def Drain(self, request: cluster.DrainRequest, context: Context) -> cluster.DrainResponse:
        await _refuse_no_time(context, "timeout_s", request.timeout_s)
        if request.worker_id and request.host:
            given = f"{request.worker_id!r} and {request.host!r}"
            await refuse_fields(context, [FieldViolation("worker_id, host", given, "one of the two")])
        workforce, timeout_s = self._workforce, request.timeout_s or DEFAULT_DRAIN_S
        try:
            if request.host:
                departure = await workforce.vacate(request.host, timeout_s, request.force)
            elif request.leave:
                departure = await workforce.dismiss(request.worker_id, timeout_s, request.force)
            else:
                departure = Departure((), await workforce.drain(request.worker_id, timeout_s))
        except KeyError:
            name = f"host {request.host!r}" if request.host else f"worker_id {request.worker_id!r}"
            await refuse(context, grpc.StatusCode.NOT_FOUND, f"{name} is not in this cluster")
        except WorkforceError as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return cluster.DrainResponse(moved=departure.num_moved, left=departure.workers)

    async def SetRole(self, request: cluster.SetRoleRequest, context: Context) -> cluster.SetRoleResponse:
        began_s = time.monotonic()
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        await _refuse_no_time(context, "timeout_s", timeout_s or 0.0)
        roles = [role.value for role in Role]
        if request.role not in roles:
            await refuse_fields(context, [FieldViolation("role", repr(request.role), "one of " + ", ".join(roles))])
        try:
            change = await self._workforce.set_role(request.worker_id, Role(request.role), timeout_s, request.force)
        except KeyError:
            await refuse(context, grpc.StatusCode.NOT_FOUND, f"worker_id {request.worker_id!r} is not in this cluster")
        except WorkforceError as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        total_s = time.monotonic() - began_s
        return cluster.SetRoleResponse(drain_s=change.drain_s, total_s=total_s, moved=change.num_moved)

    async def Scale(self, request: cluster.ScaleRequest, context: Context) -> cluster.ScaleResponse:
        if not 0 <= request.size <= MAX_POOL_SIZE:
            await refuse_fields(context, [FieldViolation("size", str(request.size), f"from 0 to {MAX_POOL_SIZE}")])
        try:
            await self._workforce.scale(request.pool, request.size)
        except KeyError:
            await refuse(context, grpc.StatusCode.NOT_FOUND, f"pool {request.pool!r} is not in this cluster")
        except WorkforceError as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return cluster.ScaleResponse(size=request.size)

    async def GetLogs(self, request: cluster.GetLogsRequest, context: Context) -> worker.LogTail:
        lines = request.lines or DEFAULT_LOG_LINES
        if not 1 <= lines <= MAX_LOG_LINES:
            await refuse_fields(context, [FieldViolation("lines", str(request.lines), f"from 1 to {MAX_LOG_LINES}")])
        asked, name = worker.TailRequest(lines=lines, previous=request.previous), request.worker_id or ROUTER
        try:
            if name == ROUTER:
                return await router_tail(asked)
            member = next((member for member in self._workforce.members() if member.worker_id == name), None)
            if member is None:
                await refuse(context, grpc.StatusCode.NOT_FOUND, f"worker_id {name!r} is not in this cluster")
            if member.description is None:
                raise NoLog(f"{name} has not served yet, so nobody knows where it is")
            log_dir = self._router.config.observability.log_dir
            return await worker_tail(member.description, asked, log_dir, self._router.wire)
        except NoLog as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def Examine(self, request: cluster.ExamineClusterRequest, context: Context) -> cluster.ClusterExamination:
        await _refuse_no_time(context, "timeout_s", request.timeout_s)
        examination = cluster.ClusterExamination(version=__version__, model=self._router.config.model)
        if not request.router_only:
            timeout_s = min(request.timeout_s or DEFAULT_EXAMINE_S, MAX_EXAMINE_S)
            members = self._workforce.members()
            examination.workers.extend(await examine(members, self._router.links, timeout_s))
            examination.pools.extend(
                inference.PoolInfo(name=pool.name, role=pool.role.value, size=pool.size)
                for pool in self._router.config.pools
            )
        examination.machine.CopyFrom(machine.look())
        return examination


async def _refuse_no_time(context: Context, field: str, seconds: float) -> None:
    """Refuses what cannot be waited for: NaN would pass through comparisons and reach the event loop's timers."""
    if not (math.isfinite(seconds) and seconds >= 0):
        await refuse_fields(context, [FieldViolation(field, f"{seconds:g}", "a finite number of seconds, at least 0")])


def _rss_bytes(pid: int) -> int:
    """Resident memory of a worker on this machine; 0 for one that runs elsewhere or is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
