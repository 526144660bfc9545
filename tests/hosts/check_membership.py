"""Hosts join and leave a cluster that serves: new ones take traffic, drained ones lose nobody's request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from asking import until
from hosts.launcher import RayHosts, at_rest, workers
from hosts.table import Table

from baton.client.client import AsyncClient

pytestmark = pytest.mark.timeout(600)

NUM_LOOPS, NUM_TOKENS = 12, 40
GROWN_S, LEFT_S = 300.0, 240.0
TRAFFIC_S = 60.0


def decode_hosts(hosts: RayHosts) -> dict[str, str]:
    """The hosts of decode workers that are ready, by worker."""
    found = (worker for worker in workers(hosts.status()) if worker.role == "decode" and worker.state == "ready")
    return {worker.worker_id: hosts.bed.name_of(worker.address) for worker in found}


@asynccontextmanager
async def load(hosts: RayHosts):
    """Requests all the time, each with the answer that the first one like it had; fails with the first that differs."""
    stopping = asyncio.Event()
    finished_by: dict[str, float] = {}

    async def ask(client: AsyncClient, index: int) -> None:
        prompt = [(index * 31 + position * 7) % 256 for position in range(60)]
        expected = None
        while not stopping.is_set():
            generation = client.generate(
                token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=300.0
            )
            result = await generation.result()
            expected = expected or result.token_ids
            assert result.token_ids == expected
            finished_by.setdefault(result.finish.decode_worker, time.monotonic())

    async with hosts.client() as client, asyncio.TaskGroup() as group:
        for index in range(NUM_LOOPS):
            group.create_task(ask(client, index))
        yield finished_by
        stopping.set()


def test_a_host_that_joins_takes_traffic_and_one_that_is_drained_leaves(hosts: RayHosts, table: Table) -> None:
    async def grow_and_shrink() -> None:
        async with load(hosts) as finished_by:
            before = await asyncio.to_thread(decode_hosts, hosts)
            (spare,) = set(hosts.shape.decode) - set(before.values())
            scaling = asyncio.create_task(scale(hosts, 3))
            await seen(lambda: hosts.raylet(spare), GROWN_S, f"Ray on {spare}")
            joined_at = time.monotonic()
            await scaling
            grown = await seen(lambda: len(found := decode_hosts(hosts)) == 3 and found, GROWN_S, "a third worker")
            (new,) = set(grown) - set(before)
            assert grown[new] == spare
            await until(lambda: new in finished_by, timeout_s=TRAFFIC_S, what="a request that the new worker finished")
            table.note("a host joins", "its first request is finished", finished_by[new] - joined_at)

            began = time.monotonic()
            await scale(hosts, 2)
            left = await asyncio.to_thread(decode_hosts, hosts)
            assert len(left) == 2
            table.note("a worker is drained", "it is gone", time.monotonic() - began)
            (leaving,) = set(grown.values()) - set(left.values())
            await seen(lambda: hosts.raylet(leaving) is None, LEFT_S, f"the end of Ray on {leaving}")
            table.note("a worker is drained", "its host has left", time.monotonic() - began)
        assert at_rest(await asyncio.to_thread(hosts.status))

    asyncio.run(grow_and_shrink())


async def scale(hosts: RayHosts, size: int) -> None:
    def ask() -> None:
        with hosts.operator(timeout_s=GROWN_S) as operator:
            operator.scale("decode", size)

    await asyncio.to_thread(ask)


async def seen(condition: Callable[[], object], timeout_s: float, what: str) -> object:
    """Waits for something that takes some milliseconds to look at."""

    def look() -> Awaitable[object]:
        return asyncio.to_thread(condition)

    return await until(look, timeout_s=timeout_s, what=what)
