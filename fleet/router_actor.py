"""What runs around a router inside the process that Ray starts for it.

Owns: the actor of a router replica: the order in which it opens, drains and ends. Refuses to know: requests and tokens
(`baton.router`), and how workers are made (`fleet`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

from baton.fleet.actors import LoopThread, StartFailure, WorkerFactory, result
from baton.fleet.fleet import Fleet
from baton.proto.messages import Role
from baton.router.cluster import ClusterService
from baton.router.config import ClusterConfig
from baton.router.follower import Follower, FollowerService
from baton.router.keeper import KeeperService
from baton.router.replicas import PeerServer
from baton.router.router import Router
from baton.router.server import Addresses, RouterServer
from baton.router.tokenizer import Tokenizer
from baton.telemetry.logs import configure as configure_logs

log = logging.getLogger(__name__)

ROUTER_NAME = "baton-router"
FIND_S = 10.0


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
        address: str = await result(actor.peer_address.remote(), FIND_S)
    except (RayError, ValueError, TimeoutError) as error:
        raise OSError(f"{name} does not answer: {str(error).partition(chr(10))[0] or type(error).__name__}") from error
    return address
