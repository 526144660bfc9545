"""What the connector tests share: pools of known bytes, a connector factory that closes, and source processes."""

import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch

from baton.kvtransfer.connector import KvPool, PullState, open_connector
from baton.proto.messages import KvGeometry
from baton.proto.settings import TransferSettings

GEOMETRY = KvGeometry("demo", "1", "float32", block_size=4, num_layers=2, num_kv_heads=3, head_dim=8)
BLOCK_SHAPE = (2, 3, 2, 4, 8)
BIG_GEOMETRY = dataclasses.replace(GEOMETRY, block_size=16, num_layers=30, head_dim=64)
BIG_BLOCK_SHAPE = (30, 3, 2, 16, 64)
DEADLINE_S = 20.0
LOCALHOST = {"network_device": "lo"}


def seeded_tensor(seed, num_blocks, block_shape=BLOCK_SHAPE):
    return torch.rand((num_blocks, *block_shape), generator=torch.Generator().manual_seed(seed))


def _make_pool(num_blocks, seed=None, *, big=False, **geometry):
    """A pool of random bytes, or of zeros without a seed; big blocks are of 720 KiB, others of 1.5 KiB."""
    block_shape = BIG_BLOCK_SHAPE if big else BLOCK_SHAPE
    tensor = torch.zeros((num_blocks, *block_shape)) if seed is None else seeded_tensor(seed, num_blocks, block_shape)
    return KvPool(tensor, dataclasses.replace(BIG_GEOMETRY if big else GEOMETRY, **geometry))


def _poll_until(connector, done, deadline_s=DEADLINE_S):
    """All events until `done(events)`; fails the test when that does not come."""
    events = []
    end = time.monotonic() + deadline_s
    while not done(events):
        assert time.monotonic() < end, f"not there within {deadline_s} s; so far: {events}"
        events += connector.poll()
        time.sleep(0.001)
    return events


def _settle(connector, *pull_ids, deadline_s=DEADLINE_S):
    """The events of these pulls, once all have settled."""
    wanted = set(pull_ids)

    def settled(events):
        return wanted <= {event.pull_id for event in events if event.state is PullState.SETTLED}

    return _poll_until(connector, settled, deadline_s)


def _outcome(connector, pull, deadline_s=DEADLINE_S):
    """Pulls and waits; returns the event that decided."""
    connector.pull(pull)
    decided, settled = _settle(connector, pull.pull_id, deadline_s=deadline_s)
    assert settled.state is PullState.SETTLED
    return decided


@pytest.fixture
def make_pool():
    return _make_pool


@pytest.fixture
def poll_until():
    return _poll_until


@pytest.fixture
def settle():
    return _settle


@pytest.fixture
def outcome():
    return _outcome


@pytest.fixture
def connect():
    """Opens connectors by name and closes them at the end of the test."""
    opened = []

    def open_one(name, **settings):
        connector = open_connector(TransferSettings(connector=name, **LOCALHOST, **settings))
        opened.append(connector)
        return connector

    yield open_one
    for connector in opened:
        connector.close()


@dataclass
class Source:
    """A source in a process of its own."""

    pid: int
    address: bytes
    checksum: int
    tensor: torch.Tensor

    def signal(self, number):
        os.kill(self.pid, number)

    def stop(self):
        """Returns when the process has stopped."""
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + DEADLINE_S
        while pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < end
            time.sleep(0.001)


class Nursery:
    """Talks to `source_processes.py`."""

    def __init__(self):
        root = pathlib.Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("source_processes.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(root / "src")},
        )
        self._buffer = b""
        assert self._line() == b"ready"

    def start(self, seed, num_blocks, *, big=False, **settings):
        geometry, block_shape = (BIG_GEOMETRY, BIG_BLOCK_SHAPE) if big else (GEOMETRY, BLOCK_SHAPE)
        order = {
            "seed": seed,
            "shape": [num_blocks, *block_shape],
            "geometry": dataclasses.asdict(geometry),
            "settings": {"connector": "nixl", **LOCALHOST, **settings},
        }
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._line())
        tensor = seeded_tensor(seed, num_blocks, block_shape)
        return Source(answer["pid"], bytes.fromhex(answer["address"]), answer["checksum"], tensor)

    def close(self):
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def _line(self):
        end = time.monotonic() + 60
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, "a source process has not answered within 60 s"
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            assert piece, "the source processes have ended"
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def start_source(nursery):
    """Starts source processes and kills them at the end of the test."""
    started = []

    def start(seed, num_blocks, **settings):
        source = nursery.start(seed, num_blocks, **settings)
        started.append(source)
        return source

    yield start
    for source in started:
        try:
            source.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
