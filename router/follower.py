"""A follower's part among the router's replicas: it learns of workers from the keeper and holds its own links to them.

Owns: the stream to whatever process the keeper is, the places that the roster names, the link that fills each.
Refuses to know: Ray (it is told how to find the keeper), and how workers are made, restarted and scaled: what an
operator asks of that is passed on.

    place:  named by the roster --described--> link opened --link lost, or another incarnation named--> opened again
                                                 '--not named any more--> gone

A follower goes on with what it knows while the keeper is away: links are its own, and Ray restarts the keeper.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc

from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, replica_pb2_grpc
from baton.proto import replica_pb2 as wire
from baton.proto.context import Context
from baton.proto.messages import Role, WorkerDescription
from baton.router.cluster import Departure, Member, Picture, WorkerState, WorkforceError
from baton.router.gateway import Gateway
from baton.router.keeper import SILENCE_S, STATUS_S
from baton.router.link import WorkerLink
from baton.router.replicas import CHANNEL_OPTIONS, ReplicaService
from baton.router.router import Router

log = logging.getLogger(__name__)

PAUSE_S = 0.1
SLACK_S = 30.0
TURN_S = 90.0  # beyond the wait for running legs, for a change of role


class PassedOn(NamedTuple):
    """A change of role that the keeper has made; a `cluster.Changed`."""

    drain_s: float
    num_moved: int


class Place:
    """One worker that the roster names; a `cluster.Member`."""

    def __init__(self, entry: wire.RosterEntry) -> None:
        self.entry = entry
        self.link: WorkerLink | None = None
        self.draining = False
        self.changed = asyncio.Event()
        self.holder: asyncio.Task[None] | None = None

    @property
    def worker_id(self) -> str:
        return self.entry.worker_id

    @property
    def pool(self) -> str:
        return self.entry.pool

    @property
    def role(self) -> Role:
        return Role(self.entry.role)

    @property
    def state(self) -> WorkerState:
        """The keeper's word, but for a worker that this replica does not hear."""
        state = WorkerState(self.entry.state)
        if self.link is None and state in (WorkerState.READY, WorkerState.DRAINING):
            return WorkerState.LOST
        return WorkerState.DRAINING if self.draining and state is WorkerState.READY else state

    @property
    def restarts(self) -> int:
        return self.entry.restarts

    @property
    def note(self) -> str:
        return self.entry.note

    @property
    def description(self) -> WorkerDescription | None:
        return WorkerDescription.from_wire(self.entry.worker) if self.entry.HasField("worker") else None


