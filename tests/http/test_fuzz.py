"""Whatever is sent to the HTTP port: an answer in time, no server error, and nothing kept.

`make test-clients` sends ten thousand such requests to real workers.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from asking import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paper_model import PaperRunner, write_paper_tokenizer
from raw_http import HEALTH, Shot, connected, exchange, fault
from rubbish import post, shot
from small_cluster import SmallCluster

from baton.router.http import limits, server


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
    begun: Future[Served] = Future()
    over = asyncio.Event()

    async def serve() -> None:
        async with SmallCluster(directory, PaperRunner) as small:
            await small.router.prove_ready()
            await small.at_rest()
            # One more for the task that looks.
            begun.set_result(Served(small, asyncio.get_running_loop(), len(asyncio.all_tasks()) + 1))
            await over.wait()

    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(lambda: asyncio.run(serve()))
        wait((begun, serving), 60.0, FIRST_COMPLETED)
        if not begun.done():
            serving.result(0.0)
        served = begun.result(0.0)
        yield served
        served.loop.call_soon_threadsafe(over.set)
        serving.result(60.0)


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


def test_clients_that_begin_a_request_and_fall_silent_hold_up_nobody_and_are_left(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 2.0)
    monkeypatch.setattr(limits, "READ_S", 2.0)
    with ExitStack() as stack:
        silent = [_fallen_silent(stack.enter_context(connected(served.small.http_address)), n) for n in range(100)]
        assert fault(HEALTH, exchange(served.small.http_address, HEALTH)) is None
        for connection in silent:
            while connection.recv(4096):
                pass
    served.wait(served.rests())


def _fallen_silent(connection: socket.socket, number: int) -> socket.socket:
    """A connection on which somewhat more has been sent than on the last; on every other one, after a whole request."""
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    if number % 2:
        connection.sendall(HEALTH.pieces[0])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    connection.sendall(begun[: number * (len(begun) + 1) // 100 + number % 2])
    return connection


def test_a_head_that_drips_while_an_earlier_request_is_answered_does_not_end_that_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.05)
    body = json.dumps({"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()
    sent = Shot("dripping", (post("/v1/completions", body) + b"GET /health HT",))
    reply = exchange(served.small.http_address, sent)
    assert fault(sent, reply) is None
    assert reply.answers[0].body.count(b"data: {") == 1000
