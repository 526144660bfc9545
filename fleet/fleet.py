"""The workers of every pool: that there are as many as there should be, and that each of them serves.

Owns: the places of every pool, their processes' start, restart and removal, drains and changes of role. Refuses to
know: requests and tokens, and what a process does inside (`actors`).

    member:  STARTING --describe, link open--> READY --link lost--> LOST --Ray restarts the process--> STARTING ...
                                                 |--drain--> DRAINING
                                                 '--set_role--> DRAINING --the worker ends the link--> LOST --> READY

A worker's role is that of its pool until it is changed. The process notes a change where its successor looks: Ray's own
store, which outlives workers and routers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.fleet.actors import NotedRole, RankStarter, StartFailure, WorkerFactory, WorkerHost, result
from baton.proto.messages import Role, RoleChange, RoleKept, WorkerDescription
from baton.proto.settings import WorkerSettings
from baton.router.cluster import Member, WorkerState, WorkforceError
from baton.router.config import ClusterConfig, PoolConfig
from baton.router.link import WorkerLink
from baton.router.roles import allowed_drain_s, refusal
from baton.router.router import Router

log = logging.getLogger(__name__)

SILENCE_S = 3.0
HUNG_AFTER_S = 2.0
RESTART_PAUSE_S = 0.1
STOP_S = 5.0
TURN_S = 60.0
"""For how long a worker may be about a change of its role when its legs have had their time."""
MAX_INCIDENTS = 100


class FleetError(WorkforceError):
    """A cluster that cannot be brought up; the message is for a person."""


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
            answer: RoleChange | RoleKept = await result(post.actor.set_role.remote(role, drain_s), drain_s + TURN_S)
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
                cluster_tls=self._config.security.cluster_tls,
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
                await result(post.actor.stop.remote(), STOP_S)
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
            link = WorkerLink(outcome, self._router.incarnation, SILENCE_S, self._router.wire)
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
                outcome: WorkerDescription | StartFailure = await result(post.actor.describe.remote(), timeout_s)
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
