"""Real clusters: Ray, one process a worker, NIXL. One Ray serves the whole test session; each cluster is its own."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from baton.fleet.launch import RouterHandle, close_ray, open_ray, start_router
from baton.fleet.worker import FACTORIES
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.router.config import ClusterConfig

_numbers = itertools.count(1)


@dataclass
class RealCluster:
    """A cluster that runs; `address` is the router's."""

    config: ClusterConfig
    address: str
    handle: RouterHandle
    http_address: str

    def status(self) -> cluster.ClusterStatus:
        with grpc.insecure_channel(self.address) as channel:
            return cluster_pb2_grpc.ClusterStub(channel).GetStatus(cluster.GetStatusRequest(), timeout=10)

    def workers(self) -> list[cluster.WorkerStatus]:
        return [worker for pool in self.status().pools for worker in pool.workers]


@contextmanager
def real_cluster(config: ClusterConfig, model_dir: Path) -> Iterator[RealCluster]:
    handle = start_router(config, model_dir, FACTORIES, namespace=f"test-{os.getpid()}-{next(_numbers)}")
    try:
        addresses = handle.ready(120, threading.Event())
        assert addresses is not None
        yield RealCluster(config, addresses.grpc, handle, addresses.http)
    finally:
        handle.stop(0.0)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    open_ray(64)
    yield
    close_ray()


@pytest.fixture(scope="session")
def launch(local_ray):
    """`with launch(config, model_dir) as cluster`."""
    return real_cluster


@contextmanager
def stubs(address: str):
    with grpc.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel), cluster_pb2_grpc.ClusterStub(channel)
