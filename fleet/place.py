"""A worker's place in a cluster: what it takes of one machine, as soon as a machine has it.

Owns: Ray's placement groups, one a worker, and the names of machines. Refuses to know: what runs in a place.

    asked for, or found again by its name --a machine has room--> on a node --the machine is lost--> asked for again ...

A worker and its further ranks share one bundle, so they are on one machine. Each worker has a group of its own: one
that finds no room holds up no other, and Ray's autoscaler sees what is missing. Ray gives a bundle to the machine that
has most left of what it takes, which spreads a pool over the machines that offer its resource. Calls block: they ask
Ray's head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import ray
from ray._raylet import PlacementGroupID
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODE_LABEL = "ray.io/node-id"
LEAST = 0.0001
"""What Ray can count at all: it knows no place that takes nothing."""


class Place:
    """One worker's; `name` is unique in its Ray. `takes`: amounts of Ray's resources."""

    def __init__(self, name: str, takes: Mapping[str, float], avoid: Collection[str] = ()) -> None:
        """`avoid`: nodes on which it must not be, unless it is there already."""
        self._name = name
        self._takes = {resource: amount for resource, amount in takes.items() if amount} or {"CPU": LEAST}
        self._avoid = sorted(avoid)
        self._group: PlacementGroup | None = None

    def __str__(self) -> str:
        return ", ".join(f"{amount:g} {resource}" for resource, amount in self._takes.items())

    def node_id(self) -> str:
        """Where it is; empty as long as no machine has room. Asks for it, if nobody has yet."""
        if self._group is None:
            self._group = self._found() or self._made()
        known = placement_group_table(self._group)
        if known.get("state", "REMOVED") == "REMOVED":
            self._group = None
        return str(known["bundles_to_node_id"][0]) if known.get("state") == "CREATED" else ""

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """That of an actor which lives here."""
        assert self._group is not None, "it is known to be nowhere"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)

    def remove(self) -> None:
        """Gives it back; whatever runs there ends."""
        group = self._group or self._found()
        if group is not None:
            remove_placement_group(group)
        self._group = None

    def _found(self) -> PlacementGroup | None:
        try:
            group: PlacementGroup = get_placement_group(self._name)
        except ValueError:
            return None
        return group

    def _made(self) -> PlacementGroup:
        elsewhere = [{NODE_LABEL: f"!in({','.join(self._avoid)})"}] if self._avoid else None
        group: PlacementGroup = placement_group(
            [self._takes], name=self._name, lifetime="detached", bundle_label_selector=elsewhere
        )
        return group


@dataclass(frozen=True, slots=True)
class Node:
    """A machine in Ray. `node_id` is of one life in it: one that leaves and comes back has another."""

    node_id: str
    address: str
    name: str


def live_nodes() -> list[Node]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["NodeID"], node["NodeManagerAddress"], node.get("NodeName", "")) for node in alive]


def remove_places(prefix: str) -> None:
    """Removes all whose names begin so."""
    for known in placement_group_table().values():
        if known["name"].startswith(prefix) and known["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(known["placement_group_id"]))))
