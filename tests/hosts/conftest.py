"""One cluster on six hosts for all tests of this folder, and a table of what they measured.

Run by `make test-hosts`; the files' names keep them out of `make test`, as they need root's rights. With
BATON_HOSTS_TABLE set to a file, the table is written there as JSON; with BATON_HOSTS_LOGS set to a directory, what
Baton and Ray logged on every host is kept there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts.launcher import RayHosts, Shape, bed_of
from hosts.table import Table

MODEL = {"num_hidden_layers": 12, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 2048}
SECTIONS = {
    "engine": {"dtype": "float32", "num_blocks": 2000, "threads": 1},
    "scheduler": {"max_num_batched_tokens": 48},
    "router": {"max_retries": 20, "no_worker_grace_s": 300.0},
    "kvtransfer": {"checksums": "always", "transport": "tcp", "network_device": "eth0"},
}
_table = Table()


@pytest.fixture(scope="session")
def table() -> Table:
    return _table


@pytest.fixture(scope="session")
def model_dir(tiny_model_dir) -> Path:
    """Slow enough to be hit in the middle of things, fast enough for one core."""
    return tiny_model_dir("llama", **MODEL)


@pytest.fixture(scope="session")
def hosts(model_dir: Path) -> Iterator[RayHosts]:
    """One head, two prefill and two decode hosts, a spare one, and this process in the network of a seventh."""
    shape = Shape(["h1", "h2"], ["h3", "h4", "h5"], 2, 2, model_dir, SECTIONS, idle_timeout_minutes=0.5)
    with bed_of(shape) as bed:
        hosts = RayHosts(bed, shape)
        try:
            hosts.up()
            yield hosts
        finally:
            if directory := os.environ.get("BATON_HOSTS_LOGS"):
                hosts.keep_logs(Path(directory))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _table.lines():
        terminalreporter.write_line(line)
    if _table.rows and (path := os.environ.get("BATON_HOSTS_TABLE")):
        _table.write(Path(path))
