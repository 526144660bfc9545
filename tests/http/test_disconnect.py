"""Who goes away takes their request along: no block stays held for a client that nobody is."""

from __future__ import annotations

import asyncio
import json

import pytest
from asking import until
from paper_model import PaperRunner
from small_cluster import SmallCluster
from web import client_of

from baton.router.http import answer as answer_module


def raw(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@pytest.fixture
async def slow(paper_dir):
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.01, num_blocks=600)) as cluster:
        yield cluster


BODIES = {
    "streamed": {"prompt": "x", "max_tokens": 3000, "stream": True},
    "whole": {"prompt": "x", "max_tokens": 3000},
    "several": {"prompt": ["x", "y", "z"], "n": 2, "max_tokens": 900},
    "several streamed": {"prompt": ["x", "y", "z"], "n": 2, "max_tokens": 900, "stream": True},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_a_client_that_is_gone_frees_its_blocks(slow, body) -> None:
    for wait_for_running in (False, True):
        _, writer = await asyncio.open_connection(*slow.http_address.split(":"))
        writer.write(raw("/v1/completions", body))
        await writer.drain()
        if wait_for_running:
            await until(lambda: slow.router.book.in_flight > 0)
            await asyncio.sleep(0.1)
        writer.transport.abort()
        await until(lambda: not slow.router.num_running)
        await slow.at_rest()


async def test_of_requests_sent_in_one_go_the_running_one_ends_too(slow) -> None:
    _, writer = await asyncio.open_connection(*slow.http_address.split(":"))
    writer.write(raw("/v1/completions", BODIES["streamed"]) + raw("/v1/completions", BODIES["whole"]))
    await writer.drain()
    await until(lambda: slow.router.book.in_flight > 0)
    writer.transport.abort()
    await until(lambda: not slow.router.num_running)
    await slow.at_rest()


async def test_a_client_that_does_not_read_holds_up_nobody_and_is_given_up(slow, monkeypatch) -> None:
    """Its socket fills, then its own events wait; they are as many as its tokens. After a while it is dropped."""
    monkeypatch.setattr(answer_module, "STALL_S", -599.0)
    _, writer = await asyncio.open_connection(*slow.http_address.split(":"), limit=1024)
    writer.transport.pause_reading()
    writer.write(raw("/v1/completions", {**BODIES["streamed"], "n": 4}))
    await until(lambda: slow.router.num_running)
    async with client_of(slow) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
        assert response.status_code == 200
    await until(lambda: not slow.router.num_running)
    await slow.at_rest()
    writer.transport.abort()


async def test_closing_the_server_ends_what_runs(paper_dir) -> None:
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.01)) as cluster:
        _, writer = await asyncio.open_connection(*cluster.http_address.split(":"))
        writer.write(raw("/v1/completions", BODIES["streamed"]))
        await until(lambda: cluster.router.book.in_flight > 0)
        await cluster.server.close()
        assert not cluster.router.num_running
        await cluster.at_rest()
        writer.close()


async def test_an_abort_by_grpc_ends_the_http_stream_with_its_reason(slow) -> None:
    from baton.proto import inference_pb2 as inference

    async with client_of(slow) as http:
        headers = {"X-Request-Id": "abort-me"}
        asked = asyncio.create_task(http.post("/v1/completions", json=BODIES["streamed"], headers=headers))
        await until(lambda: slow.router.book.in_flight > 0)
        assert (await slow.inference.Abort(inference.AbortRequest(request_id="abort-me"))).found
        response = await asked
        assert '"finish_reason":"abort"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    await slow.at_rest()
