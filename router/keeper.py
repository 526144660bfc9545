"""The keeper's part among the router's replicas: what it tells its followers, and who they are.

Owns: the roster as followers see it, each follower's stream, the list of all replicas.
Refuses to know: how workers are made (`baton.fleet`), and what a follower does with the roster (`follower`).

    fleet's members --look, ROSTER_S apart--> roster --if changed--> every follower's stream
    each follower's RouterStatus, STATUS_S apart --> routers --> every follower's stream, every status page
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from baton.proto import cluster_pb2 as cluster
from baton.proto import replica_pb2 as wire
from baton.proto.context import Context
from baton.router.cluster import Picture, Workforce
from baton.router.gateway import Gateway
from baton.router.replicas import ReplicaService
from baton.router.router import Router

log = logging.getLogger(__name__)

ROSTER_S = 0.1
STATUS_S = 1.0
SILENCE_S = 3.0


class KeeperService(ReplicaService):
    """Serves `Replica` on the keeper. Tells nothing before `open`: a fleet that is being filled is no roster."""

    def __init__(self, router: Router, workforce: Workforce, gateway: Gateway) -> None:
        super().__init__(gateway.abort)
        self._router = router
        self._workforce = workforce
        self._picture = Picture(router, workforce)
        self._statuses: dict[int, cluster.RouterStatus] = {}
        self._roster = wire.Roster()
        self._version = 0
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """The fleet is whole: followers hear of it from now on."""
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def Follow(
        self, statuses: AsyncIterator[cluster.RouterStatus], context: Context
    ) -> AsyncIterator[wire.KeeperMessage]:
        first = await anext(aiter(statuses), None)
        if first is None:
            return
        self._hear(first)
        listener = asyncio.create_task(self._listen(statuses))
        try:
            version = 0
            while not listener.done():
                message = wire.KeeperMessage(routers=wire.Routers(routers=[self._picture.router(), *self._others()]))
                if version != self._version:
                    version = self._version
                    message.roster.CopyFrom(self._roster)
                yield message
                await self._change(version)
        finally:
            listener.cancel()
            if (known := self._statuses.get(first.number)) and known.incarnation == first.incarnation:
                log.warning("router %d is gone", first.number)
                del self._statuses[first.number]
                self._router.replicas.learn(self._others())

    async def _listen(self, statuses: AsyncIterator[cluster.RouterStatus]) -> None:
        """Takes in what a follower says, until it is silent for too long."""
        messages = aiter(statuses)
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    status = await anext(messages, None)
                if status is None:
                    return
                self._hear(status)
        except TimeoutError:
            log.warning("a follower was silent for %.1f s", SILENCE_S)

    def _hear(self, status: cluster.RouterStatus) -> None:
        if status.number not in self._statuses:
            log.info("router %d at %s is here as %s", status.number, status.grpc_address, status.incarnation)
        self._statuses[status.number] = status
        self._router.replicas.learn(self._others())

    def _others(self) -> list[cluster.RouterStatus]:
        return list(self._statuses.values())

    async def _change(self, version: int) -> None:
        """Waits for another roster than this one, at most until the next status is due."""
        try:
            async with asyncio.timeout(STATUS_S), self._changed:
                await self._changed.wait_for(lambda: self._version != version)
        except TimeoutError:
            pass

    async def _watch(self) -> None:
        while True:
            roster = self._present()
            if roster != self._roster or not self._version:
                self._roster, self._version = roster, self._version + 1
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(ROSTER_S)

    def _present(self) -> wire.Roster:
        entries = []
        for member in self._workforce.members():
            description = member.description
            entries.append(
                wire.RosterEntry(
                    worker_id=member.worker_id,
                    pool=member.pool,
                    role=member.role.value,
                    state=member.state.value,
                    restarts=member.restarts,
                    note=member.note,
                    worker=description.to_wire() if description is not None else None,
                )
            )
        return wire.Roster(workers=entries)
