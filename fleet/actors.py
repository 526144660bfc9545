"""What runs around a worker inside the processes that Ray starts.

Owns: the actors of a worker and of its further ranks, and the rule that a process ends whose post another one fills.
Refuses to know: how many of them there are and who is asked to do what (`fleet`), and what a worker does behind the
factory it is given. A worker whose model is split has an actor for each further rank: rank 0's process owns them, and
Ray ends them with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.fleet.address import own_address
from baton.fleet.notes import NotedLife, NotedRole
from baton.proto.messages import Role, RoleChange, RoleKept, WorkerDescription
from baton.proto.settings import RankSettings, WorkerSettings
from baton.telemetry.logs import configure as configure_logs
from baton.telemetry.logs import identify

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often a process asks whether another one fills its post by now."""

Result = TypeVar("Result")


class Worker(Protocol):
    """What runs inside a worker's process."""

    async def start(self) -> WorkerDescription: ...

    async def stop(self) -> None: ...

    async def set_role(self, role: Role, drain_s: float) -> RoleChange | RoleKept: ...


RankMain = Callable[[WorkerSettings, RankSettings], None]
"""The life of a further rank of a worker; returns when rank 0 has ended."""
StartRank = Callable[[RankMain, WorkerSettings, RankSettings], None]
WorkerFactory = Callable[[WorkerSettings, Callable[[BaseException], None], StartRank], Worker]


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why a process could not begin to serve, in one line."""

    message: str


class LoopThread:
    """An event loop of our own in a thread: Ray's loop stays out of the way of tokens."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name=name, daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


class RankHost:
    """The Ray actor around a further rank of a worker; its process ends when the rank does."""

    def __init__(self, run: RankMain, settings: WorkerSettings, place: RankSettings) -> None:
        host = ray.util.get_node_ip_address()
        configure_logs(settings.observability, f"{settings.worker_id}/{place.rank}", host=host)
        threading.Thread(target=self._run, args=(run, settings, place), name="rank").start()

    def _run(self, run: RankMain, settings: WorkerSettings, place: RankSettings) -> None:
        try:
            run(settings, place)
        except Exception:
            log.exception("rank %d of %s has failed", place.rank, settings.worker_id)
        logging.shutdown()
        os._exit(0)


class RankStarter:
    """Starts further ranks of a worker in its own place; a `StartRank`. They end with the process that holds it."""

    def __init__(self, num_cpus: float, num_gpus: float) -> None:
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._actors: list[Any] = []

    def __call__(self, run: RankMain, settings: WorkerSettings, place: RankSettings) -> None:
        group = ray.util.get_current_placement_group()
        assert group is not None
        actor = ray.remote(RankHost).options(
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        self._actors.append(actor.remote(run, settings, place))


class WorkerHost:
    """The Ray actor around one worker. Its constructor brings the worker up; a restart by Ray does so again."""

    def __init__(
        self,
        factory: WorkerFactory,
        settings: WorkerSettings,
        namespace: str,
        start_rank: RankStarter,
        network: str = "",
    ) -> None:
        """`network`: see `own_address`; for settings that name no host to listen at."""
        configure_logs(settings.observability, settings.worker_id, host=ray.util.get_node_ip_address())
        self._start_rank = start_rank  # kept: further ranks live as long as the handles in it
        self._thread = LoopThread("worker")
        self._outcome: WorkerDescription | StartFailure
        self._role = NotedRole(namespace, settings.worker_id)
        _end_when_replaced(NotedLife(namespace, settings.worker_id))
        try:
            if not settings.host:
                settings = replace(settings, host=own_address(network, ray.util.get_node_ip_address()))
            settings = replace(settings, role=self._role.read() or settings.role)
            self._worker = factory(settings, _end_process, start_rank)
            self._outcome = self._thread.start(self._worker.start()).result(timeout=60)
            identify(self._outcome.incarnation)
            log.info("serves at %s in process %d", self._outcome.address, self._outcome.pid)
        except Exception as error:
            log.exception("worker %s cannot start", settings.worker_id)
            self._outcome = StartFailure(f"{settings.worker_id}: {error or type(error).__name__}")

    def describe(self) -> WorkerDescription | StartFailure:
        return self._outcome

    def set_role(self, role: Role, drain_s: float) -> RoleChange | RoleKept:
        """See `Worker`. Noted before it begins, so that a process that dies on the way has the new role when it is
        back."""
        assert isinstance(self._outcome, WorkerDescription)
        self._role.write(role)
        change = self._thread.start(self._worker.set_role(role, drain_s)).result()
        if isinstance(change, RoleKept):
            self._role.write(self._outcome.role)
        else:
            self._outcome = change.description
            identify(change.description.incarnation)
        return change

    def stop(self) -> None:
        if isinstance(self._outcome, WorkerDescription):
            self._thread.start(self._worker.stop()).result(timeout=15)


def _end_when_replaced(noted: NotedLife) -> None:
    """Notes that this process fills the post, and ends it when the note is of another one.

    Ray starts a new process when it believes that this one is gone. One that was frozen, or on a machine that was cut
    off, may come back to find itself replaced: it must not go on beside its successor.
    """
    life = secrets.token_hex(8)
    noted.write(life)

    def watch() -> None:
        while True:
            time.sleep(LOOK_S)
            try:
                replaced = noted.read() != life
            except RayError as error:
                log.info("Ray does not tell who fills this post: %s", str(error).partition("\n")[0])
                continue
            if replaced:
                log.critical("another process fills this one's post, or nobody should: it ends")
                logging.shutdown()
                os._exit(70)

    threading.Thread(target=watch, name="successor", daemon=True).start()


def _end_process(error: BaseException) -> None:
    """A worker of which a vital part has failed must not go on: Ray starts a new one."""
    log.critical("a vital part of the worker has failed", exc_info=error)
    logging.shutdown()
    os._exit(70)


async def result(reference: Any, timeout_s: float) -> Any:
    """The value of a Ray reference, on any event loop."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(reference.future())
