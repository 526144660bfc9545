"""The workers of every pool: that there are as many as there should be, and that each of them serves.

Owns: which posts there are, drains, scaling, changes of role. Refuses to know: requests and tokens, how one post is
filled (`post`), and what a process does inside (`actors`).

    pool's size, or what was noted of it --> posts, each kept on its own; one that waits for a machine holds up nothing
    scale, drain: posts come and go      --> noted, so that the router's next process has the same ones

A worker's role is that of its pool until it is changed. The process notes a change where its successor looks: Ray's own
store, which outlives workers and routers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress

from baton.fleet.actors import WorkerFactory
from baton.fleet.notes import NotedNodes, NotedWorkers
from baton.fleet.place import live_nodes
from baton.fleet.post import CALLS, Bell, Post, Site
from baton.proto.messages import Role, RoleChange, RoleKept
from baton.proto.settings import WorkerSettings
from baton.router.cluster import Departure, Member, WorkforceError
from baton.router.config import ClusterConfig, PoolConfig
from baton.router.placement import can_serve
from baton.router.roles import allowed_drain_s, departure_refusal, refusal
from baton.router.router import Router

log = logging.getLogger(__name__)

MAX_INCIDENTS = 100


class FleetError(WorkforceError):
    """A cluster that cannot be brought up; the message is for a person."""


class Fleet:
    """Keeps every pool at its size; a `cluster.Workforce`. Belongs to the router's event loop."""

    def __init__(
        self, config: ClusterConfig, router: Router, factories: Mapping[Role, WorkerFactory], namespace: str
    ) -> None:
        self._namespace = namespace
        self._config = config
        self._router = router
        self._bell = Bell()
        self._site = Site(
            router, factories, namespace, self._bell, self.tell, ThreadPoolExecutor(CALLS, thread_name_prefix="ray")
        )
        self._posts: dict[str, Post] = {}
        self._avoid: set[str] = set()
        self._scaling = {pool.name: asyncio.Lock() for pool in config.pools}
        self._changes: set[asyncio.Task[RoleChange]] = set()
        self._incidents: deque[str] = deque(maxlen=MAX_INCIDENTS)
        self._happened = asyncio.Event()
        # Where all have to come, what keeps one from coming is the reason for which nothing serves.
        self._telling = config.router.ready_with == "some"

    async def open(self, restarted: bool = False) -> None:
        """Fills every pool. Returns when each worker serves, or, with `ready_with: some`, as soon as requests can be
        served; the rest then comes when it comes.

        Raises FleetError with the first worker's failure, with `some` if all have failed. `restarted`: the cluster has
        served before, so it returns as with `some` and raises nothing.
        """
        self._avoid |= set(await self._site.call(NotedNodes(self._namespace).read))
        for pool in self._config.pools:
            noted = await self._site.call(NotedWorkers(self._namespace, pool.name).read)
            self._add(pool, range(pool.size) if noted is None else noted)
        if restarted or self._config.router.ready_with == "some":
            await self._some_serve(restarted)
        else:
            await self._all_serve()
        self._telling = True

    async def _all_serve(self) -> None:
        timeout_s, posts = self._config.router.worker_start_timeout_s, list(self._posts.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._bell.until(lambda: all(post.description or post.failure for post in posts))
        missing = [post for post in posts if post.description is None]
        for post in missing:
            if post.failure:
                raise FleetError(post.failure)
        if missing:
            why = next((f": {post.lacking}" for post in missing if post.lacking), "")
            raise FleetError(f"{len(missing)} of {len(posts)} workers did not start within {timeout_s:.0f} s{why}")

    async def _some_serve(self, restarted: bool) -> None:
        def hopeless() -> bool:
            posts = self._posts.values()
            return not restarted and bool(posts) and all(post.failure for post in posts)

        await self._bell.until(lambda: can_serve(self._serving()) or hopeless())
        if not can_serve(self._serving()):
            raise FleetError(next(post.failure for post in self._posts.values()))

    async def close(self) -> None:
        """Ends every process of every pool."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*(self._remove(post) for post in list(self._posts.values())))
        await self._site.call(self._forget)
        self._site.calls.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        NotedNodes(self._namespace).forget()
        for pool in self._config.pools:
            NotedWorkers(self._namespace, pool.name).forget()

    def members(self) -> list[Member]:
        return list(self._posts.values())

    # --- incidents --------------------------------------------------------------------------------------------------

    def tell(self, incident: str) -> None:
        """Keeps a line for the person at the terminal."""
        if self._telling:
            self._incidents.append(incident)
            self._happened.set()

    async def incident(self, timeout_s: float) -> str:
        """The oldest incident not yet told; empty if none comes in that time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._incidents:
                    self._happened.clear()
                    await self._happened.wait()
        return self._incidents.popleft() if self._incidents else ""

    # --- which posts there are --------------------------------------------------------------------------------------

    async def drain(self, worker_id: str, timeout_s: float) -> int:
        """Takes a worker out of placement; legs not done in time move to other workers. Returns how many moved."""
        post = self._posts[worker_id]
        async with post.changing:
            self._require(post)
            post.set_draining(True)
            moved, elsewhere = await asyncio.gather(
                post.empty(timeout_s), self._router.replicas.drain(worker_id, timeout_s)
            )
            return moved + elsewhere

    async def dismiss(self, worker_id: str, timeout_s: float, force: bool) -> Departure:
        """See `Workforce`."""
        post = self._posts[worker_id]
        async with self._scaling[post.pool]:
            self._require(post)
            self._refuse_departure([post], force)
            moved = await self._retire([post], timeout_s)
            return Departure((worker_id,), moved)

    async def vacate(self, host: str, timeout_s: float, force: bool) -> Departure:
        """See `Workforce`. The places that are lost are looked for elsewhere before anything is drained."""
        nodes = await self._site.call(live_nodes)
        gone = {node.node_id for node in nodes if host in (node.address, node.name, node.node_id)}
        if not gone:
            raise KeyError(host)
        async with AsyncExitStack() as stack:
            for lock in self._scaling.values():
                await stack.enter_async_context(lock)
            leaving = [post for post in self._posts.values() if post.node_id in gone]
            before = self._avoid
            self._avoid = gone | (before & {node.node_id for node in nodes})
            coming: list[Post] = []
            try:
                for pool in self._config.pools:
                    coming += await self._grow(pool, sum(post.pool == pool.name for post in leaving))
                await self._replaced(leaving, coming)
                self._refuse_departure(leaving, force)
            except BaseException:
                self._avoid = before
                await self._let_go(coming)
                raise
            await self._site.call(NotedNodes(self._namespace).write, self._avoid)
            moved = await self._retire(leaving, timeout_s)
            return Departure(tuple(post.worker_id for post in leaving), moved)

    async def _replaced(self, leaving: Collection[Post], coming: Collection[Post]) -> None:
        """Where nothing could be served without those who leave, waits for those who come, as far as they do."""

        def settled() -> bool:
            return can_serve(self._serving(leaving)) or all(post.serves or post.note for post in coming)

        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.router.worker_start_timeout_s):
                await self._bell.until(settled)

    async def scale(self, pool: str, size: int) -> None:
        """Brings a pool to a size: new workers serve, or wait for a machine with room; surplus ones are drained and
        gone, first those that do not serve.

        Raises KeyError for an unknown pool, FleetError if a new worker cannot start; it is then taken back.
        """
        config = next((config for config in self._config.pools if config.name == pool), None)
        if config is None:
            raise KeyError(pool)
        async with self._scaling[pool]:
            posts = self._pool(pool)
            if size > len(posts):
                added = await self._grow(config, size - len(posts))
                await self._bell.until(lambda: all(post.description or post.note for post in added))
                failed = [post for post in added if post.failure]
                if failed:
                    reason = failed[0].failure
                    await self._let_go(failed)
                    raise FleetError(reason)
            surplus = sorted(posts, key=lambda post: (post.link is not None, -post.number))[: max(0, len(posts) - size)]
            await self._retire(surplus, self._config.router.drain_timeout_s)

    def _pool(self, name: str) -> list[Post]:
        return [post for post in self._posts.values() if post.pool == name]

    async def _grow(self, pool: PoolConfig, count: int) -> list[Post]:
        """So many more workers. They are noted before they are, and so found if this process ends on the way."""
        if not count:
            return []
        first = 1 + max((post.number for post in self._pool(pool.name)), default=-1)
        numbers = range(first, first + count)
        await self._note(pool.name, numbers)
        return self._add(pool, numbers)

    def _serving(self, but: Collection[Post] = ()) -> set[Role]:
        """Roles of those that take requests now."""
        return {post.becoming or post.role for post in self._posts.values() if post.serves and post not in but}

    def _refuse_departure(self, leaving: Collection[Post], force: bool) -> None:
        names = [post.worker_id for post in leaving if post.serves]
        why_not = departure_refusal(names, self._serving(leaving))
        if why_not and can_serve(self._serving()) and not force:
            raise WorkforceError(why_not)

    async def _retire(self, posts: Collection[Post], timeout_s: float) -> int:
        """Drains workers and ends them; returns how many legs had to move."""
        for post in posts:
            post.set_draining(True)
        moved = await asyncio.gather(*(self.drain(post.worker_id, timeout_s) for post in posts))
        await self._let_go(posts)
        return sum(moved)

    async def _let_go(self, posts: Collection[Post]) -> None:
        """Ends workers, and notes it then: until they have ended, who finds them noted finds them."""
        await asyncio.gather(*(self._remove(post) for post in posts))
        for pool in {post.pool for post in posts}:
            await self._note(pool)

    def _add(self, pool: PoolConfig, numbers: Iterable[int]) -> list[Post]:
        """New posts; workers of their names that live already are found."""
        settings = self._config.router
        loopback = settings.host in ("127.0.0.1", "::1") and not settings.worker_network
        added = []
        for number in numbers:
            post = Post(
                WorkerSettings(
                    worker_id=f"{pool.name}-{number}",
                    pool=pool.name,
                    role=pool.role,
                    engine=pool.engine,
                    scheduler=pool.scheduler,
                    transfer=self._config.transfer,
                    observability=self._config.observability,
                    host=settings.host if loopback else "",
                    ports=settings.worker_port_range,
                    model_name=self._router.model_name,
                ),
                pool,
                self._site,
                self._avoid,
            )
            self._posts[post.worker_id] = post
            post.open()
            added.append(post)
        return added

    async def _remove(self, post: Post) -> None:
        self._posts.pop(post.worker_id, None)
        await post.close()
        self._bell.ring()

    async def _note(self, pool: str, more: Iterable[int] = ()) -> None:
        numbers = [*(post.number for post in self._pool(pool)), *more]
        await self._site.call(NotedWorkers(self._namespace, pool).write, numbers)

    def _require(self, post: Post) -> None:
        """Raises KeyError if the post was given up while somebody waited for it."""
        if self._posts.get(post.worker_id) is not post:
            raise KeyError(post.worker_id)

    # --- changes of role --------------------------------------------------------------------------------------------

    async def set_role(self, worker_id: str, role: Role, timeout_s: float | None, force: bool) -> RoleChange:
        """See `Workforce`. The change goes on when the caller has gone away."""
        change = asyncio.create_task(self._set_role(self._posts[worker_id], role, timeout_s, force))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)

    async def _set_role(self, post: Post, role: Role, timeout_s: float | None, force: bool) -> RoleChange:
        settings = self._config.router
        async with post.changing:
            self._require(post)
            others = [
                other.becoming or other.role
                for other in self._posts.values()
                if other is not post and not other.lacking and (other.becoming or not other.draining)
            ]
            if role is not Role.COLOCATED and self._config.transfer.connector == "local":
                raise WorkforceError("the connector 'local' moves no KV between processes: workers stay colocated")
            why_not = refusal(post.worker_id, role, others)
            if why_not and not force:
                raise WorkforceError(why_not)
            wanted_s = settings.drain_timeout_s if timeout_s is None else timeout_s
            was_draining, post.becoming = post.draining, role
            post.set_draining(True)
            try:
                change = await self._turn(post, role, allowed_drain_s(wanted_s, others, settings.no_worker_grace_s))
            except BaseException:
                post.set_draining(was_draining)
                raise
            else:
                post.set_draining(False)
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
                    await self._bell.until(lambda: post.link is not None or post.note)
                    if post.link is None:
                        raise FleetError(f"{post.worker_id} does not serve: {post.note}")
                    change = await post.turn(role, drain_s)
                if isinstance(change, RoleKept):
                    raise WorkforceError(change.reason)
                await self._bell.until(lambda: post.link is not None and post.role is role)
        except TimeoutError:
            raise FleetError(f"{post.worker_id} was no {role} worker {limit_s:.0f} s later") from None
        log.info("%s became a %s worker after %.3f s of draining", post.worker_id, role, change.drain_s)
        return change
