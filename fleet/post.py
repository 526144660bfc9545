"""One worker of a fleet: its place on a machine, the process there, and the router's link to it.

Owns: the life of that process as the router sees it, and the loop that fills the post again whatever happens to it.
Refuses to know: how many posts there are, and why (`fleet`); how Ray finds a machine (`place`); what runs there
(`actors`).

    place found --> process described --> link open --lost--> described again, by the same process or by its successor
        ^                |  |                                         |
        |                |  '--cannot start: told, tried again        |
        '--its machine is lost, or nothing is there-------------------'

Whether a worker lives is decided by its link: a stream of reports that may be silent for `worker_silence_s`. Ray is
asked then, and starts what it believes to be gone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from baton.fleet.actors import RankStarter, StartFailure, WorkerFactory, WorkerHost, result
from baton.fleet.notes import NotedLife, NotedRole
from baton.fleet.place import Place
from baton.proto.messages import Role, RoleChange, RoleKept, WorkerDescription
from baton.proto.settings import WorkerSettings
from baton.router.cluster import WorkerState
from baton.router.config import PoolConfig
from baton.router.link import WorkerLink
from baton.router.router import Router

log = logging.getLogger(__name__)

HUNG_AFTER_S = 2.0
RESTART_PAUSE_S = 0.1
FAILURE_PAUSE_S = 5.0
LOOK_S = 0.5
"""How often Ray is asked whether a machine has room by now."""
PATIENCE_S = 3.0
"""How long a place may be looked for before somebody is told."""
STOP_S = 5.0
TURN_S = 60.0
"""For how long a worker may be about a change of its role when its legs have had their time."""
CALLS = 8

Answer = TypeVar("Answer")


class Bell:
    """Rung whenever something has changed at a post; any number may wait for it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._rung.wait()


