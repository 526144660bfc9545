"""Two replicas of the router behind one port: clients see one router, and the death of either changes no stream."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import grpc
import psutil
import pytest
from asking import answer, request, until

from baton.client.client import AsyncClient
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto import inference_pb2 as inference
from baton.proto.settings import EngineSettings, SchedulerSettings, TransferSettings
from baton.router.config import ClusterConfig, RouterSettings, defaults

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

NUM_TOKENS = 200
# After these and their first 200 tokens, the best token leads by 1e-3 and more: no rounding can decide otherwise.
PROMPTS = [[random.randrange(256) for _ in range(60)] for random in map(Random, range(90, 100))]
PROMPT = PROMPTS[0]
ALONE = (("grpc.use_local_subchannel_pool", 1),)


@pytest.fixture(scope="module")
def replicated(launch, tiny_model_dir):
    """1P1D behind two replicas of the router."""
    model_dir = tiny_model_dir("llama", num_hidden_layers=8, hidden_size=128, intermediate_size=256)
    config = defaults()
    pools = tuple(
        replace(
            pool,
            engine=EngineSettings(model=str(model_dir), dtype="float32", num_blocks=512, threads=1),
            scheduler=SchedulerSettings(max_num_batched_tokens=64),
            num_cpus=0.1,
        )
        for pool in config.pools
    )
    router = RouterSettings(port=0, http_port=0, replicas=2, drain_timeout_s=2.0)
    with launch(ClusterConfig(str(model_dir), pools, router, TransferSettings(checksums="always")), model_dir) as made:
        yield made


async def status(address: str) -> cluster.ClusterStatus:
    async with grpc.aio.insecure_channel(address, options=ALONE) as channel:
        return await cluster_pb2_grpc.ClusterStub(channel).GetStatus(cluster.GetStatusRequest(), timeout=5)


async def both(address: str) -> list[cluster.RouterStatus]:
    """The two replicas, once each of them says that both are there."""

    async def present() -> list[cluster.RouterStatus] | None:
        try:
            routers = list((await status(address)).routers)
            seen = [len((await status(it.grpc_address)).routers) for it in routers]
            if seen == [2, 2]:
                return routers
        except grpc.aio.AioRpcError:
            pass
        return None

    return await until(present, timeout_s=30, what="both replicas")


async def at_rest(routers: Sequence[cluster.RouterStatus]) -> None:
    async def rest() -> bool:
        seen = [await status(it.grpc_address) for it in routers]
        return not any(
            worker.load.held_blocks or worker.load.lent_blocks or worker.load.quarantined_blocks or worker.in_flight
            for one in seen
            for pool in one.pools
            for worker in pool.workers
        ) and not any(one.router.running for one in seen)

    await until(rest, what="free blocks and no request on either replica")


async def tokens_of(address: str, index: int, received: list[int]) -> int:
    """One stream by a client, and so a connection, of its own. Returns how often it was resumed."""
    async with AsyncClient(address) as client:
        generation = client.generate(
            token_ids=PROMPTS[index % 10], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=60
        )
        async for output in generation:
            if output.token_ids:
                assert output.first_token_index == len(received), "a gap or a repeat"
                received += output.token_ids
        return (await generation.result()).num_resumes


async def streams(address: str, received: list[list[int]]) -> list[int]:
    return await asyncio.gather(*(tokens_of(address, index, tokens) for index, tokens in enumerate(received)))


def test_connections_spread_over_both_replicas_and_give_the_same_tokens(replicated):
    async def scenario() -> None:
        before = await both(replicated.address)
        assert [it.keeper for it in before] == [True, False]
        assert len({it.pid for it in before}) == len({it.grpc_address for it in before}) == 2
        expected = [[] for _ in range(3)]
        for it in before:
            received: list[list[int]] = [[] for _ in expected]
            await streams(it.grpc_address, received)
            expected = received if not expected[0] else expected
            assert received == expected
        for _ in range(20):  # each time at least one of many connections meets the other replica, but for chance
            received = [[] for _ in range(16)]
            await streams(replicated.address, received)
            assert received[:3] == expected
            after = [(await status(it.grpc_address)).router for it in before]
            if all(later.requests_total > it.requests_total for later, it in zip(after, before, strict=True)):
                break
        else:
            raise AssertionError("every connection met the same replica")
        await at_rest(before)

    asyncio.run(scenario())


def test_an_abort_ends_a_request_on_the_other_replica(replicated):
    async def scenario() -> None:
        routers = await both(replicated.address)
        for here, there in (routers, reversed(routers)):
            async with (
                grpc.aio.insecure_channel(here.grpc_address, options=ALONE) as near,
                grpc.aio.insecure_channel(there.grpc_address, options=ALONE) as far,
            ):
                message = request(PROMPT, 400, request_id="the-one")
                running = asyncio.create_task(answer(inference_pb2_grpc.InferenceStub(near), message))
                async with AsyncClient(there.grpc_address) as client:
                    await until(lambda client=client: client.abort("the-one"), what="an abort that finds it")
                assert (await running).finish.reason == inference.FINISH_REASON_ABORTED
                abort = inference_pb2_grpc.InferenceStub(far).Abort
                assert not (await abort(inference.AbortRequest(request_id="nobody"), timeout=5)).found
        await at_rest(routers)

    asyncio.run(scenario())


def test_a_follower_passes_scale_and_drain_on_to_the_keeper(replicated):
    async def scenario() -> None:
        keeper, follower = await both(replicated.address)
        async with grpc.aio.insecure_channel(follower.grpc_address, options=ALONE) as channel:
            operator = cluster_pb2_grpc.ClusterStub(channel)
            assert (await operator.Scale(cluster.ScaleRequest(pool="decode", size=2), timeout=60)).size == 2

            def decode(one: cluster.ClusterStatus) -> list[str]:
                return [worker.state for pool in one.pools if pool.role == "decode" for worker in pool.workers]

            async def grown() -> bool:
                return [decode(await status(it.grpc_address)) for it in (keeper, follower)] == [["ready"] * 2] * 2

            await until(grown, what="two decode workers in both pictures")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await operator.Scale(cluster.ScaleRequest(pool="nothing", size=2), timeout=10)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            received: list[list[int]] = [[] for _ in range(6)]
            running = asyncio.create_task(streams(follower.grpc_address, received))
            await until(lambda: all(received), timeout_s=30, what="first tokens")
            moved = await operator.Drain(cluster.DrainRequest(worker_id="decode-1", timeout_s=0.05), timeout=30)
            assert moved.moved >= 1, "the follower's own streams were on it"
            await running
            assert all(len(tokens) == NUM_TOKENS for tokens in received)
            await operator.Scale(cluster.ScaleRequest(pool="decode", size=1), timeout=60)
        await at_rest((keeper, follower))

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [0, 1], ids=["the keeper", "the follower"])
def test_a_killed_replicas_streams_go_on_through_the_other(replicated, victim):
    async def scenario() -> None:
        routers = await both(replicated.address)
        undisturbed: list[list[int]] = [[] for _ in range(10)]
        await streams(routers[1 - victim].grpc_address, undisturbed)
        received: list[list[int]] = [[] for _ in range(10)]
        running = asyncio.create_task(streams(replicated.address, received))
        await until(lambda: sum(len(tokens) >= 5 for tokens in received) >= 3, timeout_s=30, what="streams")
        os.kill(routers[victim].pid, signal.SIGKILL)
        resumes = await running
        assert received == undisturbed
        after = await both(replicated.address)
        assert after[1 - victim].pid == routers[1 - victim].pid
        assert after[victim].pid != routers[victim].pid
        assert not psutil.pid_exists(routers[victim].pid)
        await at_rest(after)
        return sum(resumes)

    # The kernel gives each connection to a replica by chance: all ten may have met the other one.
    assert any(asyncio.run(scenario()) for _ in range(3)), "no stream was ever on the killed replica"
