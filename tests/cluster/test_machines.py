"""Machines that come and go: `baton serve` in a Ray of several nodes, each with an address of its own.

The nodes are Ray's own processes on this machine; the head has the machine's address, as a driver looks for it there.
One cluster serves the tests of this file in their order: each leaves it as it found it, with one prefill and two decode
workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from asking import free_port, until
from ray.cluster_utils import Cluster

from baton.client.client import AsyncClient, Client
from baton.client.errors import BatonError
from baton.proto import cluster_pb2 as cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BATON = (sys.executable, "-m", "baton.client.cli")
NUM_STREAMS, NUM_TOKENS = 6, 120
# A node that is lost without a word is noticed in seconds instead of a minute.
HEAD_ENVIRONMENT = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
}


@dataclass
class Machines:
    """Ray's nodes, by their addresses, and the cluster in them."""

    ray: Cluster
    nodes: dict[str, object]
    process: subprocess.Popen[str]
    target: str
    lines: list[str]

    def add(self, address: str, **resources: float) -> None:
        self.nodes[address] = add_node(self.ray, address, **resources)

    def lose(self, address: str) -> None:
        """Kills the node's processes without a word, those of the workers on it too."""
        self.ray.remove_node(self.nodes.pop(address), allow_graceful=False)

    def baton(self, *words: str) -> str:
        """What a command prints."""
        environment = {**os.environ, "RAY_ADDRESS": self.ray.address}
        done = subprocess.run(
            [*BATON, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def workers(self) -> dict[str, cluster.WorkerStatus]:
        with Client(self.target) as client:
            return {worker.worker_id: worker for pool in client.status().pools for worker in pool.workers}

    def wait(self, condition: Callable[[dict[str, cluster.WorkerStatus]], object], timeout_s: float = 60.0) -> object:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                workers = self.workers()
            except BatonError:  # a router that is being restarted
                workers = {}
            if workers and (value := condition(workers)):
                return value
            assert time.monotonic() < deadline, (workers, self.lines)
            time.sleep(0.05)


def add_node(ray: Cluster, address: str, **resources: float) -> object:
    return ray.add_node(node_ip_address=address, num_cpus=4, resources=resources, object_store_memory=80 << 20)


def ready(*names: str) -> Callable[[dict[str, cluster.WorkerStatus]], bool]:
    return lambda workers: set(workers) == set(names) and all(it.state == "ready" for it in workers.values())


def replaced(former: cluster.WorkerStatus, *names: str) -> Callable[[dict[str, cluster.WorkerStatus]], bool]:
    """All are ready, and another process is where this one was: the status shows it until its loss is noticed."""
    all_ready = ready(*names)
    return lambda workers: all_ready(workers) and workers[former.worker_id].incarnation != former.incarnation


@pytest.fixture(scope="module")
def machines(tiny_model_dir, tmp_path_factory) -> Iterator[Machines]:
    """A head with room for a router and two prefill workers, and one node with room for one decode worker of two."""
    model_dir = tiny_model_dir("llama", num_hidden_layers=8, hidden_size=128, intermediate_size=256)
    directory: Path = tmp_path_factory.mktemp("machines")
    pools = {
        role: {"role": role, "size": size, "resources": {"CPU": 0.1, role: 1}}
        for role, size in (("prefill", 1), ("decode", 2))
    }
    section = {
        "model": str(model_dir),
        "engine": {"dtype": "float32", "num_blocks": 400, "threads": 1},
        "scheduler": {"max_num_batched_tokens": 64},
        "pools": pools,
        "router": {
            "port": free_port(),
            "http_port": 0,
            "max_retries": 8,
            "drain_timeout_s": 1.0,
            "worker_ports": "21000-21099",
        },
        "kvtransfer": {"checksums": "always"},
    }
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump({"metadata": {"baton": section}}))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in HEAD_ENVIRONMENT.items():
            patch.setenv(name, value)
        ray = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 4,
                "resources": {"router": 1, "prefill": 2},
                "object_store_memory": 80 << 20,
                "include_dashboard": False,
            },
        )
    process = None
    try:
        nodes = {"127.0.0.2": add_node(ray, "127.0.0.2", decode=1)}
        process = subprocess.Popen(
            [*BATON, "serve", str(file)],
            env={**os.environ, "RAY_ADDRESS": ray.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
        reader.start()
        deadline = time.monotonic() + 120
        while not (said := [line for line in lines if line.startswith("ready")]):
            assert process.poll() is None, lines
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
        yield Machines(ray, nodes, process, said[0].split()[2], lines)
    finally:
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        ray.shutdown()


async def stream(client: AsyncClient, index: int, received: list[int]) -> None:
    generation = client.generate(
        token_ids=[(7 * index + position) % 251 for position in range(60 + 20 * index)],
        max_tokens=NUM_TOKENS,
        temperature=0.0 if index % 2 else 0.8,
        seed=index,
        ignore_eos=True,
        timeout_s=120,
    )
    async for output in generation:
        if output.token_ids:
            assert output.first_token_index == len(received), "a gap or a repeat"
            received += output.token_ids
    await generation.result()


def under_streams(machines: Machines, disturb: Callable[[], object]) -> None:
    """Something happens while streams run: their tokens are an undisturbed run's, and nothing is held afterwards."""

    async def run(disturb: Callable[[], object] | None) -> list[list[int]]:
        received: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        async with AsyncClient(machines.target) as client:
            running = [asyncio.create_task(stream(client, index, received[index])) for index in range(NUM_STREAMS)]
            if disturb is not None:
                await until(lambda: sum(len(it) >= 5 for it in received) >= 3, timeout_s=60, what="streams")
                await asyncio.to_thread(disturb)
            await asyncio.gather(*running)
        return received

    undisturbed = asyncio.run(run(None))
    assert all(len(tokens) == NUM_TOKENS for tokens in undisturbed)
    assert asyncio.run(run(disturb)) == undisturbed
    machines.wait(nothing_held, timeout_s=20)


def await_a_request_by(machines: Machines, worker_id: str, timeout_s: float = 60.0) -> None:
    """Asks one thing after the other until that worker has answered."""
    deadline, number = time.monotonic() + timeout_s, 0
    with Client(machines.target, timeout_s=timeout_s) as client:
        while True:
            number += 1
            # No prompt is a known one's, so that none prefers the worker that knows it.
            prompt = [number % 251, *range(1, 40)]
            if client.generate(token_ids=prompt, max_tokens=8).result().finish.decode_worker == worker_id:
                return
            assert time.monotonic() < deadline, (machines.workers(), machines.lines)


def nothing_held(workers: dict[str, cluster.WorkerStatus]) -> bool:
    loads = [worker.load for worker in workers.values()]
    return not any(load.held_blocks or load.lent_blocks or load.quarantined_blocks for load in loads) and not any(
        worker.in_flight for worker in workers.values()
    )


def test_a_node_that_joins_later_gets_its_worker_and_until_then_the_status_tells_what_is_missing(machines):
    def told(workers: dict[str, cluster.WorkerStatus]) -> str:
        (worker,) = [it for it in workers.values() if it.role == "decode" and it.state == "starting"]
        return worker.note

    assert machines.wait(lambda workers: told(workers)) == "no machine has room for 0.1 CPU, 1 decode"
    machines.add("127.0.0.3", decode=1)
    await_a_request_by(machines, "decode-1")
    machines.wait(ready("prefill-0", "decode-0", "decode-1"))
    workers = machines.workers()
    head = machines.ray.head_node.node_ip_address
    assert {worker.host for worker in workers.values()} == {head, "127.0.0.2", "127.0.0.3"}
    # Each machine has its own range of ports; here they are one machine's, with an address for each node.
    assert all(21000 <= int(worker.address.rpartition(":")[2]) <= 21099 for worker in workers.values())


def test_a_lost_nodes_worker_comes_up_elsewhere_and_its_streams_go_on(machines):
    before = machines.workers()
    lost = before["decode-1"]
    machines.add("127.0.0.4", decode=1)
    under_streams(machines, lambda: machines.lose(lost.host))
    machines.wait(replaced(lost, "prefill-0", "decode-0", "decode-1"))
    assert machines.workers()["decode-1"].host == "127.0.0.4"


def test_a_frozen_worker_is_replaced_and_ends_when_it_is_thawed(machines):
    frozen = machines.workers()["decode-0"]
    process = psutil.Process(frozen.pid)
    try:
        under_streams(machines, process.suspend)
        machines.wait(replaced(frozen, "prefill-0", "decode-0", "decode-1"))
        assert machines.workers()["decode-0"].pid != frozen.pid
    finally:
        if process.is_running():
            process.resume()
    process.wait(20)


def test_a_scaled_pool_and_its_processes_survive_a_restart_of_the_router(machines):
    with Client(machines.target) as client:
        client.scale("prefill", 2)
        router = client.status().router
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    machines.wait(ready(*names))
    before = {name: worker.pid for name, worker in machines.workers().items()}
    os.kill(router.pid, signal.SIGKILL)
    machines.wait(ready(*names))
    assert {name: worker.pid for name, worker in machines.workers().items()} == before
    with Client(machines.target) as client:
        assert client.status().router.pid != router.pid


def test_a_drained_worker_leaves_and_its_pool_is_smaller(machines):
    left = json.loads(machines.baton("drain", "prefill-0", "--json", "--target", machines.target))
    assert left["left"] == ["prefill-0"]
    machines.wait(ready("prefill-1", "decode-0", "decode-1"))
    with Client(machines.target) as client, pytest.raises(BatonError, match="nothing could be served"):
        client.leave("prefill-1")


def test_the_workers_of_a_drained_host_get_successors_elsewhere_and_the_host_gets_none(machines):
    host = machines.workers()["decode-1"].host
    machines.add("127.0.0.5", decode=1)
    said: list[str] = []

    def drain() -> None:
        said.append(machines.baton("drain", "--host", host, "--timeout", "1", "--target", machines.target))

    under_streams(machines, drain)
    assert said[0].startswith("decode-1 has left")
    machines.wait(ready("prefill-1", "decode-0", "decode-2"))
    assert machines.workers()["decode-2"].host == "127.0.0.5"
    with Client(machines.target) as client:
        client.scale("decode", 3)
        machines.wait(lambda workers: workers["decode-3"].note.startswith("no machine has room"))
        client.scale("decode", 2)
    machines.wait(ready("prefill-1", "decode-0", "decode-2"))


def test_stop_ends_the_cluster_and_leaves_its_ray(machines):
    pids = [worker.pid for worker in machines.workers().values()]
    assert machines.baton("stop", "--timeout", "5").splitlines() == ["draining", "stopped"]
    assert machines.process.wait(30) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert machines.baton("stop") == "no cluster runs in this Ray\n"