@dataclass(frozen=True, slots=True)
class Site:
    """What the posts of a fleet share. `tell` takes what a person should know, in one line."""

    router: Router
    factories: Mapping[Role, WorkerFactory]
    namespace: str
    bell: Bell
    tell: Callable[[str], None]
    calls: ThreadPoolExecutor

    async def call(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Runs what asks Ray's head, on threads of its own: it blocks while the head is away."""
        return await asyncio.get_running_loop().run_in_executor(self.calls, function, *arguments)


class Post:
    """See the module's drawing; a `cluster.Member`. Complete when `open` was called; belongs to the router's loop."""

    def __init__(self, settings: WorkerSettings, pool: PoolConfig, site: Site, avoid: Collection[str]) -> None:
        """`avoid`: nodes on which it must not be placed, unless it is there already."""
        self.settings = settings
        self.config = pool
        self.draining = False
        self.restarts = 0
        self.description: WorkerDescription | None = None
        self.link: WorkerLink | None = None
        self.node_id = ""
        self.failure = ""
        self.lacking = ""
        self.becoming: Role | None = None
        self.changing = asyncio.Lock()
        self._site = site
        ranks = pool.engine.tensor_parallel
        takes = {"CPU": pool.num_cpus * ranks, "GPU": pool.num_gpus * ranks}
        if pool.resource:
            takes[pool.resource] = 1.0
        self._place = Place(f"{site.namespace}-{settings.worker_id}", takes, avoid)
        self._actor: Any = None
        self._patience_s = site.router.config.router.worker_start_timeout_s
        self._keeper: asyncio.Task[None] | None = None
        self._handling = threading.Lock()
        self._closed = False

    # --- what the status shows --------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return self.settings.worker_id

    @property
    def pool(self) -> str:
        return self.settings.pool

    @property
    def number(self) -> int:
        """Its number in its pool, from which it has its name."""
        return int(self.worker_id.rpartition("-")[2])

    @property
    def role(self) -> Role:
        """What it was when it was last heard of: a change of role leaves it in its pool."""
        return self.description.role if self.description is not None else self.settings.role

    @property
    def state(self) -> WorkerState:
        if self.link is not None:
            return WorkerState.DRAINING if self.draining else WorkerState.READY
        if self.description is None or self.note:
            return WorkerState.STARTING
        return WorkerState.LOST

    @property
    def note(self) -> str:
        return self.lacking or self.failure

    @property
    def serves(self) -> bool:
        return self.link is not None and not self.draining

    # --- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Finds the worker if it lives already, starts it if not, and keeps it from then on."""
        self._keeper = asyncio.create_task(self._keep())
        self._keeper.add_done_callback(self._ended)

    async def close(self) -> None:
        """Ends the worker and gives its place back."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self.link is not None:
            await self.link.close()
            self._site.router.disconnect(self.link)
        if self._site.router.config.observability.trace_endpoint and self.link is not None:
            # Its last spans leave before it does; a worker that hangs may not hold this up.
            with suppress(RayError, TimeoutError):
                await result(self._actor.stop.remote(), STOP_S)
        self.link = None
        await self._site.call(self._end)

    def set_draining(self, draining: bool) -> None:
        self.draining = draining
        self._site.bell.ring()
        self._site.router.book.set_draining(self.worker_id, draining)

    async def empty(self, timeout_s: float) -> int:
        """Waits for this router's legs here; those that are left go on elsewhere, and are counted."""
        link = self.link
        if link is None or await link.rest(timeout_s):
            return 0
        moved = link.num_legs
        await link.close()
        return moved

    async def turn(self, role: Role, drain_s: float) -> RoleChange | RoleKept | None:
        """Asks the worker to change its role; None from one that is no more, or hung and was killed."""
        link = self.link
        try:
            answer: RoleChange | RoleKept = await result(self._actor.set_role.remote(role, drain_s), drain_s + TURN_S)
            return answer
        except TimeoutError:
            await self._site.call(self._kill)
        except RayActorError:
            pass
        self._count_loss(f"on its way to become a {role} worker")
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._site.router.config.router.worker_silence_s):
                await self._site.bell.until(lambda: self.link is not link)
        return None

    def _count_loss(self, reason: str) -> None:
        self.restarts += 1
        pid = self.description.pid if self.description is not None else 0
        log.warning("%s (pid %d) was lost: %s", self.worker_id, pid, reason)
        self._site.tell(f"{self.worker_id} (pid {pid}) was lost: {reason}; it is restarted")

    # --- the keeper -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            try:
                await self._fill()
            except RayError as error:
                # Ray's head is away, or the place was taken away: both are found out by asking again.
                log.warning("%s: %s", self.worker_id, str(error).partition("\n")[0] or type(error).__name__)
                self.node_id = ""
                await asyncio.sleep(LOOK_S)

    def _ended(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            log.critical("%s is kept no longer", self.worker_id, exc_info=error)
            self._site.tell(f"{self.worker_id} is kept no longer: {error!r}")

    async def _fill(self) -> None:
        """Holds the link to the process that fills the post now; returns when either of them is no more."""
        if not self.node_id:
            await self._find_place()
        outcome = await self._describe()
        if outcome is None:
            return
        if isinstance(outcome, StartFailure):
            await self._fail(outcome.message)
            return
        router, settings = self._site.router, self._site.router.config.router
        link = WorkerLink(outcome, router.incarnation, settings.worker_silence_s)
        try:
            await link.open(router.reported, settings.connect_timeout_s)
        except ConnectionError as error:
            log.warning("%s", error)
            await asyncio.sleep(RESTART_PAUSE_S)
            return
        router.connect(link)
        router.book.set_draining(self.worker_id, self.draining)
        self.description, self.link, self.failure = link.description, link, ""
        log.info("%s serves at %s as %s", self.worker_id, link.description.address, link.description.incarnation)
        self._site.bell.ring()
        reason = await asyncio.shield(link.lost)
        self.link = None
        if self.becoming is None:
            self._count_loss(reason)
        self._site.bell.ring()
        router.disconnect(link)
        await link.close()

    async def _find_place(self) -> None:
        """Returns when the post has a place on a machine, and an actor there."""
        clock = asyncio.get_running_loop().time
        told_s = clock() + PATIENCE_S
        while not (node_id := await self._site.call(self._where)):
            if not self.lacking and clock() >= told_s:
                self.lacking = f"no machine has room for {self._place}"
                log.warning("%s waits: %s", self.worker_id, self.lacking)
                self._site.tell(f"{self.worker_id} waits: {self.lacking}")
                self._site.bell.ring()
            await asyncio.sleep(LOOK_S)
        self.node_id = node_id
        if self.lacking:
            self.lacking = ""
            self._site.tell(f"{self.worker_id} has found a machine with room")
            self._site.bell.ring()
        if self._actor is None:
            self._actor = await self._site.call(self._hire)

    async def _describe(self) -> WorkerDescription | StartFailure | None:
        """What the process says of itself when it is up; None if there is none that does. One that lives and does not
        answer is killed: Ray replaces it."""
        try:
            outcome: WorkerDescription | StartFailure = await result(self._actor.describe.remote(), self._patience_s)
            self._patience_s = HUNG_AFTER_S
            return outcome
        except TimeoutError:
            log.warning("%s does not answer: it is killed", self.worker_id)
            await self._site.call(self._kill)
        except ActorUnavailableError:
            await asyncio.sleep(RESTART_PAUSE_S)
        except RayActorError as error:
            # Ray does not start this one again. If it was not its constructor that failed, another one is made at once.
            self._actor, self.node_id = None, ""
            if "creation task" in str(error):
                return StartFailure(f"{self.worker_id}: {str(error).splitlines()[0]}")
            await asyncio.sleep(RESTART_PAUSE_S)
        self.node_id = ""
        self._patience_s = self._site.router.config.router.worker_start_timeout_s
        return None

    async def _fail(self, reason: str) -> None:
        """Tells why the worker cannot start, once, and tries again after a while."""
        log.error("%s", reason)
        if reason != self.failure:
            self.failure = reason
            self._site.tell(reason)
            self._site.bell.ring()
        await asyncio.sleep(FAILURE_PAUSE_S)
        await self._site.call(self._kill)
        self._patience_s = self._site.router.config.router.worker_start_timeout_s

    # --- Ray: on the site's threads, one at a time, and nothing after the end ---------------------------------------

    def _where(self) -> str:
        with self._handling:
            return "" if self._closed else self._place.node_id()

    def _hire(self) -> Any:
        """The worker's actor: the one that lives, or a new one in the post's place."""
        with self._handling:
            if self._closed:
                return None
            pool = self.config
            network = self._site.router.config.router.worker_network
            return (
                ray.remote(WorkerHost)
                .options(
                    name=self.worker_id,
                    namespace=self._site.namespace,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=-1,
                    max_task_retries=0,
                    max_concurrency=4,
                    num_cpus=pool.num_cpus,
                    num_gpus=pool.num_gpus,
                    resources={pool.resource: 1.0} if pool.resource else None,
                    scheduling_strategy=self._place.strategy(),
                )
                .remote(
                    self._site.factories[pool.role],
                    self.settings,
                    self._site.namespace,
                    RankStarter(pool.num_cpus, pool.num_gpus),
                    network,
                )
            )

    def _kill(self) -> None:
        """Ends the process; Ray starts another one."""
        with self._handling:
            if self._actor is not None and not self._closed:
                ray.kill(self._actor, no_restart=False)

    def _end(self) -> None:
        with self._handling:
            self._closed = True
            actor, namespace = self._actor, self._site.namespace
            if actor is None:
                # It may live all the same: a router that was restarted has not looked for it yet.
                with suppress(ValueError):
                    actor = ray.get_actor(self.worker_id, namespace)
            if actor is not None:
                ray.kill(actor, no_restart=True)
            NotedRole(namespace, self.worker_id).forget()
            NotedLife(namespace, self.worker_id).forget()
            self._place.remove()
