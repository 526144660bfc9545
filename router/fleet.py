"""The only file that calls Ray: which processes live, where, and under what name.

Owns: the actors and placement groups of every pool, their restart and removal, and the actor that hosts the router.
Refuses to know: requests and tokens. What a worker does is behind the factory that it is given. A worker whose model is
split has an actor for each further rank: rank 0's process owns them, and Ray ends them with it.

    member:  STARTING --describe, link open--> READY --link lost--> LOST --Ray restarts the process--> STARTING ...
                                                 |--drain--> DRAINING
                                                 '--set_role--> DRAINING --the worker ends the link--> LOST --> READY

A worker's role is that of its pool until it is changed. The process notes a change where its successor looks: Ray's own
store, which outlives workers and routers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from ray._private import parameter
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from baton.proto.messages import Role, RoleChange, RoleKept, WorkerDescription
from baton.proto.settings import RankSettings, WorkerSettings
from baton.router.cluster import ClusterService, Member, WorkerState, WorkforceError
from baton.router.config import ClusterConfig, PoolConfig
from baton.router.follower import Follower, FollowerService
from baton.router.keeper import KeeperService
from baton.router.link import WorkerLink
from baton.router.replicas import PeerServer
from baton.router.roles import allowed_drain_s, refusal
from baton.router.router import Router
from baton.router.server import Addresses, RouterServer
from baton.router.tokenizer import Tokenizer
from baton.telemetry.logs import configure as configure_logs

log = logging.getLogger(__name__)

NAMESPACE = "baton"
ROUTER_NAME = "baton-router"
SILENCE_S = 3.0
ROOM_TO_GROW = 64
HUNG_AFTER_S = 2.0
RESTART_PAUSE_S = 0.1
STOP_S = 5.0
TURN_S = 60.0
"""For how long a worker may be about a change of its role when its legs have had their time."""
MAX_INCIDENTS, INCIDENT_WAIT_S = 100, 10.0
FIND_S = 10.0

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


class FleetError(WorkforceError):
    """A cluster that cannot be brought up; the message is for a person."""


# --- inside the processes that Ray starts ---------------------------------------------------------------------------


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
        configure_logs(settings.observability, f"{settings.worker_id}/{place.rank}")
        threading.Thread(target=self._run, args=(run, settings, place), name="rank").start()

    def _run(self, run: RankMain, settings: WorkerSettings, place: RankSettings) -> None:
        try:
            run(settings, place)
        except Exception:
            log.exception("rank %d of %s has failed", place.rank, settings.worker_id)
        logging.shutdown()
        os._exit(0)


class RankStarter:
    """Starts further ranks of a worker in its own bundle; a `StartRank`. They end with the process that holds it."""

    def __init__(self, bundle_index: int, num_cpus: float, num_gpus: float) -> None:
        self._bundle_index = bundle_index
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
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, self._bundle_index),
        )
        self._actors.append(actor.remote(run, settings, place))


class WorkerHost:
    """The Ray actor around one worker. Its constructor brings the worker up; a restart by Ray does so again."""

    def __init__(
        self, factory: WorkerFactory, settings: WorkerSettings, namespace: str, start_rank: RankStarter
    ) -> None:
        configure_logs(settings.observability, settings.worker_id)
        self._start_rank = start_rank  # kept: further ranks live as long as the handles in it
        self._thread = LoopThread("worker")
        self._outcome: WorkerDescription | StartFailure
        if not settings.host:
            settings = replace(settings, host=ray.util.get_node_ip_address())
        self._role = NotedRole(namespace, settings.worker_id)
        settings = replace(settings, role=self._role.read() or settings.role)
        try:
            self._worker = factory(settings, _end_process, start_rank)
            self._outcome = self._thread.start(self._worker.start()).result(timeout=60)
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
        return change

    def stop(self) -> None:
        if isinstance(self._outcome, WorkerDescription):
            self._thread.start(self._worker.stop()).result(timeout=15)


class NotedRole:
    """The role that was given to a worker after its start, as its next process finds it."""

    def __init__(self, namespace: str, worker_id: str) -> None:
        self._key = f"{namespace}/{worker_id}/role"

    def read(self) -> Role | None:
        noted: bytes | None = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE)
        return Role(noted.decode()) if noted else None

    def write(self, role: Role) -> None:
        internal_kv._internal_kv_put(self._key, role.value, namespace=NAMESPACE)

    def forget(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=NAMESPACE)


class RouterHost:
    """The Ray actor around the router. Works from its constructor on, so a restart by Ray needs nobody's help."""

    def __init__(
        self,
        config: ClusterConfig,
        model_dir: Path,
        factories: Mapping[Role, WorkerFactory],
        namespace: str,
        number: int = 0,
    ) -> None:
        """`number`: of the replica. The one with 0 is the keeper: it has the fleet, the others follow it."""
        configure_logs(config.observability, f"router-{number}" if number else "router")
        self._namespace = namespace
        self._number = number
        self._thread = LoopThread("router")
        self._config = replace(config, router=config.router.share())
        self._model_dir = model_dir
        self._factories = factories
        self._server: RouterServer | None = None
        self._fleet: Fleet | Follower | None = None
        self._keeper: KeeperService | None = None
        self._peers: PeerServer | None = None
        self._peer_address: Future[str] = Future()
        self._outcome: Future[Addresses | StartFailure] = self._thread.start(self._serve())

    async def _serve(self) -> Addresses | StartFailure:
        try:
            router = Router(self._config, Tokenizer(self._model_dir), self._number)
            addresses = await (self._keep(router) if router.replicas.is_keeper else self._follow(router))
            await router.prove_ready()
            if self._server is not None:
                await self._server.mark_ready()
        except Exception as error:
            log.exception("the router cannot start")
            return StartFailure(str(error) or type(error).__name__)
        return addresses

    async def _keep(self, router: Router) -> Addresses:
        """Serves with a fleet of its own."""
        self._fleet = fleet = Fleet(self._config, router, self._factories, self._namespace)
        self._server = RouterServer(router, fleet)
        self._keeper = KeeperService(router, fleet, self._server.gateway)
        addresses = await self._open(router, self._server, PeerServer(self._keeper, ClusterService(router, fleet)))
        await fleet.open()
        self._keeper.open()
        return addresses

    async def _follow(self, router: Router) -> Addresses:
        """Serves with the workers that the keeper names."""
        self._fleet = follower = Follower(router, partial(_peer_address_of, ROUTER_NAME, self._namespace))
        self._server = RouterServer(router, follower)
        service = FollowerService(follower, self._server.gateway)
        addresses = await self._open(router, self._server, PeerServer(service))
        await follower.open(self._config.router.worker_start_timeout_s)
        return addresses

    async def _open(self, router: Router, server: RouterServer, peers: PeerServer) -> Addresses:
        """Opens the ports: those for clients, and with other replicas that for them."""
        addresses = await server.open(self._config.router, patience_s=5.0)
        replicas = router.replicas
        replicas.grpc_address, replicas.http_address = addresses.own_grpc, addresses.own_http
        if replicas.count > 1:
            host = self._config.router.host
            self._peers = peers
            loopback = host in ("127.0.0.1", "::1")
            replicas.peer_address = await peers.open(host if loopback else ray.util.get_node_ip_address())
            self._peer_address.set_result(replicas.peer_address)
        return addresses

    def node_id(self) -> str:
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def peer_address(self) -> str:
        """Blocks until the other replicas can reach this one; returns where."""
        return self._peer_address.result(timeout=60)

    def ready(self) -> Addresses | StartFailure:
        """Blocks until the router serves; returns its addresses."""
        return self._outcome.result()

    async def incident(self, timeout_s: float) -> str:
        """The next thing that a person at the terminal should know; empty if nothing happens in that time.

        Ray runs methods that are no coroutines one after the other here, so one that waits would hold up `drain`.
        """
        return await asyncio.wrap_future(self._thread.start(self._incident(timeout_s)))

    async def _incident(self, timeout_s: float) -> str:
        if not isinstance(self._fleet, Fleet):
            await asyncio.sleep(timeout_s)
            return ""
        return await self._fleet.incident(timeout_s)

    def drain(self, drain_s: float) -> bool:
        """Takes no more requests; returns whether all ended in time."""
        return self._thread.start(self._server.drain(drain_s)).result() if self._server is not None else True

    def stop(self, drain_s: float) -> bool:
        """Drains, then ends every worker. Returns whether all requests ended in time."""
        return self._thread.start(self._stop(drain_s)).result()

    async def _stop(self, drain_s: float) -> bool:
        drained = await self._server.drain(drain_s) if self._server is not None else True
        if self._server is not None:
            await self._server.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._peers is not None:
            await self._peers.close()
        if self._fleet is not None:
            await self._fleet.close()
        return drained


