"""Every process of a cluster can be asked for its log from one place, and for that of the process before it."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest
from asking import until
from clusters import shape

from baton.client.client import Client
from baton.proto.settings import ObservabilitySettings

pytestmark = pytest.mark.cluster


def test_lines_and_files_name_worker_host_and_incarnation_also_of_a_worker_that_was_killed(
    launch, tiny_model_dir, tmp_path
):
    model_dir = tiny_model_dir("llama")
    settings = ObservabilitySettings(log_dir=str(tmp_path))
    config = replace(shape(str(model_dir), 1, 1, budget=64), observability=settings)
    with launch(config, model_dir) as cluster, Client(cluster.address) as client:
        status = client.status()
        lives = {worker.worker_id: worker.incarnation for pool in status.pools for worker in pool.workers}
        lives["router"] = status.router.incarnation
        for name, life in lives.items():
            tail = client.logs(name)
            assert (tail.process, tail.incarnation) == (name, life)
            assert tail.host
            assert tail.file == str(tmp_path / f"{name}@{tail.host}.{life}.log")
        ready = [line for line in client.logs("router").lines if "decode-0 serves at" in line]
        assert len(ready) == 1
        assert f" INFO router@{client.logs('router').host}#{lives['router'][:8]} baton." in ready[0]

        (victim,) = (worker for worker in cluster.workers() if worker.worker_id == "decode-0")
        os.kill(victim.pid, signal.SIGKILL)

        def back() -> bool:
            (worker,) = (worker for worker in cluster.workers() if worker.worker_id == "decode-0")
            return worker.state == "ready" and worker.incarnation != victim.incarnation

        asyncio.run(until(lambda: asyncio.to_thread(back), timeout_s=60, what="the worker's return"))
        former = client.logs("decode-0", previous=True)
        assert (former.process, former.incarnation) == ("decode-0", victim.incarnation)
        assert victim.incarnation in former.file
        assert client.logs("decode-0").incarnation not in ("", victim.incarnation)
