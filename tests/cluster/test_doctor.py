"""`baton doctor` on a cluster of real processes: nothing is wrong, lanes are measured, a killed worker is named."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from baton.client import doctor
from baton.proto.settings import EngineSettings, TransferSettings
from baton.router.config import ClusterConfig, RouterSettings, defaults

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def running(launch, tiny_model_dir):
    model_dir = tiny_model_dir()
    pools = tuple(
        replace(
            pool,
            engine=EngineSettings(model=str(model_dir), dtype="float32", num_blocks=1024, threads=1),
            num_cpus=0.1,
        )
        for pool in defaults(prefill=1, decode=2).pools
    )
    config = ClusterConfig(str(model_dir), pools, RouterSettings(port=0, http_port=0), TransferSettings())
    with launch(config, model_dir) as cluster:
        yield cluster


def examined(cluster) -> doctor.Diagnosis:
    return doctor.diagnose(None, cluster.address, None, 15.0)


def measured(cluster):
    """The decode workers, when the status says how fast each of their lanes is."""
    deadline = time.monotonic() + 30
    while True:
        readers = [worker for worker in cluster.workers() if worker.role == "decode"]
        if all(reader.lanes and all(lane.gb_per_s > 0 for lane in reader.lanes) for reader in readers):
            return readers
        assert time.monotonic() < deadline, readers
        time.sleep(0.1)


def test_a_cluster_of_processes_has_no_fault_and_every_lane_is_measured(running):
    assert [finding for finding in examined(running).findings if finding.is_fault] == []
    readers = measured(running)
    assert len(readers) == 2
    for reader in readers:
        [lane] = reader.lanes
        assert (lane.source, lane.state, lane.transport) == ("prefill-0", "open", "nixl, UCX by its own choice")
        assert lane.gb_per_s > 0
        assert 0 < lane.round_trip_s < 1


def test_a_killed_worker_is_named_while_it_is_away(running):
    [victim] = [worker for worker in running.workers() if worker.worker_id == "decode-1"]
    os.kill(victim.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while all(worker.state == "ready" for worker in running.workers()):
        assert time.monotonic() < deadline, "its death was not noticed"
    [finding] = [finding for finding in examined(running).findings if finding.is_fault]
    assert (finding.check, finding.subject) == ("workers", "decode-1")