class Follower:
    """Keeps one replica's links as the roster has them; a `cluster.Workforce`. Belongs to the router's event loop.

    `find_keeper` gives the address at which the keeper's process of the moment is reached, or raises OSError.
    """

    def __init__(self, router: Router, find_keeper: Callable[[], Awaitable[str]]) -> None:
        self._router = router
        self._find_keeper = find_keeper
        self._places: dict[str, Place] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._picture = Picture(router, self)
        self._heard = asyncio.Event()
        self._linked = asyncio.Event()
        self._keeper: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout_s: float | None) -> None:
        """Follows; returns when the roster is known and each worker that serves is linked. Raises TimeoutError, but for
        None: then it waits as long as the keeper does."""
        self._task = asyncio.create_task(self._follow())
        async with asyncio.timeout(timeout_s):
            await self._heard.wait()
            while any(place.state is WorkerState.LOST for place in self._places.values()):
                self._linked.clear()
                await self._linked.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(self._leave(place) for place in list(self._places.values())))

    # --- Workforce --------------------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        return list(self._places.values())

    async def drain(self, worker_id: str, timeout_s: float) -> int:
        request = cluster.DrainRequest(worker_id=worker_id, timeout_s=timeout_s)
        answer: cluster.DrainResponse = await self._pass_on("Drain", request, timeout_s + SLACK_S)
        return answer.moved

    async def dismiss(self, worker_id: str, timeout_s: float, force: bool) -> Departure:
        request = cluster.DrainRequest(worker_id=worker_id, timeout_s=timeout_s, leave=True, force=force)
        return await self._depart(request, timeout_s + SLACK_S)

    async def vacate(self, host: str, timeout_s: float, force: bool) -> Departure:
        request = cluster.DrainRequest(host=host, timeout_s=timeout_s, force=force)
        start_s = self._router.config.router.worker_start_timeout_s
        return await self._depart(request, start_s + timeout_s + SLACK_S)

    async def _depart(self, request: cluster.DrainRequest, timeout_s: float) -> Departure:
        answer: cluster.DrainResponse = await self._pass_on("Drain", request, timeout_s)
        return Departure(tuple(answer.left), answer.moved)

    async def set_role(self, worker_id: str, role: Role, timeout_s: float | None, force: bool) -> PassedOn:
        request = cluster.SetRoleRequest(worker_id=worker_id, role=role.value, timeout_s=timeout_s, force=force)
        wait_s = self._router.config.router.drain_timeout_s if timeout_s is None else timeout_s
        answer: cluster.SetRoleResponse = await self._pass_on("SetRole", request, wait_s + TURN_S)
        return PassedOn(answer.drain_s, answer.moved)

    async def scale(self, pool: str, size: int) -> None:
        settings = self._router.config.router
        await self._pass_on(
            "Scale",
            cluster.ScaleRequest(pool=pool, size=size),
            settings.worker_start_timeout_s + settings.drain_timeout_s + SLACK_S,
        )

    async def drain_here(self, worker_id: str, timeout_s: float) -> int:
        """This replica's part of a drain that the keeper has begun; returns how many legs had to move."""
        place = self._places.get(worker_id)
        if place is None:
            return 0
        place.draining = True
        self._router.book.set_draining(worker_id, True)
        link = place.link
        if link is None or await link.rest(timeout_s):
            return 0
        moved = link.num_legs
        await link.close()
        return moved

    async def _pass_on(self, method: str, request: Any, timeout_s: float) -> Any:
        """Asks the keeper. Raises what the keeper's own workforce would, WorkforceError also if it is away."""
        if self._keeper is None:
            raise WorkforceError("the replica that keeps the workers is starting: try again in some seconds")
        try:
            return await getattr(cluster_pb2_grpc.ClusterStub(self._keeper), method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise KeyError(error.details()) from None
            raise WorkforceError(error.details() or error.code().name) from None

    # --- the keeper's stream ----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Follows one keeper's process after the other."""
        while True:
            try:
                address = await self._find_keeper()
                async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                    self._keeper = channel
                    await self._listen(replica_pb2_grpc.ReplicaStub(channel).Follow(self._statuses()))
            except (grpc.aio.AioRpcError, TimeoutError, OSError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error or "silent"
                log.warning("the keeper is away: %s", reason)
            finally:
                self._keeper = None
            await asyncio.sleep(PAUSE_S)

    async def _listen(self, stream: AsyncIterable[wire.KeeperMessage]) -> None:
        messages = aiter(stream)
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = await anext(messages, None)
            if message is None:
                return
            self._take(message)

    async def _statuses(self) -> AsyncIterator[cluster.RouterStatus]:
        while True:
            yield self._picture.router()
            await asyncio.sleep(STATUS_S)

    def _take(self, message: wire.KeeperMessage) -> None:
        self._router.replicas.learn(message.routers.routers)
        if not message.HasField("roster"):
            return
        named = {entry.worker_id: entry for entry in message.roster.workers}
        for worker_id, entry in named.items():
            place = self._places.get(worker_id)
            if place is None:
                place = self._places[worker_id] = Place(entry)
                place.holder = asyncio.create_task(self._hold(place))
            place.entry = entry
            place.draining = entry.state == WorkerState.DRAINING
            self._router.book.set_draining(worker_id, place.draining)
            place.changed.set()
        for place in [place for worker_id, place in self._places.items() if worker_id not in named]:
            self._leaving[place.worker_id] = asyncio.create_task(self._leave(self._places.pop(place.worker_id)))
        self._router.dispatcher.wake()
        self._heard.set()

    # --- links ------------------------------------------------------------------------------------------------------

    async def _hold(self, place: Place) -> None:
        """Holds the link to the incarnation that the roster names, for as long as it names the place."""
        router = self._router
        former = self._leaving.pop(place.worker_id, None)
        if former is not None:
            await former
        while True:
            place.changed.clear()
            description = place.description
            if description is None:
                await place.changed.wait()
                continue
            link = WorkerLink(description, router.incarnation, router.config.router.worker_silence_s)
            try:
                await link.open(router.reported, router.config.router.connect_timeout_s)
            except ConnectionError as error:
                log.info("%s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                router.connect(link)
                router.book.set_draining(place.worker_id, place.draining)
                place.link = link
                self._linked.set()
                await self._end_of(link, place, description.incarnation)
            finally:
                place.link = None
                router.disconnect(link)
                await link.close()

    async def _end_of(self, link: WorkerLink, place: Place, named: str) -> None:
        """Waits until the link is lost, or the roster names an incarnation that is neither `named` nor linked."""
        while not link.lost.done():
            place.changed.clear()
            description = place.description
            if description is not None and description.incarnation not in (named, link.description.incarnation):
                return
            changed = asyncio.create_task(place.changed.wait())
            waits: set[asyncio.Future[Any]] = {changed, link.lost}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()

    async def _leave(self, place: Place) -> None:
        if place.holder is not None:
            place.holder.cancel()
            await asyncio.gather(place.holder, return_exceptions=True)


class FollowerService(ReplicaService):
    """Serves `Replica` on a follower."""

    def __init__(self, follower: Follower, gateway: Gateway) -> None:
        super().__init__(gateway.abort)
        self._follower = follower

    async def DrainHere(self, request: cluster.DrainRequest, context: Context) -> cluster.DrainResponse:
        return cluster.DrainResponse(moved=await self._follower.drain_here(request.worker_id, request.timeout_s))
