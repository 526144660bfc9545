"""Killed processes change no stream: every request ends with exactly the tokens of an undisturbed run.

Rounds of each kind: BATON_KILL_ROUNDS, 1 unless set.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import grpc
import pytest
from asking import free_port, until

from baton.client.client import AsyncClient
from baton.proto.settings import EngineSettings, SchedulerSettings, TransferSettings
from baton.router.config import ClusterConfig, RouterSettings, defaults

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROUNDS = int(os.environ.get("BATON_KILL_ROUNDS", "1"))
NUM_STREAMS = 10
NUM_TOKENS = 150
BACK_WITHIN_S = 20.0


@dataclass
class Stream:
    """What one client has received, while it receives."""

    index: int
    tokens: list[int] = field(default_factory=list)
    retries: int = 0
    resumes: int = 0


@pytest.fixture(scope="module")
def disturbed(launch, tiny_model_dir):
    """A 2P2D cluster of a model that is slow enough to be hit in the middle of things, and its undisturbed answers."""
    model_dir = tiny_model_dir("llama", num_hidden_layers=12, hidden_size=128, intermediate_size=256)
    config = defaults(prefill=2, decode=2)
    pools = tuple(
        replace(
            pool,
            engine=EngineSettings(model=str(model_dir), dtype="float32", num_blocks=400, threads=1),
            scheduler=SchedulerSettings(max_num_batched_tokens=48),
            num_cpus=0.1,
        )
        for pool in config.pools
    )
    router = RouterSettings(port=free_port(), max_retries=8)
    transfer = TransferSettings(checksums="always")
    with launch(ClusterConfig(str(model_dir), pools, router, transfer), model_dir) as cluster:
        yield cluster, asyncio.run(all_streams(cluster.address, []))


def prompt_of(index: int) -> list[int]:
    random = Random(index)
    return [random.randrange(256) for _ in range(40 + 25 * index)]


async def one_stream(client: AsyncClient, stream: Stream, salt: str) -> None:
    generation = client.generate(
        token_ids=prompt_of(stream.index),
        max_tokens=NUM_TOKENS,
        temperature=0.0 if stream.index % 2 else 0.8,
        seed=stream.index,
        ignore_eos=True,
        cache_salt=salt,
        timeout_s=120,
    )
    async for output in generation:
        if output.token_ids:
            assert output.first_token_index == len(stream.tokens), "a gap or a repeat"
            stream.tokens += output.token_ids
    result = await generation.result()
    stream.retries, stream.resumes = result.finish.retries, result.num_resumes


async def all_streams(address: str, streams: list[Stream]) -> list[list[int]]:
    """Ten streams at once; `streams` is filled while they run. No prompt is in a prefix cache from an earlier round."""
    salt = secrets.token_hex(4)
    streams += [Stream(index) for index in range(NUM_STREAMS)]
    async with AsyncClient(address) as client:
        await asyncio.gather(*(one_stream(client, stream, salt) for stream in streams))
    return [stream.tokens for stream in streams]


async def disturb(cluster, undisturbed, moment: Callable[[list[Stream]], object], victim: Callable[[], int]) -> None:
    """Runs the streams, kills a process at the moment, and checks all that a kill must not change."""
    streams: list[Stream] = []
    running = asyncio.create_task(all_streams(cluster.address, streams))
    await until(lambda: running.done() or moment(streams), timeout_s=60, what="the moment to kill")
    assert not running.done(), "the streams were over before the moment came"
    pid = await asyncio.to_thread(victim)
    os.kill(pid, signal.SIGKILL)
    tokens = await running
    assert tokens == undisturbed
    assert any(stream.retries or stream.resumes for stream in streams), "the kill disturbed nobody"
    await until(lambda: asyncio.to_thread(all_back, cluster, pid), timeout_s=BACK_WITHIN_S, what="the return of all")
    await until(lambda: asyncio.to_thread(at_rest, cluster), timeout_s=5, what="free blocks on every worker")


def all_back(cluster, killed_pid: int) -> bool:
    """Whether router and four workers serve, and none of them is the process that was killed."""
    try:
        status = cluster.status()
    except grpc.RpcError:
        return False
    workers = [worker for pool in status.pools for worker in pool.workers]
    pids = {worker.pid for worker in workers} | {status.router.pid}
    return killed_pid not in pids and len(workers) == 4 and all(worker.state == "ready" for worker in workers)


def at_rest(cluster) -> bool:
    return not any(
        worker.load.held_blocks or worker.load.lent_blocks or worker.load.quarantined_blocks or worker.in_flight
        for worker in cluster.workers()
    )


def pid_of(cluster, role: str, index: int) -> int:
    return [worker.pid for worker in cluster.workers() if worker.role == role][index]


def started(streams: list[Stream]) -> bool:
    return len(streams) == NUM_STREAMS


def some_have(num_tokens: int) -> Callable[[list[Stream]], bool]:
    return lambda streams: sum(len(stream.tokens) >= num_tokens for stream in streams) >= 3


@pytest.mark.parametrize("round_number", range(ROUNDS))
class TestKilled:
    def test_a_prefill_worker_in_the_middle_of_prompts(self, disturbed, round_number):
        cluster, undisturbed = disturbed
        delay = Delay(0.03 + 0.01 * round_number)
        asyncio.run(
            disturb(
                cluster,
                undisturbed,
                lambda streams: started(streams) and delay.over(),
                lambda: pid_of(cluster, "prefill", round_number % 2),
            )
        )

    def test_a_decode_worker_in_the_middle_of_streams(self, disturbed, round_number):
        cluster, undisturbed = disturbed
        asyncio.run(
            disturb(
                cluster,
                undisturbed,
                some_have(5 + 10 * round_number),
                lambda: pid_of(cluster, "decode", round_number % 2),
            )
        )

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_either_side_during_the_hand_off(self, disturbed, round_number, role):
        """The moment is when a decode worker reports a sequence whose KV is on its way."""
        cluster, undisturbed = disturbed
        worker: list[int] = []

        def receiving(streams: list[Stream]) -> bool:
            if not started(streams):
                return False
            workers = cluster.workers()
            receiving = any(w.load.receiving for w in workers)
            side = [w for w in workers if w.role == role and (w.load.receiving or w.load.running or w.load.exported)]
            if receiving and side:
                worker.append(side[round_number % len(side)].pid)
            return bool(worker)

        asyncio.run(disturb(cluster, undisturbed, receiving, lambda: worker[0]))

    def test_the_router_in_the_middle_of_streams(self, disturbed, round_number):
        cluster, undisturbed = disturbed
        asyncio.run(disturb(cluster, undisturbed, some_have(3 + 8 * round_number), lambda: cluster.status().router.pid))


class Delay:
    """A time that runs from the first question."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._from: float | None = None

    def over(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._from = self._from if self._from is not None else now
        return now - self._from >= self._seconds
