"""A running cluster is brought into shape, loaded with a point's arrivals, and its answers become a summary."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio
import pytest
from fake_router import FakeRouter
from paper_model import PaperRunner, write_paper_tokenizer
from small_cluster import SmallCluster

from baton.capacity.cost import CostModel, Origin, Source, StepCost
from baton.capacity.grid import Model, Shape, setup_of
from baton.capacity.outcome import End, Slo
from baton.capacity.sweep import Point
from baton.capacity.traffic import Traffic
from baton.client import bench, live
from baton.client.client import AsyncClient
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto import inference_pb2 as inference
from baton.proto.messages import Role
from baton.router import config

MODEL = Model("paper", 8, 512, num_blocks=64)


@dataclass
class Reshapable(FakeRouter):
    """A cluster that is only its list of workers. A worker stays in the pool into which it was born."""

    pools: tuple[str, ...] = ("prefill", "decode", "colocated")
    workers: dict[str, str] = field(default_factory=lambda: {"prefill-0": "prefill", "decode-0": "decode"})
    asked: list[str] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)

    def members(self, pool: str) -> list[str]:
        return [name for name in self.workers if name.startswith(f"{pool}-")]

    async def GetModel(self, request: object, context: grpc.aio.ServicerContext) -> inference.ModelInfo:
        pools = [inference.PoolInfo(name=name, role=name) for name in self.pools]
        return inference.ModelInfo(name="m", max_model_len=512, vocab_size=1000, pools=pools)

    async def GetStatus(self, request: object, context: grpc.aio.ServicerContext) -> cluster.ClusterStatus:
        pools = [
            cluster.PoolStatus(
                name=pool,
                role=pool,
                workers=[
                    cluster.WorkerStatus(
                        worker_id=name,
                        pool=pool,
                        role=self.workers[name],
                        state="ready",
                        host=self.hosts.get(name, "127.0.0.1"),
                    )
                    for name in self.members(pool)
                ],
            )
            for pool in self.pools
            if self.members(pool)
        ]
        return cluster.ClusterStatus(pools=pools)

    async def SetRole(
        self, request: cluster.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> cluster.SetRoleResponse:
        self.asked.append(f"{request.worker_id} -> {request.role}")
        self.workers[request.worker_id] = request.role
        return cluster.SetRoleResponse(drain_s=0.25, total_s=0.5, moved=1)

    async def Scale(self, request: cluster.ScaleRequest, context: grpc.aio.ServicerContext) -> cluster.ScaleResponse:
        assert request.pool in self.pools
        self.asked.append(f"{request.pool} = {request.size}")
        mine = self.members(request.pool)
        for name in mine[request.size :]:
            del self.workers[name]
        for number in range(len(mine), request.size):
            self.workers[f"{request.pool}-{number}"] = request.pool
        return cluster.ScaleResponse(size=request.size)


@pytest.fixture
def router() -> Reshapable:
    return Reshapable()


@pytest.fixture
async def address(router: Reshapable) -> AsyncIterator[str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address, timeout_s=10.0) as connected:
        yield connected


def wanted(prefill: int = 0, decode: int = 0, colocated: int = 0) -> dict[Role, int]:
    return {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: colocated}


def counted(router: Reshapable) -> dict[Role, int]:
    return {role: sum(each == role.value for each in router.workers.values()) for role in Role}


SHAPES = [(1, 1, 0), (2, 1, 0), (1, 3, 0), (0, 0, 2), (0, 0, 3), (2, 2, 1), (0, 0, 1)]


@pytest.mark.parametrize("pools", [("prefill", "decode", "colocated"), ("prefill", "decode")])
@pytest.mark.parametrize(("before", "after"), itertools.permutations(SHAPES, 2))
async def test_a_cluster_is_brought_from_every_shape_into_every_other(
    client: AsyncClient,
    router: Reshapable,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    pools: tuple[str, ...],
) -> None:
    router.pools = pools
    for shape in (before, after):
        await live.reshape(client, wanted(*shape))
        assert counted(router) == wanted(*shape)


async def test_as_many_workers_change_their_roles_and_none_is_started(client: AsyncClient, router: Reshapable) -> None:
    changes = await live.reshape(client, wanted(colocated=2))
    assert router.asked == ["prefill-0 -> colocated", "decode-0 -> colocated"]
    assert [(change.before, change.after, change.drain_s, change.total_s) for change in changes] == [
        (Role.PREFILL, Role.COLOCATED, 0.25, 0.5),
        (Role.DECODE, Role.COLOCATED, 0.25, 0.5),
    ]


async def test_a_new_worker_is_one_of_the_pool_that_lacks_it(client: AsyncClient, router: Reshapable) -> None:
    assert await live.reshape(client, wanted(1, 3)) == []
    assert router.asked == ["decode = 3"]


async def test_a_cluster_in_shape_is_left_alone(client: AsyncClient, router: Reshapable) -> None:
    assert await live.reshape(client, wanted(1, 1)) == []
    assert router.asked == []


async def test_a_live_point_has_the_figures_of_its_requests(tmp_path: Path) -> None:
    setup = setup_of(config.defaults(), MODEL, Shape(1, 1))
    point = Point(setup, Traffic("fixed:60/8", 60.0, 40, seed=3), Slo(ttft_s=5.0, tpot_s=1.0))
    paper_dir = write_paper_tokenizer(tmp_path)
    async with SmallCluster(paper_dir, PaperRunner) as running:
        summary = await live.measured(running.address, None, point)
        await running.at_rest()
    assert summary.ended == {"finished": 40, "refused": 0, "deadline": 0, "failed": 0}
    assert summary.attainment.value == 1.0
    assert summary.workers == 2
    assert {pool.role: pool.workers for pool in summary.pools} == {Role.PREFILL: 1, Role.DECODE: 1}
    decode = next(pool for pool in summary.pools if pool.role is Role.DECODE)
    assert decode.handoff_bytes > 0
    assert sum(pool.tokens_generated for pool in summary.pools) == 40 * 8
    assert 0 < summary.ttft.p50 < summary.e2e.p50
    assert summary.stages.prefill_compute > 0


def test_a_request_that_failed_is_told_as_such() -> None:
    def sample(error: str) -> bench.Sample:
        return bench.Sample(0.0, 0.5, 10, 0, (), 1.0, error=error, number=7)

    ends = {"RESOURCE_EXHAUSTED": End.REFUSED, "DEADLINE_EXCEEDED": End.DEADLINE, "UNAVAILABLE": End.FAILED}
    for error, end in ends.items():
        found = live.outcome(sample(error), None)
        assert (found.number, found.end, found.reason, found.arrived_s) == (7, end, error, 0.5)
        assert not found.meets(Slo())


async def test_a_cluster_shares_this_machines_cores_if_all_its_workers_are_here(
    router: Reshapable, address: str
) -> None:
    async def is_here(target: str | None, device: str = "cpu") -> bool:
        return await live.is_on_this_machine(config.defaults(device=device), target, None, None)

    assert await is_here(None)
    assert await is_here(address)
    assert not await is_here(address, device="cuda")
    assert not await is_here("192.0.2.1:9000")
    router.hosts["decode-0"] = "192.0.2.7"
    assert not await is_here(address)


async def test_a_cluster_that_does_not_answer_does_not_say_where_its_workers_are() -> None:
    with pytest.raises(live.LiveError, match=r"127\.0\.0\.1:1 does not say where its workers are: "):
        await live.is_on_this_machine(config.defaults(), "127.0.0.1:1", None, None)


def test_more_threads_than_cores_share_them_in_a_prediction() -> None:
    cost = CostModel(Origin(Source.MEASURED, threads=1), StepCost())
    crowded = setup_of(config.defaults(), MODEL, Shape(live.num_cores(), 1))
    assert live.on_this_machine(crowded, cost).shared_cores == live.num_cores()
    alone = setup_of(config.defaults(), MODEL, Shape(colocated=1))
    few = live.on_this_machine(alone, replace(cost, origin=replace(cost.origin, threads=live.num_cores())))
    assert few.shared_cores == live.num_cores()


def test_shared_cores_are_admitted() -> None:
    (note,) = live.notes(config.defaults(), [Shape(live.num_cores(), 1)])
    assert f"shared {live.num_cores()} cores" in note
    assert list(live.notes(config.defaults(device="cuda"), [Shape(200, 1)])) == []
