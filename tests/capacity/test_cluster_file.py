"""Sizes are written into a cluster file as a person would: two numbers change, and nothing else."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import yaml

from baton.capacity.cluster_file import resized
from baton.capacity.grid import Shape
from baton.proto.messages import Role
from baton.router import config
from baton.router.config import ConfigError

CLUSTER = (Path(__file__).resolve().parents[2] / "cluster.yaml").read_text(encoding="utf-8")
FLOW = "metadata: {baton: {pools: {prefill: {role: prefill}, decode: {role: decode, size: 2}}}}  # short\n"
SPARSE = """metadata:
  baton:
    pools:
      readers:           # those who read
        role: prefill
      writers:
        role: decode
        size: 3
"""


def sizes(text: str) -> dict[Role, int]:
    found = config.from_mapping(yaml.safe_load(text))
    return {role: found.size(role) for role in Role}


@pytest.mark.parametrize("text", [CLUSTER, FLOW, SPARSE])
@pytest.mark.parametrize("shape", [Shape(3, 2), Shape(1, 7), Shape(colocated=5)])
def test_the_file_has_the_new_sizes(text: str, shape: Shape) -> None:
    found = sizes(resized(text, shape))
    assert found == {Role.PREFILL: shape.prefill, Role.DECODE: shape.decode, Role.COLOCATED: shape.colocated}


def test_only_the_lines_of_the_sizes_change() -> None:
    changed = [
        line
        for line in difflib.ndiff(CLUSTER.splitlines(), resized(CLUSTER, Shape(3, 2)).splitlines())
        if line[0] in "+-"
    ]
    assert [line.replace(" ", "") for line in changed] == ["-size:1", "+size:3", "-size:1", "+size:2"]


def test_comments_stay_where_a_pool_is_added() -> None:
    found = resized(SPARSE, Shape(colocated=2))
    assert "# those who read" in found
    assert "colocated: {role: colocated, size: 2}" in found


def test_sizes_that_are_there_already_leave_the_text_as_it_was() -> None:
    assert resized(CLUSTER, Shape(1, 1)) == CLUSTER


@pytest.mark.parametrize("text", ["", "a: [", "metadata: {}", "metadata: {baton: {pools: 5}}"])
def test_a_file_that_is_no_clusters_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        resized(text, Shape(1, 1))


def test_several_pools_of_a_role_are_refused() -> None:
    text = FLOW.replace("decode: {", "other: {role: decode}, decode: {")
    with pytest.raises(ConfigError, match="which one to size"):
        resized(text, Shape(2, 2))
