"""Replicas of the router in one process: a follower knows what the keeper knows, and goes on while that is away."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from asking import answer, request, until
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto import inference_pb2 as inference
from baton.proto.messages import Role
from baton.router.cluster import ClusterService, WorkerState
from baton.router.config import RouterSettings
from baton.router.follower import Follower, FollowerService
from baton.router.keeper import KeeperService
from baton.router.metrics import RouterMetrics
from baton.router.replicas import PeerServer
from baton.router.router import Router
from baton.router.server import RouterServer
from baton.router.tokenizer import Tokenizer

PROMPT = [index % 251 for index in range(90)]


class Keeping:
    """The keeper's part of a small cluster, which can go away and come back elsewhere."""

    def __init__(self, small: SmallCluster) -> None:
        self.small = small
        self.address: str | None = None

    async def open(self) -> None:
        small = self.small
        self._service = KeeperService(small.router, small, small.server.gateway)
        self._server = PeerServer(self._service, ClusterService(small.router, small))
        self.address = small.router.replicas.peer_address = await self._server.open("127.0.0.1", small.router.wire)
        self._service.open()

    async def close(self) -> None:
        self.address = None
        self._service.close()
        await self._server.close()

    async def find(self) -> str:
        if self.address is None:
            raise OSError("it is away")
        return self.address


