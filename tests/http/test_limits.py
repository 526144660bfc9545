"""What clients may not take: too large a body or head, too many requests, a place in a full queue."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_model import PaperRunner
from small_cluster import SmallCluster
from web import client_of

from baton.proto.settings import SchedulerSettings
from baton.router import allowance
from baton.router.allowance import RateLimit
from baton.router.config import RouterSettings
from baton.router.http import limits

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def small(paper_dir):
    async with SmallCluster(
        paper_dir, PaperRunner, router_settings=RouterSettings(port=0, max_message_mib=1)
    ) as cluster:
        yield cluster


async def test_a_body_over_the_bound_is_413_with_its_length_told_or_not(small) -> None:
    async def pieces(num_bytes: int):
        for _ in range(num_bytes // 65536):
            yield b" " * 65536

    async with client_of(small) as http:
        within = b'{"prompt": "x", "max_tokens": 1, "user": "' + b"y" * (MIB - 100) + b'"}'
        assert (await http.post("/v1/completions", content=within, headers=JSON)).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for content in (b" " * (MIB + 1), pieces(MIB + 65536)):
                response = await http.post(path, content=content, headers=JSON)
                assert response.status_code == 413
                assert response.json()["error"]["code"] == "request_too_large"


async def test_a_body_that_does_not_come_is_given_up(small, monkeypatch) -> None:
    monkeypatch.setattr(limits, "READ_S", 0.2)
    reader, writer = await asyncio.open_connection(*small.http_address.split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n")
    assert b" 408 " in head
    writer.close()


async def test_a_head_without_end_is_cut_off(small) -> None:
    reader, writer = await asyncio.open_connection(*small.http_address.split(":"))
    writer.write(b"GET /health HTTP/1.1\r\nX-Long: ")
    sent = 0
    # The server's answer may be overtaken by its reset, as we go on sending.
    with suppress(ConnectionError):
        async with asyncio.timeout(10):
            while not reader.at_eof() and sent < 100 * MIB:
                writer.write(b"y" * 65536)
                sent += 65536
                await writer.drain()
                await asyncio.sleep(0)
    assert sent < 50 * MIB, "the server has taken it all"
    writer.transport.abort()
    async with client_of(small) as http:
        assert (await http.get("/version")).status_code == 200


async def test_long_bodies_on_one_connection_are_not_taken_for_heads(small) -> None:
    async with client_of(small) as http:
        body = {"prompt": "x", "max_tokens": 1, "user": "y" * 200_000}
        for _ in range(3):
            assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_who_calls_too_often_is_told_when_to_come_again(paper_dir, tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("a: key-of-client-a\nb: key-of-client-b\n")
    settings = RouterSettings(port=0, max_requests_per_s=0.2, api_keys_file=str(file))
    async with SmallCluster(paper_dir, PaperRunner, router_settings=settings) as cluster, client_of(cluster) as http:
        for key in ("key-of-client-a", "key-of-client-b"):
            http.headers["Authorization"] = f"Bearer {key}"
            body = {"prompt": "x", "max_tokens": 1}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                response = await http.post(path, json=body)
                assert response.status_code == 429
                assert 1 <= int(response.headers["retry-after"]) <= 5
                assert response.json()["error"]["code"] == "rate_limit_exceeded"
            assert (await http.get("/health")).status_code != 429


@settings(max_examples=200, deadline=None)
@given(per_s=st.floats(0.1, 50), gaps=st.lists(st.floats(0, 3), min_size=1, max_size=60), clients=st.integers(1, 3))
def test_nobody_gets_more_than_the_rate_and_whoever_waits_as_told_gets_in(per_s, gaps, clients) -> None:
    limit, now, taken = RateLimit(per_s), 0.0, dict.fromkeys(range(clients), 0)
    for number, gap in enumerate(gaps):
        now += gap
        client = number % clients
        wait_s = limit.wait_s(str(client), now)
        taken[client] += wait_s == 0.0
        assert taken[client] <= max(1.0, per_s) + now * per_s + 1e-6
        if wait_s:
            assert limit.wait_s(str(client), now + wait_s + 1e-6) == 0.0
            now, taken[client] = now + wait_s + 1e-6, taken[client] + 1


def test_the_table_of_clients_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(allowance, "MAX_CLIENTS", 10)
    limit = RateLimit(1.0)
    for number in range(1000):
        assert limit.wait_s(str(number), 0.0) == 0.0
    assert len(limit._buckets) == 10
    assert limit.wait_s("999", 0.0) > 0.0


async def test_a_full_queue_is_429_and_all_that_were_taken_in_end(paper_dir) -> None:
    settings = RouterSettings(port=0, max_queued_requests=2, credit_steps=0.1)
    async with (
        SmallCluster(
            paper_dir,
            lambda: PaperRunner(step_s=0.01),
            router_settings=settings,
            scheduler=SchedulerSettings(max_num_seqs=2),
        ) as cluster,
        client_of(cluster) as http,
    ):
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
        responses = await asyncio.gather(
            *(http.post("/v1/completions", json={**body, "stream": place % 2 == 0}) for place in range(30))
        )
        refused = [response for response in responses if response.status_code == 429]
        assert refused
        assert {response.status_code for response in responses} == {200, 429}
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        await cluster.at_rest()
