"""Hosts join and leave a cluster that serves: new ones take traffic, drained ones lose nobody's request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import pytest
from asking import until
from hosts.launcher import CLIENT, RayHosts, at_rest, workers
from hosts.streams import wrong_tokens
from hosts.table import Table

from baton.client.client import AsyncClient

pytestmark = pytest.mark.timeout(600)

NUM_LOOPS, NUM_TOKENS = 6, 40
PAUSE_S = 0.5
"""Between two requests of a loop: the host that joins has to start Ray on the cores that all hosts share."""
GROWN_S, LEFT_S = 300.0, 240.0
LOOK_S = 0.1
TRAFFIC_S = 10.0
"""For a worker that is ready to finish its first request."""


def decode_hosts(hosts: RayHosts) -> dict[str, str]:
    """The hosts of decode workers that are ready, by worker."""
    found = (worker for worker in workers(hosts.status()) if worker.role == "decode" and worker.state == "ready")
    return {worker.worker_id: hosts.bed.name_of(worker.address) for worker in found}


@dataclass
class Answers:
    """What came of all requests, and when each decode worker first finished one."""

    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    finished_by: dict[str, float] = field(default_factory=dict)


@asynccontextmanager
async def load(hosts: RayHosts) -> AsyncIterator[Answers]:
    """Requests all the time, each with a prompt of its own: one that a worker knows would go there again."""
    stopping = asyncio.Event()
    answers = Answers()

    async def ask(client: AsyncClient, random: Random) -> None:
        while not stopping.is_set():
            prompt = random.choices(range(256), k=60)
            generation = client.generate(
                token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=300.0
            )
            result = await generation.result()
            answers.prompts.append(prompt)
            answers.outputs.append(list(result.token_ids))
            answers.finished_by.setdefault(result.finish.decode_worker, time.monotonic())
            await asyncio.sleep(PAUSE_S)

    async with hosts.client() as client, asyncio.TaskGroup() as group:
        for index in range(NUM_LOOPS):
            group.create_task(ask(client, Random(index)))
        yield answers
        stopping.set()


def test_a_host_that_joins_takes_traffic_and_one_that_is_drained_leaves(
    hosts: RayHosts, table: Table, model_dir
) -> None:
    async def grow_and_shrink() -> Answers:
        async with load(hosts) as answers:
            before = await asyncio.to_thread(decode_hosts, hosts)
            (spare,) = set(hosts.shape.decode) - set(before.values())
            scaling = asyncio.create_task(scale(hosts, 3))
            await seen(lambda: hosts.raylet(spare), GROWN_S, f"Ray on {spare}")
            began = time.monotonic()
            await scaling
            grown = await seen(lambda: len(found := decode_hosts(hosts)) == 3 and found, GROWN_S, "a third worker")
            ready_at = time.monotonic()
            (new,) = set(grown) - set(before)
            assert grown[new] == spare
            await until(
                lambda: new in answers.finished_by,
                timeout_s=TRAFFIC_S,
                what="a request that the new worker finished",
            )
            served_at = answers.finished_by[new]
            # Ray's clock is the wall's, to the millisecond.
            joined_at = await asyncio.to_thread(hosts.joined_at, spare) - time.time() + time.monotonic()
            table.note("a host joins", "it is a node of Ray's", joined_at - began)
            table.note("a host joins", "from then: its worker is ready", ready_at - joined_at)
            table.note("a host joins", "from then: its first request is finished", served_at - joined_at)

            going, leaving = min(before.items())
            began = time.monotonic()
            await asyncio.to_thread(hosts.bed.run, CLIENT, "baton", "drain", going, *hosts.options())
            assert await asyncio.to_thread(decode_hosts, hosts) == {
                name: host for name, host in grown.items() if name != going
            }
            table.note("a worker is drained", "it is gone", time.monotonic() - began)
            await seen(lambda: hosts.raylet(leaving) is None, LEFT_S, f"the end of Ray on {leaving}")
            table.note("a worker is drained", "its host has left", time.monotonic() - began)
        assert at_rest(await asyncio.to_thread(hosts.status))
        return answers

    answers = asyncio.run(grow_and_shrink())
    assert wrong_tokens(model_dir, answers.prompts, answers.outputs) == []


async def scale(hosts: RayHosts, size: int) -> None:
    def ask() -> None:
        with hosts.operator(timeout_s=GROWN_S) as operator:
            operator.scale("decode", size)

    await asyncio.to_thread(ask)


async def seen(condition: Callable[[], object], timeout_s: float, what: str) -> object:
    """Waits for something that takes some milliseconds to look at, of cores that all hosts share."""
    deadline = time.monotonic() + timeout_s
    while not (value := await asyncio.to_thread(condition)):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        await asyncio.sleep(LOOK_S)
    return value