async def _peer_address_of(name: str, namespace: str) -> str:
    """Where the replicas reach a router's present process. Raises OSError if there is none that answers."""
    try:
        actor = await asyncio.to_thread(ray.get_actor, name, namespace)
        address: str = await _result(actor.peer_address.remote(), FIND_S)
    except (RayError, ValueError, TimeoutError) as error:
        raise OSError(f"{name} does not answer: {str(error).partition(chr(10))[0] or type(error).__name__}") from error
    return address


def _end_process(error: BaseException) -> None:
    """A worker of which a vital part has failed must not go on: Ray starts a new one."""
    log.critical("a vital part of the worker has failed", exc_info=error)
    logging.shutdown()
    os._exit(70)


# --- the fleet ------------------------------------------------------------------------------------------------------


class Post:
    """One place in a pool and the process that fills it; a `cluster.Member`."""

    def __init__(self, settings: WorkerSettings, pool: PoolConfig, actor: Any, group: PlacementGroup) -> None:
        self.settings = settings
        self.config = pool
        self.actor = actor
        self.group = group
        self.state = WorkerState.STARTING
        self.draining = False
        self.restarts = 0
        self.description: WorkerDescription | None = None
        self.link: WorkerLink | None = None
        self.failure = ""
        self.settled = asyncio.Event()
        self.turned = asyncio.Event()
        self.changing = asyncio.Lock()
        self.becoming: Role | None = None
        self.keeper: asyncio.Task[None] | None = None

    @property
    def worker_id(self) -> str:
        return self.settings.worker_id

    @property
    def pool(self) -> str:
        return self.settings.pool

    @property
    def role(self) -> Role:
        """What it was when it was last heard of: a change of role leaves it in its pool."""
        return self.description.role if self.description is not None else self.settings.role

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for something that the keeper brings about. For whoever holds `changing`."""
        while not condition():
            self.turned.clear()
            await self.turned.wait()


class Fleet:
    """Keeps every pool at its size; a `cluster.Workforce`. Belongs to the router's event loop."""

    def __init__(
        self, config: ClusterConfig, router: Router, factories: Mapping[Role, WorkerFactory], namespace: str
    ) -> None:
        self._namespace = namespace
        self._config = config
        self._router = router
        self._factories = factories
        self._posts: dict[str, Post] = {}
        self._scaling = asyncio.Lock()
        self._changes: set[asyncio.Task[RoleChange]] = set()
        self._incidents: deque[str] = deque(maxlen=MAX_INCIDENTS)
        self._happened = asyncio.Event()

    async def open(self) -> None:
        """Fills every pool; returns when each worker serves. Raises FleetError with the first worker's failure."""
        for pool in self._config.pools:
            await self._add(pool, 0, pool.size)
        timeout_s = self._config.router.worker_start_timeout_s
        waits = [asyncio.create_task(post.settled.wait()) for post in self._posts.values()]
        _, pending = await asyncio.wait(waits, timeout=timeout_s)
        for wait in pending:
            wait.cancel()
        failures = [post.failure for post in self._posts.values() if post.failure]
        if failures:
            raise FleetError(failures[0])
        if pending:
            raise FleetError(f"{len(pending)} of {len(waits)} workers did not start within {timeout_s:.0f} s")

    async def close(self) -> None:
        """Ends every process of every pool."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*(self._remove(post) for post in list(self._posts.values())))

    def members(self) -> list[Member]:
        return list(self._posts.values())

    async def drain(self, worker_id: str, timeout_s: float) -> int:
        """Takes a worker out of placement; legs not done in time move to other workers. Returns how many moved."""
        post = self._posts[worker_id]
        async with post.changing:
            self._require(post)
            self._set_draining(post, True)
            moved, elsewhere = await asyncio.gather(
                self._empty(post, timeout_s), self._router.replicas.drain(worker_id, timeout_s)
            )
            return moved + elsewhere

    async def _empty(self, post: Post, timeout_s: float) -> int:
        """This replica's part of a drain."""
        link = post.link
        if link is None or await link.rest(timeout_s):
            return 0
        moved = link.num_legs
        await link.close()
        return moved

    async def set_role(self, worker_id: str, role: Role, timeout_s: float | None, force: bool) -> RoleChange:
        """See `Workforce`. The change goes on when the caller has gone away."""
        change = asyncio.create_task(self._set_role(self._posts[worker_id], role, timeout_s, force))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)

    async def scale(self, pool: str, size: int) -> None:
        """Brings a pool to a size: new workers serve, or surplus ones are drained and gone, when this returns.

        Raises KeyError for an unknown pool, FleetError if a new worker cannot start; it is then taken back.
        """
        config = next((config for config in self._config.pools if config.name == pool), None)
        if config is None:
            raise KeyError(pool)
        async with self._scaling:
            posts = [post for post in self._posts.values() if post.pool == pool]
            if size > len(posts):
                first = 1 + max((int(post.worker_id.rpartition("-")[2]) for post in posts), default=-1)
                await self._add(config, first, size - len(posts))
                added = [post for post in self._posts.values() if post.pool == pool and post not in posts]
                await asyncio.gather(*(post.settled.wait() for post in added))
                failed = [post for post in added if post.failure]
                for post in failed:
                    await self._remove(post)
                if failed:
                    raise FleetError(failed[0].failure)
            for post in posts[size:]:
                await self.drain(post.worker_id, self._config.router.drain_timeout_s)
                await self._remove(post)

    async def incident(self, timeout_s: float) -> str:
        """The oldest incident not yet told; empty if none comes in that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._incidents:
                    self._happened.clear()
                    await self._happened.wait()
        return self._incidents.popleft() if self._incidents else ""

    # --- changes of role --------------------------------------------------------------------------------------------

    async def _set_role(self, post: Post, role: Role, timeout_s: float | None, force: bool) -> RoleChange:
        settings = self._config.router
        async with post.changing:
            self._require(post)
            others = [
                other.becoming or other.role
                for other in self._posts.values()
                if other is not post and (other.becoming or not other.draining)
            ]
            if role is not Role.COLOCATED and self._config.transfer.connector == "local":
                raise WorkforceError("the connector 'local' moves no KV between processes: workers stay colocated")
            why_not = refusal(post.worker_id, role, others)
            if why_not and not force:
                raise WorkforceError(why_not)
            wanted_s = settings.drain_timeout_s if timeout_s is None else timeout_s
            was_draining, post.becoming = post.draining, role
            self._set_draining(post, True)
            try:
                change = await self._turn(post, role, allowed_drain_s(wanted_s, others, settings.no_worker_grace_s))
            except BaseException:
                self._set_draining(post, was_draining)
                raise
            else:
                self._set_draining(post, False)
            finally:
                post.becoming = None
                self._router.dispatcher.wake()
            return change

    async def _turn(self, post: Post, role: Role, drain_s: float) -> RoleChange:
        """Has the worker change its role, and its successor if it dies on the way; returns when it serves again."""
        limit_s = drain_s + self._config.router.worker_start_timeout_s
        change: RoleChange | RoleKept | None = None
        try:
            async with asyncio.timeout(limit_s):
                while change is None:
                    await post.until(lambda: post.link is not None or post.failure)
                    if post.failure:
                        raise FleetError(post.failure)
                    change = await self._ask_to_turn(post, role, drain_s)
                if isinstance(change, RoleKept):
                    raise WorkforceError(change.reason)
                await post.until(lambda: post.link is not None and post.role is role)
        except TimeoutError:
            raise FleetError(f"{post.worker_id} was no {role} worker {limit_s:.0f} s later") from None
        log.info("%s became a %s worker after %.3f s of draining", post.worker_id, role, change.drain_s)
        return change

    async def _ask_to_turn(self, post: Post, role: Role, drain_s: float) -> RoleChange | RoleKept | None:
        """The worker's answer; None from one that is no more, or hung and was killed."""
        link = post.link
        try:
            answer: RoleChange | RoleKept = await _result(post.actor.set_role.remote(role, drain_s), drain_s + TURN_S)
            return answer
        except TimeoutError:
            await asyncio.to_thread(ray.kill, post.actor, no_restart=False)
        except RayActorError:
            pass
        self._count_loss(post, f"on its way to become a {role} worker")
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * SILENCE_S):
                await post.until(lambda: post.link is not link)
        return None

    def _require(self, post: Post) -> None:
        """Raises KeyError if the post was given up while somebody waited for it."""
        if self._posts.get(post.worker_id) is not post:
            raise KeyError(post.worker_id)

    def _set_draining(self, post: Post, draining: bool) -> None:
        post.draining = draining
        if draining or post.link is not None:
            post.state = WorkerState.DRAINING if draining else WorkerState.READY
        self._router.book.set_draining(post.worker_id, draining)

    def _count_loss(self, post: Post, reason: str) -> None:
        post.restarts += 1
        pid = post.description.pid if post.description is not None else 0
        log.warning("%s (pid %d) was lost: %s", post.worker_id, pid, reason)
        self._incidents.append(f"{post.worker_id} (pid {pid}) was lost: {reason}; it is restarted")
        self._happened.set()

    # --- processes --------------------------------------------------------------------------------------------------

    async def _add(self, pool: PoolConfig, first: int, count: int) -> None:
        """Starts `count` workers in one placement group, spread over the machines; finds those that live already."""
        if not count:
            return
        ranks = pool.engine.tensor_parallel
        bundle = {"CPU": pool.num_cpus * ranks, "GPU": pool.num_gpus * ranks}
        bundle[pool.resource] = 1.0 if pool.resource else 0.0
        bundle = {name: amount for name, amount in bundle.items() if amount}
        group = await asyncio.to_thread(self._group, f"{self._namespace}-{pool.name}-{first}", [bundle] * count)
        for index in range(count):
            worker_id = f"{pool.name}-{first + index}"
            host = self._config.router.host
            settings = WorkerSettings(
                worker_id=worker_id,
                pool=pool.name,
                role=pool.role,
                engine=pool.engine,
                scheduler=pool.scheduler,
                transfer=self._config.transfer,
                observability=self._config.observability,
                host=host if host in ("127.0.0.1", "::1") else "",
                model_name=self._router.model_name,
            )
            actor_class = ray.remote(WorkerHost)
            actor = actor_class.options(
                name=worker_id,
                namespace=self._namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=4,
                num_cpus=pool.num_cpus,
                num_gpus=pool.num_gpus,
                resources={pool.resource: 1.0} if pool.resource else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(
                self._factories[pool.role],
                settings,
                self._namespace,
                RankStarter(index, pool.num_cpus, pool.num_gpus),
            )
            post = Post(settings, pool, actor, group)
            self._posts[worker_id] = post
            post.keeper = asyncio.create_task(self._keep(post))

    def _group(self, name: str, bundles: list[dict[str, float]]) -> PlacementGroup:
        try:
            known: PlacementGroup = ray.util.get_placement_group(name)
            return known
        except ValueError:
            pass
        group: PlacementGroup = placement_group(bundles, strategy="SPREAD", name=name, lifetime="detached")
        timeout_s = self._config.router.worker_start_timeout_s
        if not group.wait(timeout_s):
            remove_placement_group(group)
            raise FleetError(f"no machine had room for {bundles} within {timeout_s:.0f} s")
        return group

    async def _remove(self, post: Post) -> None:
        if post.keeper is not None:
            post.keeper.cancel()
            await asyncio.gather(post.keeper, return_exceptions=True)
        if post.link is not None:
            await post.link.close()
            self._router.disconnect(post.link)
        self._posts.pop(post.worker_id, None)
        if self._config.observability.trace_endpoint and post.description is not None:
            # Its last spans leave before it does; a worker that hangs may not hold this up.
            with suppress(RayError, TimeoutError):
                await _result(post.actor.stop.remote(), STOP_S)
        await asyncio.to_thread(ray.kill, post.actor, no_restart=True)
        await asyncio.to_thread(NotedRole(self._namespace, post.worker_id).forget)
        if not any(other.group is post.group for other in self._posts.values()):
            await asyncio.to_thread(remove_placement_group, post.group)

    async def _keep(self, post: Post) -> None:
        """Holds the link to whatever process fills the post, for as long as the post exists."""
        while True:
            outcome = await self._describe(post)
            if isinstance(outcome, StartFailure):
                post.failure = outcome.message
                post.settled.set()
                post.turned.set()
                log.error("%s", outcome.message)
                await asyncio.sleep(5.0)
                await asyncio.to_thread(ray.kill, post.actor, no_restart=False)
                continue
            link = WorkerLink(outcome, self._router.incarnation, SILENCE_S)
            try:
                await link.open(self._router.reported, self._config.router.connect_timeout_s)
            except ConnectionError as error:
                log.warning("%s", error)
                await asyncio.sleep(RESTART_PAUSE_S)
                continue
            self._router.connect(link)
            self._router.book.set_draining(post.worker_id, post.draining)
            post.description, post.link, post.failure = link.description, link, ""
            post.state = WorkerState.DRAINING if post.draining else WorkerState.READY
            post.settled.set()
            post.turned.set()
            log.info("%s serves at %s as %s", post.worker_id, link.description.address, link.description.incarnation)
            reason = await asyncio.shield(link.lost)
            post.link, post.state = None, WorkerState.LOST
            if post.becoming is None:
                self._count_loss(post, reason)
            post.turned.set()
            self._router.disconnect(link)
            await link.close()

    async def _describe(self, post: Post) -> WorkerDescription | StartFailure:
        """Waits for the post's process to be up. One that lives and does not answer is killed: Ray replaces it."""
        asked_before = post.description is not None
        while True:
            try:
                timeout_s = HUNG_AFTER_S if asked_before else self._config.router.worker_start_timeout_s
                outcome: WorkerDescription | StartFailure = await _result(post.actor.describe.remote(), timeout_s)
                return outcome
            except TimeoutError:
                log.warning("%s does not answer: it is killed", post.worker_id)
                await asyncio.to_thread(ray.kill, post.actor, no_restart=False)
                asked_before = False
            except ActorUnavailableError:
                asked_before = False
                await asyncio.sleep(RESTART_PAUSE_S)
            except (ActorDiedError, RayActorError) as error:
                return StartFailure(f"{post.worker_id}: {str(error).splitlines()[0]}")


async def _result(reference: Any, timeout_s: float) -> Any:
    """The value of a Ray reference, on any event loop."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(reference.future())


# --- the launcher's side --------------------------------------------------------------------------------------------


class RouterHandle:
    """The router's actors, one a replica and the keeper first, as the process sees them that launched them."""

    def __init__(self, actors: Sequence[Any], held: Sequence[socket.socket] = ()) -> None:
        """`held`: sockets that keep the replicas' ports until all of them serve."""
        self._actors = actors
        self._held = held

    def ready(self, timeout_s: float, cancelled: threading.Event) -> Addresses | None:
        """Waits until every replica serves; returns their shared addresses, None if cancelled.

        Raises FleetError with the reason if one cannot serve.
        """
        waiting = [actor.ready.remote() for actor in self._actors]
        deadline = time.monotonic() + timeout_s
        while not cancelled.is_set():
            # Not the keeper first: a follower that fails, fails while the keeper waits for workers.
            done, waiting = ray.wait(waiting, timeout=0.1)
            try:
                outcomes = ray.get(done)
            except RayError as error:
                raise FleetError(f"the router did not start: {str(error).splitlines()[0]}") from error
            for outcome in outcomes:
                if isinstance(outcome, StartFailure):
                    raise FleetError(outcome.message)
                assert isinstance(outcome, Addresses)
                if not waiting:
                    self._let_go()
                    return outcome
            if time.monotonic() > deadline:
                raise FleetError(f"no request went through within {timeout_s:.0f} s")
        return None

    def incidents(self, stopped: threading.Event) -> Iterator[str]:
        """What a person at the terminal should know, as it happens, until the event is set or the router is gone."""
        while not stopped.is_set():
            reference = self._actors[0].incident.remote(INCIDENT_WAIT_S)
            line = ""
            while not stopped.is_set():
                try:
                    line = ray.get(reference, timeout=0.2)
                    break
                except GetTimeoutError:
                    continue
                except RayError:
                    return
            if line:
                yield line

    def stop(self, drain_s: float) -> bool:
        """Drains and ends router and workers; returns whether all requests ended in time."""
        keeper, *followers = self._actors
        try:
            drained: list[bool] = ray.get([actor.drain.remote(drain_s) for actor in self._actors], timeout=drain_s + 60)
            # Followers first, as they hold on to the workers that the keeper then ends.
            ray.get([actor.stop.remote(0.0) for actor in followers], timeout=60)
            ray.get(keeper.stop.remote(0.0), timeout=60)
        except RayError as error:
            log.warning("the router could not be drained: %s", str(error).splitlines()[0])
            return False
        finally:
            self._let_go()
            for actor in (*followers, keeper):
                ray.kill(actor, no_restart=True)
        return all(drained)

    def _let_go(self) -> None:
        for holder in self._held:
            holder.close()


def open_ray(num_cpus: float = 0.0, resources: Mapping[str, float] | None = None) -> bool:
    """Joins the Ray that RAY_ADDRESS names, or brings up one of our own, whose processes end with this one.

    `num_cpus` and `resources` are what the pools ask for: counts for Ray's books, not bounds on the cores in use. A Ray
    of our own offers more of both, so that pools can grow. Returns whether it is our own. Raises FleetError.
    """
    if os.environ.get("RAY_ADDRESS"):
        ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        return False
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would start an idle process for each CPU that we claim to have.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    try:
        with _fewer_processes():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=int(num_cpus) + ROOM_TO_GROW,
                resources={name: amount + ROOM_TO_GROW for name, amount in (resources or {}).items()},
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=128 << 20,
            )
    except Exception as error:
        # Ray raises bare Exception and RuntimeError for a node that does not come up.
        ray.shutdown()
        raise FleetError(f"Ray did not start: {str(error).splitlines()[0]}") from error
    return True


