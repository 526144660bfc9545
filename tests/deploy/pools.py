"""Whether the pools of a configuration have room on the machines that a deployment offers them.

Owns: that one question, how an image and a lock are pinned, how YAML is read. Refuses to know: launcher files and
manifests, whose machines it is told as `Machines`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from baton.router.config import ClusterConfig, PoolConfig

ROUTER = "router"
"""The resource of the machine on which the router runs."""


@dataclass(frozen=True)
class Machines:
    """A kind of machines: what one offers in Ray's words, and how many there may be."""

    name: str
    resources: Mapping[str, float]
    at_most: int


class StrictLoader(yaml.SafeLoader):
    """Refuses what a plain loader takes in silence: a key that is there twice, of which the last one counts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                name = self.construct_object(key, deep=True)
                if name in seen:
                    raise yaml.MarkedYAMLError(problem=f"{name!r} is there twice", problem_mark=key.start_mark)
                seen.add(name)
        return super().construct_mapping(node, deep)


def need(pool: PoolConfig) -> dict[str, float]:
    """What one worker takes: all ranks of it, on one machine."""
    ranks = pool.engine.tensor_parallel
    wanted = {"CPU": pool.num_cpus * ranks, "GPU": pool.num_gpus * ranks}
    if pool.resource:
        wanted[pool.resource] = 1.0
    return {name: amount for name, amount in wanted.items() if amount}


def room(kind: Machines, wanted: Mapping[str, float]) -> int:
    """How many such workers one machine holds."""
    return min(int(kind.resources.get(name, 0.0) // amount) for name, amount in wanted.items())


def pools_fit(config: ClusterConfig, kinds: Sequence[Machines]) -> Iterator[str]:
    """Each pool on machines that offer its resource, and all pools together on all machines."""
    asked_for = {pool.resource for pool in config.pools}
    for kind in kinds:
        for name in set(kind.resources) - asked_for - {"CPU", "GPU", ROUTER}:
            yield f"{kind.name} offers {name!r}, which no pool asks for"
    for pool in config.pools:
        wanted = need(pool)
        hosts = [kind for kind in kinds if not pool.resource or kind.resources.get(pool.resource)]
        if not hosts:
            yield f"pool {pool.name} asks for {pool.resource!r}, which no machine offers"
            continue
        if not any(room(kind, wanted) for kind in hosts):
            names = ", ".join(kind.name for kind in hosts)
            yield f"one worker of pool {pool.name} takes {wanted}, more than a machine of {names} has"
            continue
        capacity = sum(room(kind, wanted) * kind.at_most for kind in hosts)
        if pool.size > capacity:
            yield f"pool {pool.name} has size {pool.size}, its machines hold at most {capacity} workers"
    total = {name: sum(kind.resources.get(name, 0.0) * kind.at_most for kind in kinds) for name in ("CPU", "GPU")}
    for name, offered in total.items():
        taken = sum(pool.size * need(pool).get(name, 0.0) for pool in config.pools)
        if taken > offered:
            yield f"the pools take {taken:g} {name} together, the machines offer {offered:g}"


def open_without_keys(config: ClusterConfig) -> Iterator[str]:
    router = config.router
    if router.host not in ("127.0.0.1", "::1") and not router.api_keys_file:
        yield f"the router listens on {router.host} and asks for no key"


def image_is_pinned(image: str) -> bool:
    """By digest, or by a tag that says more than `latest`."""
    if "@sha256:" in image:
        return True
    tag = image.rpartition("/")[2].partition(":")[2]
    return bool(re.search(r"\d", tag))


def unpinned(install: str, locks: Sequence[str]) -> str:
    """What is wrong with a `pip install`; empty if its packages come from one of the locks or are pinned themselves."""
    named = re.findall(r"(?:--constraint|--requirement|-c|-r)[ =](\S+)", install)
    for name in named:
        if not any(name.rpartition("/")[2] == lock for lock in locks):
            return f"names {name}, which is not a lock of this repository"
    if named:
        return ""
    words = [word.strip("\"'") for word in install.split("pip install", 1)[1].split()]
    loose = [word for word in words if not word.startswith("-") and "==" not in word]
    return f"takes {loose[0]} in whatever version" if loose else ""
