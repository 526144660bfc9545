"""A worker for life: its model, its KV pool and its address stay while its role changes.

Owns: the order in which one role ends and another begins. Refuses to know: who asks for it and why, and what the duties
of a role are.

    serving --set_role--> leaving: takes no legs --------------------------------> at rest -> former duty closed
                              |  running legs end                                     ^          |
                              '--drain_s over--> those left fail, they go on elsewhere -'         v
    serving  <--routers let in--  another duty opened  <-- step loop: another role and incarnation

A new incarnation makes whatever is still under way to the former one the message of a stranger: it is refused by the
rules that hold after a restart of the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

from baton.engine.tracing import LegTracer
from baton.engine.vital import Failed, vital
from baton.engine.worker import DutyFactory, ModelRunner, WorkerCore, new_incarnation
from baton.proto.messages import FailureKind, Role, RoleChange, RoleKept, WorkerDescription
from baton.proto.settings import WorkerSettings
from baton.telemetry.tracing import FLUSH_S

log = logging.getLogger(__name__)

SETTLE_S = 15.0
"""For how long reads into blocks of legs that were given up may go on: longer than it takes to give up a dead peer."""
MAX_STEP_S = 120.0

Answer = TypeVar("Answer")


class Transport(Protocol):
    """What moves KV, as far as a worker itself is concerned: it outlives every duty that uses it."""

    @property
    def name(self) -> str: ...

    def close(self) -> None: ...


class Worker:
    """Complete when the constructor returns; `start` opens its port.

    `duties` has a factory for each role that the worker can take. `failed` is told of a bug, in the step loop or beside
    it, after which the worker must not go on.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        runner: ModelRunner,
        transport: Transport,
        duties: Mapping[Role, DutyFactory],
        failed: Failed,
    ) -> None:
        self._transport = transport
        self._duties = duties
        self._failed = failed
        self._changing = asyncio.Lock()
        self._flushes: set[asyncio.Task[None]] = set()
        self.core = WorkerCore(settings, runner, duties[settings.role], transport.name, time.monotonic, failed)

    async def start(self) -> WorkerDescription:
        """Opens the port and begins to serve, on the running event loop."""
        return await self.core.start()

    async def stop(self) -> None:
        await self.core.stop()
        await asyncio.gather(*self._flushes)
        await asyncio.to_thread(self._transport.close)

    async def set_role(self, role: Role, drain_s: float) -> RoleChange | RoleKept:
        """Serves in another role when this returns, unless it could not come to rest: then it serves as before.

        Legs have `drain_s` to end. What is left fails with DRAINING, and its router tries again elsewhere. A worker
        that has the role already keeps its incarnation.
        """
        async with self._changing:
            core, began_s = self.core, time.monotonic()
            if role is core.settings.role:
                return RoleChange(core.describe(), 0.0, 0)
            core.desk.leaving = True
            try:
                num_moved = 0
                if not await self._rest(drain_s):
                    reason = f"the worker becomes a {role.value} worker"
                    num_moved = await self._ask(partial(core.fail_all, FailureKind.DRAINING, reason))
                    if not await self._rest(SETTLE_S):
                        return RoleKept(await self._ask(self._unrest))
                drained_s = time.monotonic() - began_s
                await self._assume(role)
            finally:
                core.desk.leaving = False
            log.info("%s is a %s worker: %s", core.settings.worker_id, role.value, core.incarnation)
            return RoleChange(core.describe(), drained_s, num_moved)

    async def _assume(self, role: Role) -> None:
        """Half a change would be no worker: what goes wrong here ends the process."""
        core, incarnation = self.core, new_incarnation()
        with vital(self._failed):
            core.desk.hold()
            await core.duty.close()
            duty = self._duties[role](core, incarnation)
            duty.open()
            former = await self._ask(lambda: core.assume(role, incarnation, duty))
            core.desk.admit()
            if former is not None:
                flush = asyncio.create_task(_flush(former))
                self._flushes.add(flush)
                flush.add_done_callback(self._flushes.discard)

    async def _rest(self, timeout_s: float) -> bool:
        """Waits until the worker is at rest, which it stays while it is leaving."""
        loop, rested = asyncio.get_running_loop(), asyncio.Event()
        self.core.loop.call(lambda: self.core.when_at_rest(lambda: loop.call_soon_threadsafe(rested.set)))
        try:
            async with asyncio.timeout(timeout_s):
                await rested.wait()
        except TimeoutError:
            return False
        return True

    def _unrest(self) -> str:
        load = self.core.scheduler.load()
        return (
            f"{self.core.settings.worker_id} did not come to rest: {load.quarantined_blocks} blocks may still be "
            f"written to, {load.held_blocks + load.lent_blocks} are held or lent"
        )

    async def _ask(self, question: Callable[[], Answer]) -> Answer:
        """The answer of the step loop's thread."""
        loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self.core.loop.call(lambda: loop.call_soon_threadsafe(answer.set_result, question()))
        async with asyncio.timeout(MAX_STEP_S):
            return await answer


async def _flush(tracer: LegTracer) -> None:
    await asyncio.to_thread(tracer.close, FLUSH_S)
