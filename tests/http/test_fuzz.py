"""Whatever is sent to the HTTP port: an answer in time, no server error, and nothing kept.

`make test-clients` sends ten thousand such requests to real workers.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from asking import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paper_model import PaperRunner, write_paper_tokenizer
from raw_http import HEALTH, connected, exchange, fault
from rubbish import shot
from small_cluster import SmallCluster


@dataclass(frozen=True)
class Served:
    """A cluster whose event loop has a thread of its own: the clients here block."""

    small: SmallCluster
    loop: asyncio.AbstractEventLoop
    num_tasks: int

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60.0)

    async def rests(self) -> None:
        """No request is in progress, and those that were have left nothing behind: no block, no credit, no task."""
        router = self.small.router
        await until(lambda: not router.num_running and not router.dispatcher.num_requests, what="the end of requests")
        await self.small.at_rest()
        await until(lambda: len(asyncio.all_tasks()) <= self.num_tasks, what="the end of their tasks")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_paper_tokenizer(tmp_path_factory.mktemp("paper"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    small = SmallCluster(directory, PaperRunner)

    async def begin() -> Served:
        await small.__aenter__()
        await small.router.prove_ready()
        await small.at_rest()
        # One more, for the connection that a client may keep open.
        return Served(small, loop, len(asyncio.all_tasks()) + 1)

    served: Served | None = None
    try:
        served = asyncio.run_coroutine_threadsafe(begin(), loop).result(60.0)
        yield served
    finally:
        if served is not None:
            served.wait(small.__aexit__())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_every_request_is_answered_in_time_and_without_a_server_error(served: Served, rng: random.Random) -> None:
    sent = shot(rng)
    assert fault(sent, exchange(served.small.http_address, sent)) is None, sent


def test_a_crowd_of_careless_clients_leaves_nothing_behind(served: Served) -> None:
    def client(seed: int) -> list[str]:
        rng, found = random.Random(seed), []
        for _ in range(40):
            sent = shot(rng)
            if (wrong := fault(sent, exchange(served.small.http_address, sent))) is not None:
                found.append(f"{wrong} after {sent}")
        return found

    with ThreadPoolExecutor(12) as clients:
        assert [fault for found in clients.map(client, range(12)) for fault in found] == []
    served.wait(served.rests())
    assert fault(HEALTH, exchange(served.small.http_address, HEALTH)) is None


def test_clients_that_begin_a_request_and_fall_silent_hold_up_nobody(served: Served) -> None:
    rng = random.Random(1)
    with ExitStack() as silent:
        for _ in range(100):
            connection = silent.enter_context(connected(served.small.http_address))
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"[: rng.randrange(60)])
        assert fault(HEALTH, exchange(served.small.http_address, HEALTH)) is None
    served.wait(served.rests())
