"""A cluster file with other pool sizes, and everything else as it was, comments included.

Owns: where in the text a pool's size stands. Refuses to know: which sizes are good, and what else is in the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from baton.capacity.grid import Shape
from baton.proto.messages import Role
from baton.router import config
from baton.router.config import ConfigError


@dataclass(frozen=True, slots=True)
class _Edit:
    """Text to put in place of what stands from `start` to `end`."""

    start: int
    end: int
    text: str


def resized(text: str, shape: Shape) -> str:
    """The file's text for another shape. A role without a pool gets one. Raises ConfigError for a file that cannot be
    a cluster's, or that has several pools of a role."""
    try:
        before = config.from_mapping(yaml.safe_load(text))
        root = yaml.compose(text)
    except yaml.YAMLError as error:
        raise ConfigError("", f"is not YAML: {error}") from error
    sizes = {Role.PREFILL: shape.prefill, Role.DECODE: shape.decode, Role.COLOCATED: shape.colocated}
    wanted = before.resized(prefill=shape.prefill, decode=shape.decode, colocated=shape.colocated)
    pools = _below(_below(_below(root, "metadata"), "baton"), "pools")
    edits = [_sized(_below(pools, pool.name), sizes.pop(pool.role)) for pool in before.pools]
    edits += [_added(text, pools, role, size) for role, size in sizes.items() if size]
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    after = config.from_mapping(yaml.safe_load(text))
    sizes_after = {role: (after.size(role), wanted.size(role)) for role in Role}
    if any(found != meant for found, meant in sizes_after.values()):
        raise ConfigError(
            "metadata.baton.pools", "cannot be edited in place: write each pool's size on a line of its own"
        )
    return text


def _sized(pool: yaml.MappingNode, size: int) -> _Edit:
    for key, value in pool.value:
        if key.value == "size":
            return _Edit(value.start_mark.index, value.end_mark.index, str(size))
    key, value = pool.value[0]
    end = value.end_mark.index
    if pool.flow_style:
        return _Edit(end, end, f", size: {size}")
    return _Edit(key.start_mark.index, key.start_mark.index, f"size: {size}\n{' ' * key.start_mark.column}")


def _added(text: str, pools: yaml.MappingNode, role: Role, size: int) -> _Edit:
    first = pools.value[0][0]
    start, entry = first.start_mark, f"{role.value}: {{role: {role.value}, size: {size}}}"
    if pools.flow_style:
        return _Edit(start.index, start.index, f"{entry}, ")
    return _Edit(start.index, start.index, f"{entry}\n{' ' * start.column}")


def _below(node: yaml.Node | None, name: str) -> yaml.MappingNode:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == name and isinstance(value, yaml.MappingNode):
                return value
    raise ConfigError(name, "is not written as a mapping")
