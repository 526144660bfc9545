"""Processes that change their role: under load, over real links and NIXL, and killed on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import grpc
import pytest
from asking import answer, request, until

from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto.settings import EngineSettings, SchedulerSettings, TransferSettings
from baton.router.config import ClusterConfig, RouterSettings, defaults

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = [index % 251 for index in range(160)]
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def three_workers(launch, tiny_model_dir):
    model_dir = tiny_model_dir("llama")
    pools = tuple(
        replace(
            pool,
            engine=EngineSettings(model=str(model_dir), dtype="float32", num_blocks=400, threads=1),
            scheduler=SchedulerSettings(max_num_batched_tokens=64),
            num_cpus=0.1,
        )
        for pool in defaults(prefill=1, decode=2).pools
    )
    router = RouterSettings(port=0, http_port=0, max_retries=8)
    config = ClusterConfig(str(model_dir), pools, router, TransferSettings(checksums="always"))
    with launch(config, model_dir) as running:
        yield running


class Operator:
    """Asks for changes, and looks."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cluster_pb2_grpc.ClusterStub(channel)

    async def set_role(self, worker_id: str, role: str, timeout_s: float) -> cluster.SetRoleResponse:
        message = cluster.SetRoleRequest(worker_id=worker_id, role=role, timeout_s=timeout_s)
        return await self._stub.SetRole(message, timeout=60)

    async def workers(self) -> dict[str, cluster.WorkerStatus]:
        status = await self._stub.GetStatus(cluster.GetStatusRequest(), timeout=5)
        return {worker.worker_id: worker for pool in status.pools for worker in pool.workers}

    async def worker(self, worker_id: str) -> cluster.WorkerStatus:
        return (await self.workers())[worker_id]

    async def at_rest(self) -> bool:
        return not any(
            worker.load.held_blocks or worker.load.lent_blocks or worker.load.quarantined_blocks or worker.in_flight
            for worker in (await self.workers()).values()
        )


class Clients:
    """Six that ask without pause; each answer must be the first one's."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._stopping = False
        self.num_answers = 0
        self._running = [asyncio.create_task(self._ask(index)) for index in range(6)]

    async def _ask(self, index: int) -> None:
        message = request(PROMPT[5 * index :], NUM_TOKENS, sampling_temperature=0.8, sampling_seed=index)
        expected = None
        while not self._stopping:
            tokens = (await answer(self._stub, message)).tokens
            expected = expected or tokens
            assert tokens == expected
            self.num_answers += 1

    async def more(self, count: int = 6) -> None:
        goal = self.num_answers + count
        await until(lambda: self.num_answers >= goal or any(task.done() for task in self._running), timeout_s=60)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._running)


async def go_round(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        operator, clients = Operator(channel), Clients(channel)
        await clients.more()
        before = await operator.worker("decode-0")
        incarnations = {before.incarnation}
        for role, timeout_s in (("colocated", 0.05), ("prefill", 10.0), ("decode", 10.0)):
            done = await operator.set_role("decode-0", role, timeout_s)
            assert 0 <= done.drain_s <= done.total_s
            now = await operator.worker("decode-0")
            assert (now.role, now.state, now.pool, now.restarts) == (role, "ready", "decode", 0)
            # The same process: it has loaded nothing and opened no other port.
            assert (now.pid, now.address) == (before.pid, before.address)
            incarnations.add(now.incarnation)
            await clients.more()
        assert len(incarnations) == 4
        await clients.stop()
        await until(operator.at_rest, timeout_s=10)


async def kill_on_the_way(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        operator, clients = Operator(channel), Clients(channel)
        await operator.set_role("decode-0", "decode", 10.0)
        await until(lambda: _running(operator, "decode-0"), timeout_s=10)
        before = await operator.worker("decode-0")
        change = asyncio.create_task(operator.set_role("decode-0", "prefill", 30.0))
        await until(lambda: _running(operator, "decode-0", draining=True), timeout_s=10, what="a change under way")
        os.kill(before.pid, signal.SIGKILL)
        await change
        now = await operator.worker("decode-0")
        assert (now.role, now.state, now.restarts) == ("prefill", "ready", before.restarts + 1)
        assert now.pid != before.pid
        await clients.more()
        await clients.stop()
        await until(operator.at_rest, timeout_s=10)


async def _running(operator: Operator, worker_id: str, draining: bool = False) -> bool:
    worker = await operator.worker(worker_id)
    return worker.load.draining == draining and worker.load.running > 0


def test_a_process_goes_from_role_to_role_under_load_and_back(three_workers):
    asyncio.run(go_round(three_workers.address))


def test_a_process_that_is_killed_on_the_way_comes_back_in_its_new_role(three_workers):
    asyncio.run(kill_on_the_way(three_workers.address))