class Second:
    """Another replica on the same ports."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping

    async def open(self) -> None:
        small = self._keeping.small
        ports = {
            "port": int(small.address.rpartition(":")[2]),
            "http_port": int(small.http_address.rpartition(":")[2]),
        }
        settings = replace(small.router.config.router, **ports)
        self.router = router = Router(
            replace(small.router.config, router=settings), Tokenizer(small.model_dir), number=1
        )
        self.follower = Follower(router, self._keeping.find)
        self.server = RouterServer(router, self.follower)
        addresses = await self.server.open(settings)
        assert (addresses.grpc, addresses.http) == (small.address, small.http_address)
        self._peers = PeerServer(FollowerService(self.follower, self.server.gateway))
        replicas = router.replicas
        replicas.grpc_address, replicas.http_address = addresses.own_grpc, addresses.own_http
        replicas.peer_address = await self._peers.open("127.0.0.1", router.wire)
        await self.follower.open(timeout_s=10.0)
        self.channel = grpc.aio.insecure_channel(addresses.own_grpc)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()
        await self.server.close()
        await self._peers.close()
        await self.follower.close()
        self.router.dispatcher.close()
        self.router.book.check()
        assert self.router.book.in_flight == 0

    async def states(self) -> dict[str, str]:
        status = await self.cluster.GetStatus(cluster.GetStatusRequest())
        return {worker.worker_id: worker.state for pool in status.pools for worker in pool.workers}


@asynccontextmanager
async def replicated(paper_dir, step_s: float = 0.0, **options):
    """A small cluster whose router is the keeper of two replicas: its keeping and the second replica."""
    settings = RouterSettings(port=0, replicas=2)
    async with SmallCluster(
        paper_dir, lambda: PaperRunner(step_s=step_s), router_settings=settings, **options
    ) as small:
        keeping = Keeping(small)
        second = Second(keeping)
        await keeping.open()
        await second.open()
        await until(lambda: small.router.replicas.others, what="the follower in the keeper's list")
        try:
            yield keeping, second
            await small.at_rest()
        finally:
            await second.close()
            await keeping.close()


async def test_both_replicas_serve_with_the_same_workers(paper_dir):
    async with replicated(paper_dir) as (keeping, second):
        for stub in (keeping.small.inference, second.inference):
            assert (await answer(stub, request(PROMPT, 20))).tokens == paper_output(PROMPT, 20)


async def test_a_follower_learns_of_workers_that_come_and_go(paper_dir):
    async with replicated(paper_dir) as (keeping, second):
        await keeping.small.add(Role.DECODE, "decode-1")
        await until(lambda: "decode-1" in second.router.links, what="a link to the new worker")
        assert await second.states() == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "ready")
        await keeping.small.remove("decode-0")
        await until(lambda: "decode-0" not in second.router.links, what="the end of the link")
        # The name comes back before the follower can have looked twice.
        await keeping.small.add(Role.DECODE, "decode-0")
        await keeping.small.remove("decode-1")
        await until(lambda: second.router.links.keys() == {"prefill-0", "decode-0"}, what="the present workers")
        assert (await answer(second.inference, request(PROMPT, 9))).tokens == paper_output(PROMPT, 9)


async def test_a_follower_goes_on_without_the_keeper_and_finds_its_successor(paper_dir):
    async with replicated(paper_dir) as (keeping, second):
        await keeping.close()
        await until(lambda: second.follower._keeper is None, what="the end of the stream")
        assert (await answer(second.inference, request(PROMPT, 9))).tokens == paper_output(PROMPT, 9)
        with pytest.raises(grpc.aio.AioRpcError) as away:
            await second.cluster.Scale(cluster.ScaleRequest(pool="decode", size=2))
        assert away.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "keeps the workers" in away.value.details()
        await keeping.open()
        await keeping.small.add(Role.DECODE, "decode-1")
        await until(lambda: "decode-1" in second.router.links, what="a worker that only the new keeper names")


async def test_a_follower_passes_the_keepers_refusals_on(paper_dir):
    async with replicated(paper_dir) as (_, second):
        for asked, code in (("nothing", grpc.StatusCode.NOT_FOUND), ("decode", grpc.StatusCode.FAILED_PRECONDITION)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await second.cluster.Scale(cluster.ScaleRequest(pool=asked, size=2))
            assert refused.value.code() is code
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.cluster.Drain(cluster.DrainRequest(worker_id="nobody"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_every_replica_lists_all_of_them_with_addresses_of_their_own(paper_dir):
    async with replicated(paper_dir) as (keeping, second):
        seen = [await stub.GetStatus(cluster.GetStatusRequest()) for stub in (keeping.small.cluster, second.cluster)]
        for number, status in enumerate(seen):
            assert status.router.number == number
            assert status.router_replicas == 2
            assert [(it.number, it.keeper) for it in status.routers] == [(0, True), (1, False)]
        assert seen[1].routers[1].grpc_address == second.router.replicas.grpc_address
        targets = RouterMetrics(second.router, second.follower).targets("shared:1")
        assert [target.worker_id for target in targets[:2]] == ["router-0", "router-1"]
        assert "shared:1" not in [target.address for target in targets]


async def test_an_abort_finds_its_request_on_either_replica(paper_dir):
    async with replicated(paper_dir, step_s=0.01) as (keeping, second):
        for here, there in ((keeping.small.inference, second.inference), (second.inference, keeping.small.inference)):
            running = asyncio.create_task(answer(here, request(PROMPT, 2000, request_id="the-one")))

            async def found(there=there) -> bool:
                return (await there.Abort(inference.AbortRequest(request_id="the-one"))).found

            await until(found, what="an abort that finds it")
            assert (await running).finish.reason == inference.FINISH_REASON_ABORTED
            assert not await found()


async def test_a_request_that_resumes_replaces_its_former_self_on_another_replica(paper_dir):
    async with replicated(paper_dir, step_s=0.01) as (keeping, second):
        former = asyncio.create_task(answer(keeping.small.inference, request(PROMPT, 2000, request_id="moves")))
        gateway = keeping.small.server.gateway
        await until(lambda: "moves" in gateway._running, what="the former self")
        tokens = paper_output(PROMPT, 5)
        resumed = request(PROMPT, 25, request_id="moves", resume_token_ids=tokens)
        assert tokens + (await answer(second.inference, resumed)).tokens == paper_output(PROMPT, 25)
        assert (await former).finish.reason == inference.FINISH_REASON_ABORTED


async def test_a_late_hunt_for_the_former_self_spares_the_later_one(paper_dir):
    async with replicated(paper_dir, step_s=0.01) as (keeping, second):
        tokens = paper_output(PROMPT, 5)
        resumed = request(PROMPT, 25, request_id="moves", resume_token_ids=tokens)
        later = asyncio.create_task(answer(keeping.small.inference, resumed))
        await until(lambda: "moves" in keeping.small.server.gateway._running, what="the later self")
        assert not await second.router.replicas.abort("moves", 5)
        assert tokens + (await later).tokens == paper_output(PROMPT, 25)


async def test_a_drain_moves_the_legs_of_every_replica(paper_dir):
    async with replicated(paper_dir, step_s=0.01, decode=2) as (keeping, second):
        small = keeping.small
        running = [asyncio.create_task(answer(second.inference, request(PROMPT[i:], 60))) for i in range(4)]
        await until(lambda: second.router.links["decode-0"].num_legs, what="a leg of the follower's on decode-0")
        small.seats["decode-0"].state = WorkerState.DRAINING
        assert await small.router.replicas.drain("decode-0", 0.0) >= 1
        for index, task in enumerate(running):
            assert (await task).tokens == paper_output(PROMPT[index:], 60)
        for index in range(4):
            assert (await answer(second.inference, request(PROMPT[index:], 5))).finish.decode_worker == "decode-1"
        await until(lambda: "decode-0" in second.router.links, what="the link's return")
        assert (await second.states())["decode-0"] == "draining"
