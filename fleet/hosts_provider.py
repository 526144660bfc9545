"""Ray's cluster launcher on machines that one has: node types over lists of hosts, which are reached by ssh.

Owns: which host is in use as what, and that Ray is stopped on a host that is given up. Refuses to know: what a node
type offers and what is started there, which are the launcher file's, and Baton.

    provider:
      type: external
      module: baton.fleet.hosts_provider.HostsProvider
      head_ip: 10.0.0.10
      hosts: {prefill: [10.0.0.11, 10.0.0.12], decode: [10.0.0.13]}     # by node type
      drain_command: baton stop                                         # on the head, before `ray down` ends it
      stop_commands: [ray stop]                                         # on a host that is given up

    host:  free --create_node--> in use, under an id of this launch --terminate_node, Ray is stopped--> free

Ray's own provider for fixed machines, `local`, knows one type of them, and its `ray down` leaves workers running. This
one runs in two places, each with a book of its own; the head's knows the workers, as the autoscaler there starts them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

log = logging.getLogger(__name__)

Tags = dict[str, str]

BOOKS = Path("~/.baton/hosts")
KEY_ON_HEAD = "~/ray_bootstrap_key.pem"
LAUNCH = re.compile(r"_\d+$")  # no host is named so: an underscore is not for host names
STOP_TIMEOUT_S = 10
STOPS_AT_ONCE = 16


@dataclass(slots=True)
class Book:
    """`nodes`: tags of the nodes in use, by id. `launches`: the number of each host's last launch."""

    nodes: dict[str, Tags] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)

    def in_use(self) -> set[str]:
        return set(map(address_of, self.nodes))

    def take(self, hosts: Sequence[str], count: int, tags: Tags) -> dict[str, Tags]:
        """Puts up to `count` free hosts to use and returns them by their new ids.

        The one that was launched longest ago comes first: a dead host does not keep a sound one from its turn. Each
        launch has an id of its own, as Ray never again starts a node of which it has seen the end.
        """
        free = sorted(set(hosts) - self.in_use(), key=lambda host: (self.launches.get(host, 0), hosts.index(host)))
        taken: dict[str, Tags] = {}
        for host in free[:count]:
            number = self.launches[host] = 1 + max(self.launches.values(), default=0)
            taken[f"{host}_{number}"] = dict(tags)
        self.nodes |= taken
        return taken


def address_of(node_id: str) -> str:
    """A host's address; the id of a head is its address."""
    return LAUNCH.sub("", node_id)