@contextmanager
def _fewer_processes() -> Iterator[None]:
    """Has `ray.init` leave out the autoscaler and the log monitor, and give its node's agent any free port.

    That port is fixed otherwise, and where another Ray has it no worker starts for the 4 s in which the agent tries to
    get it. These are options of `ray start` that `ray.init` does not pass on; one that a Ray does not know is left out.
    """
    module: Any = parameter
    made = module.RayParams
    wanted = {"dashboard_agent_listen_port": 0, "no_monitor": True, "include_log_monitor": False}
    known = inspect.signature(made).parameters
    module.RayParams = partial(made, **{name: value for name, value in wanted.items() if name in known})
    try:
        yield
    finally:
        module.RayParams = made


def close_ray() -> None:
    """Leaves Ray; ends it, and all that runs in it, if it was our own."""
    ray.shutdown()


def start_router(
    config: ClusterConfig, model_dir: Path, factories: Mapping[Role, WorkerFactory], namespace: str = NAMESPACE
) -> RouterHandle:
    """Starts the router's actors, of which the first starts the rest. Ray restarts what dies; workers outlive them.

    Clusters in different namespaces share a Ray and nothing else.
    """
    replicas = config.router.replicas
    config, held = _with_ports(config) if replicas > 1 else (config, [])
    node: NodeAffinitySchedulingStrategy | None = None
    actors: list[Any] = []
    for number in range(replicas):
        actor: Any = (
            ray.remote(RouterHost)
            .options(
                name=f"{ROUTER_NAME}-{number}" if number else ROUTER_NAME,
                namespace=namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=16 + replicas,
                num_cpus=0,
                scheduling_strategy=node,
            )
            .remote(config, model_dir, dict(factories), namespace, number)
        )
        if replicas > 1 and node is None:
            # One port is of one machine.
            node = NodeAffinitySchedulingStrategy(ray.get(actor.node_id.remote()), soft=True)
        actors.append(actor)
    return RouterHandle(actors, held)


def _with_ports(config: ClusterConfig) -> tuple[ClusterConfig, list[socket.socket]]:
    """The same with free ports in place of 0: replicas have to agree on them, and find them again after a restart.

    The sockets keep others from taking the ports, but not the replicas, until they are closed.
    """
    router, held = config.router, []
    family = socket.AF_INET6 if ":" in router.host else socket.AF_INET
    for name in ("port", "http_port"):
        if getattr(router, name) == 0:
            holder = socket.socket(family)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((router.host, 0))
            router = replace(router, **{name: holder.getsockname()[1]})
            held.append(holder)
    return replace(config, router=router), held
