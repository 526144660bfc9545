"""The launcher's side: a Ray to live in, the router's actors in it, and a handle to them.

Owns: how Ray is joined or brought up, the replicas' common ports. Refuses to know: what the actors do.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import parameter
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.fleet.actors import StartFailure, WorkerFactory
from baton.fleet.fleet import FleetError
from baton.fleet.notes import NAMESPACE, forget_all
from baton.fleet.place import remove_places
from baton.fleet.router_actor import ROUTER_NAME, FindModel, RouterHost
from baton.proto.messages import Role
from baton.router.config import ClusterConfig
from baton.router.server import Addresses

log = logging.getLogger(__name__)

ROOM_TO_GROW = 64
INCIDENT_WAIT_S = 10.0
ANSWER_S = 2.0
START_S = 60.0
MAX_REPLICAS = 64
ROUTER_RESOURCE, ROUTER_TAKES = "router", 0.001
"""Machines that offer this resource are the ones for routers; all replicas together take less than 1 of it."""


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

    def runs_as(self, config: ClusterConfig) -> bool:
        """Whether the actors, which may have been there before, run with this configuration."""
        try:
            running: ClusterConfig = ray.get(self._actors[0].config.remote(), timeout=START_S)
        except RayError as error:
            raise FleetError(f"the router does not answer: {str(error).splitlines()[0]}") from error
        ours, theirs = config.router, running.router
        # Where any port would do, it may have one by now.
        same_ports = replace(theirs, port=ours.port and theirs.port, http_port=ours.http_port and theirs.http_port)
        return replace(running, router=same_ports) == config

    def incidents(self, stopped: Callable[[], bool]) -> Iterator[str]:
        """What a person at the terminal should know, as it happens, until that is so or the router is gone."""
        while not stopped():
            reference = self._actors[0].incident.remote(INCIDENT_WAIT_S)
            line = ""
            while not stopped():
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

    def gone(self) -> bool:
        """Whether the keeper has ended for good: somebody else has stopped the cluster."""
        try:
            ray.get(self._actors[0].node_id.remote(), timeout=ANSWER_S)
        except ActorDiedError:
            return True
        except RayError:
            return False
        return False

    def _let_go(self) -> None:
        for holder in self._held:
            holder.close()


def open_ray(num_cpus: float = 0.0, resources: Mapping[str, float] | None = None) -> bool:
    """Joins the Ray that RAY_ADDRESS names, or brings up one of our own, whose processes end with this one.

    `num_cpus` and `resources` are what the pools ask for: counts for Ray's books, not bounds on the cores in use. A Ray
    of our own offers more of both, so that pools can grow. Returns whether it is our own. Raises FleetError.
    """
    if joins_ray():
        join_ray()
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


def joins_ray() -> bool:
    """Whether there is a Ray to join, instead of bringing up one of our own."""
    return bool(os.environ.get("RAY_ADDRESS"))


def join_ray(address: str = "") -> None:
    """Joins the Ray at an address; without one, that of RAY_ADDRESS, or the one of this machine. Raises FleetError."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise FleetError(f"no Ray to join at {address}: {str(error).splitlines()[0]}") from error


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
    config: ClusterConfig,
    model_dir: Path,
    factories: Mapping[Role, WorkerFactory],
    namespace: str = NAMESPACE,
    find_model: FindModel | None = None,
) -> RouterHandle:
    """Starts the router's actors, of which the first starts the rest. Ray restarts what dies; workers outlive them.
    Those that live already are found.

    Clusters in different namespaces share a Ray and nothing else. `find_model`: finds the model's directory on whatever
    machine the router is; without it, that is `model_dir` everywhere. Machines that offer the resource `router` get the
    router, if there are any.
    """
    replicas = config.router.replicas
    resources = {ROUTER_RESOURCE: ROUTER_TAKES} if ROUTER_RESOURCE in ray.cluster_resources() else None
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
                resources=resources,
                scheduling_strategy=node,
            )
            .remote(config, model_dir, dict(factories), namespace, number, find_model)
        )
        if replicas > 1 and node is None:
            # One port is of one machine.
            node = NodeAffinitySchedulingStrategy(ray.get(actor.node_id.remote()), soft=True)
        actors.append(actor)
    return RouterHandle(actors, held)


def find_router(namespace: str = NAMESPACE) -> RouterHandle | None:
    """The router that runs in this Ray, if one does."""
    names = _actors_of(namespace)
    wanted = [ROUTER_NAME, *(f"{ROUTER_NAME}-{number}" for number in range(1, MAX_REPLICAS))]
    actors = [ray.get_actor(name, namespace) for name in wanted if name in names]
    return RouterHandle(actors) if actors else None


def clear(namespace: str = NAMESPACE) -> int:
    """Ends whatever of a cluster its router has left behind; returns how many actors that were."""
    left = _actors_of(namespace)
    for name in left:
        # It may have ended meanwhile.
        with suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace), no_restart=True)
    remove_places(f"{namespace}-")
    forget_all(namespace)
    return len(left)


def _actors_of(namespace: str) -> list[str]:
    """The names of the actors that live in a namespace."""
    known = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in known if actor["namespace"] == namespace]


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