class HostsProvider(NodeProvider):
    """See the file's docstring. Ray makes one in several processes of a machine and calls it from several threads."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._head: str = provider_config["head_ip"]
        self._hosts: dict[str, list[str]] = provider_config["hosts"]
        self._path = BOOKS.expanduser() / f"{cluster_name}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._given_up: set[str] = set()
        self._tears_down = False
        known = {self._head, *self._workers()}
        with self._book() as book:
            for node_id in [node_id for node_id in book.nodes if address_of(node_id) not in known]:
                del book.nodes[node_id]
            if self._head in _own_addresses():
                book.nodes.setdefault(self._head, self._head_tags())

    def _workers(self) -> list[str]:
        return [host for hosts in self._hosts.values() for host in hosts]

    def _head_tags(self) -> Tags:
        return {
            TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
            TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            TAG_RAY_NODE_NAME: f"ray-{self.cluster_name}-head",
            TAG_RAY_USER_NODE_TYPE: self.provider_config["head_node_type"],
        }

    @contextmanager
    def _book(self) -> Iterator[Book]:
        """The book, for nobody else at the same time; what is changed in it is written when the block ends."""
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            book = Book(**json.loads(self._path.read_text())) if self._path.exists() else Book()
            before = json.dumps(asdict(book))
            yield book
            after = json.dumps(asdict(book))
            if after != before:
                fresh = self._path.with_suffix(".new")
                fresh.write_text(after)
                fresh.replace(self._path)

    # --- what Ray asks ----------------------------------------------------------------------------------------------

    def non_terminated_nodes(self, tag_filters: Tags) -> list[str]:
        with self._book() as book:
            return [node_id for node_id, tags in book.nodes.items() if tag_filters.items() <= tags.items()]

    def nodes_for_teardown(self, tag_filters: Tags) -> list[str]:
        """All hosts: `ray down` runs where the book does not tell which workers the head has started."""
        self._tears_down = True
        hosts = [self._head] if tag_filters[TAG_RAY_NODE_KIND] == NODE_KIND_HEAD else self._workers()
        return [host for host in hosts if host not in self._given_up]

    def is_running(self, node_id: str) -> bool:
        with self._book() as book:
            return node_id in book.nodes

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> Tags:
        with self._book() as book:
            return dict(book.nodes.get(node_id, {}))

    def set_node_tags(self, node_id: str, tags: Tags) -> None:
        with self._book() as book:
            if node_id in book.nodes:
                book.nodes[node_id].update(tags)

    def internal_ip(self, node_id: str) -> str:
        return address_of(node_id)

    def external_ip(self, node_id: str) -> str:
        return address_of(node_id)

    # --- what Ray wants done ----------------------------------------------------------------------------------------

    def create_node(self, node_config: dict[str, Any], tags: Tags, count: int) -> dict[str, Tags]:
        with self._book() as book:
            if tags[TAG_RAY_NODE_KIND] == NODE_KIND_HEAD:
                book.nodes[self._head] = dict(tags)
                return {self._head: dict(tags)}
            node_type = tags[TAG_RAY_USER_NODE_TYPE]
            hosts = self._hosts.get(node_type, [])
            taken = book.take(hosts, count, tags)
        if not taken:
            raise NodeLaunchException(
                "NoFreeHost", f"all {len(hosts)} hosts of {node_type} are in use", (None, None, None)
            )
        return taken

    def terminate_node(self, node_id: str) -> None:
        """Stops Ray on the host, if it can be reached, and frees it."""
        if self._is_of_the_past(node_id):
            return
        runner = super().get_command_runner(
            f"{node_id}: ", node_id, self.provider_config["auth"], self.cluster_name, subprocess, True
        )
        commands = list(self.provider_config.get("stop_commands", ["ray stop"]))
        if node_id == self._head:
            # Or the next cluster there would wait for nodes of this one.
            commands.append(f"rm -f {BOOKS}/{self._path.name}")
        for command in commands:
            try:
                runner.run(command, timeout=STOP_TIMEOUT_S)
            except (click.ClickException, subprocess.SubprocessError, OSError) as error:
                log.warning("%s on %s: %s", command, address_of(node_id), str(error).partition("\n")[0])
                break
        self._given_up.add(node_id)
        with self._book() as book:
            book.nodes.pop(node_id, None)

    def _is_of_the_past(self, node_id: str) -> bool:
        """Whether a node ended long ago. An autoscaler that starts anew gives up all that had ended before it: launches
        whose host may be in use under another by now, and the head of before, on whose machine it runs itself."""
        if node_id == self._head:
            return not self._tears_down and self._head in _own_addresses()
        return LAUNCH.search(node_id) is not None and not self.is_running(node_id)

    def terminate_nodes(self, node_ids: list[str]) -> None:
        """All at once: each takes some seconds, and one that is cut off the whole timeout."""
        with ThreadPoolExecutor(STOPS_AT_ONCE) as pool:
            list(pool.map(self.terminate_node, node_ids))

    def get_command_runner(self, log_prefix: str, node_id: str, *rest: Any, **options: Any) -> Any:
        runner = super().get_command_runner(log_prefix, node_id, *rest, **options)
        drain = self.provider_config.get("drain_command", "")
        return DrainingRunner(runner, drain) if drain and node_id == self._head else runner

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """Gives the provider what of the file it needs later. Raises ValueError for hosts that do not fit the types."""
        provider, types = cluster_config["provider"], cluster_config["available_node_types"]
        _check_hosts(provider, set(types) - {cluster_config["head_node_type"]})
        provider["head_node_type"] = cluster_config["head_node_type"]
        provider["auth"] = dict(cluster_config["auth"])
        return cluster_config

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        if "ssh_private_key" in cluster_config["provider"]["auth"]:
            cluster_config["provider"]["auth"]["ssh_private_key"] = KEY_ON_HEAD
        return cluster_config


class DrainingRunner:
    """The head's runner of commands, for `ray down`: it has no hook before the first thing that it does, `ray stop`."""

    def __init__(self, runner: Any, drain: str) -> None:
        self._runner = runner
        self._drain = drain

    def run(self, command: str, *arguments: Any, **options: Any) -> Any:
        if command == "ray stop":
            try:
                self._runner.run(self._drain)
            except (click.ClickException, subprocess.SubprocessError, OSError) as error:
                log.warning("%s: %s", self._drain, str(error).partition("\n")[0])
        return self._runner.run(command, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def _check_hosts(provider: dict[str, Any], types: set[str]) -> None:
    hosts = provider.get("hosts")
    if not isinstance(hosts, dict) or not all(isinstance(found, list) for found in hosts.values()):
        raise ValueError(f"provider.hosts is {hosts!r}, must be a list of addresses for each node type")
    if unknown := sorted(set(hosts) - types):
        raise ValueError(f"provider.hosts.{unknown[0]} is no node type that workers have: {', '.join(sorted(types))}")
    seen = {provider["head_ip"]: "head_ip"}
    for node_type, addresses in hosts.items():
        for address in addresses:
            if address in seen:
                raise ValueError(f"provider.hosts.{node_type} has {address}, which is in {seen[address]} too")
            seen[address] = f"hosts.{node_type}"


def _own_addresses() -> set[str]:
    return {address.address for found in psutil.net_if_addrs().values() for address in found}
