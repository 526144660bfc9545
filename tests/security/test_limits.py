"""What one client can make the router keep: requests, streams, bytes, tokens. And those who come and say nothing."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc
import psutil
import pytest
from asking import answer, request, until
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_model import PaperRunner, paper_output
from port_noise import GREETING, Port, ended_streams
from small_cluster import SmallCluster
from web import client_of

from baton.client.client import AsyncClient
from baton.client.errors import Overloaded
from baton.engine import desk
from baton.proto import inference_pb2 as inference
from baton.proto import worker_pb2_grpc
from baton.router import guard, server
from baton.router.allowance import Allowance
from baton.router.config import RouterSettings
from baton.router.http import server as http_server

PROMPT = [index % 251 for index in range(40)]
METHODS = ("/baton.v1.Inference/Generate", "/baton.v1.Inference/GetModel", "/grpc.health.v1.Health/Check")
KEY, OTHER = "sk-0123456789abcdef", "a-second-key-of-somebody"


@asynccontextmanager
async def serving(paper_dir, step_s: float = 0.0, **settings):
    async with SmallCluster(
        paper_dir, lambda: PaperRunner(step_s=step_s), router_settings=RouterSettings(port=0, **settings)
    ) as small:
        small.router.ready.set()
        yield small


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    [packed] = status_pb2.Status.FromString(details).details
    info = error_details_pb2.RetryInfo()
    assert packed.Unpack(info)
    return info.retry_delay.ToTimedelta().total_seconds()


# --- requests ---


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60), st.integers(1, 4))
def test_no_client_has_more_than_its_share_nor_takes_anothers(moves, limit) -> None:
    allowance, inside = Allowance(limit, 0.0), dict.fromkeys("abc", 0)
    for client, comes in moves:
        if comes:
            assert (allowance.enter(client) is None) == (inside[client] < limit)
            inside[client] = min(inside[client] + 1, limit)
        elif inside[client]:
            allowance.leave(client)
            inside[client] -= 1
    for client, count in inside.items():
        for _ in range(count):
            allowance.leave(client)
    assert not allowance._open


async def test_a_key_has_so_many_requests_at_once_by_both_faces_together(paper_dir, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"one: {KEY}\nother: {OTHER}\n")
    async with serving(paper_dir, step_s=0.005, max_requests_at_once=2, api_keys_file=str(keys)) as small:

        def shown(key: str) -> tuple[tuple[str, str]]:
            return (("authorization", f"Bearer {key}"),)

        running = [small.inference.Generate(request(PROMPT, 2000), metadata=shown(KEY)) for _ in range(2)]
        for call in running:
            await call.read()
        error = await failure(small.inference.GetModel(inference.GetModelRequest(), metadata=shown(KEY)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "at most 2 of one client" in error.details()
        assert retry_delay_s(error) > 0
        async with client_of(small) as http:
            refused = await http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert (await http.get("/v1/models", headers={"Authorization": f"Bearer {OTHER}"})).status_code == 200
            for call in running:
                call.cancel()

            async def free() -> bool:
                answered = await http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
                return answered.status_code == 200

            await until(free, what="room again")
        await small.at_rest()


async def test_a_rate_holds_for_grpc_too_and_says_when_to_come_back(paper_dir) -> None:
    async def ask(client: AsyncClient, times: int) -> None:
        for _ in range(times):
            await client.generate(token_ids=PROMPT, max_tokens=1).result()

    async with serving(paper_dir, max_requests_per_s=1.0) as small, AsyncClient(small.address) as client:
        await ask(client, 1)
        with pytest.raises(Overloaded, match="too many requests") as caught:
            await ask(client, 20)
        assert 0.0 < caught.value.retry_after_s <= 1.0
        # Who only looks is not held back.
        for _ in range(20):
            await client.model()


async def test_a_request_has_so_many_tokens_and_no_more(paper_dir) -> None:
    async with serving(paper_dir, max_request_tokens=64) as small:
        assert (await small.inference.GetModel(inference.GetModelRequest())).max_model_len == 64
        assert (await answer(small.inference, request(PROMPT, 24))).tokens == paper_output(PROMPT, 24)
        error = await failure(small.inference.Generate(request(PROMPT, 25)).read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "what this server allows one request" in error.details()
        async with client_of(small) as http:
            refused = await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 25})
            assert refused.status_code == 400
            [model] = (await http.get("/v1/models")).json()["data"]
            assert model["max_model_len"] == 64


# --- bytes ---


async def test_a_message_that_is_too_large_is_refused_and_the_connection_goes_on(paper_dir) -> None:
    async with serving(paper_dir, max_message_mib=1) as small:
        error = await failure(small.inference.Generate(inference.GenerateRequest(text="x" * (2 << 20))).read())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in error.details()
        assert (await answer(small.inference, request(PROMPT, 5))).tokens == paper_output(PROMPT, 5)
        async with client_of(small) as http:
            refused = await http.post("/v1/completions", json={"prompt": "x" * (2 << 20), "max_tokens": 1})
            assert refused.status_code == 413


async def test_headers_that_are_too_large_are_refused_by_both_faces(paper_dir) -> None:
    async with serving(paper_dir, max_header_kib=8) as small:
        large = (("x-large", "x" * (12 << 10)),)
        error = await failure(small.inference.GetModel(inference.GetModelRequest(), metadata=large))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await small.inference.GetModel(inference.GetModelRequest())).name == "paper"
        async with client_of(small) as http:
            refused = await http.get("/v1/models", headers={"X-Large": "x" * (12 << 10)})
            assert (refused.status_code, refused.text) == (400, "The request's head is larger than 8192 bytes.")
            assert (await http.get("/v1/models?" + "x" * (12 << 10))).status_code == 400
            assert (await http.get("/v1/models", headers={"X-Large": "x" * (6 << 10)})).status_code == 200


# --- those who say nothing ---


async def test_a_call_without_a_request_ends_by_itself(paper_dir, monkeypatch) -> None:
    monkeypatch.setattr(guard, "REQUEST_S", 0.1)
    async with serving(paper_dir) as small:
        for method in METHODS:
            error = await failure(small.channel.stream_stream(method)(timeout=20.0).read())
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert error.details() == "no request came within 0.1 s of the call"
        await small.at_rest()


async def test_a_call_that_ends_without_a_request_is_told_so(paper_dir) -> None:
    async with serving(paper_dir) as small:
        for method in METHODS:
            call = small.channel.stream_stream(method)(timeout=20.0)
            await call.done_writing()
            error = await failure(call.read())
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "without a request" in error.details()
        await small.at_rest()


async def test_bytes_that_are_no_message_are_refused_without_a_word_in_the_log(paper_dir, caplog) -> None:
    async with serving(paper_dir) as small:
        for method in METHODS:
            call = small.channel.stream_stream(method)(timeout=20.0)
            await call.write(b"\xff\xff\xff")
            error = await failure(call.read())
            assert error.code() is grpc.StatusCode.INTERNAL
        assert not [record for record in caplog.records if record.name.startswith("grpc") and record.exc_info]


async def test_who_opens_a_stream_to_a_worker_and_says_nothing_is_hung_up_on(paper_dir, monkeypatch) -> None:
    monkeypatch.setattr(desk, "HELLO_S", 0.1)
    async with serving(paper_dir) as small:
        address = small.seats["prefill-0"].description.address
        async with grpc.aio.insecure_channel(address) as channel:
            for stub in (worker_pb2_grpc.WorkerStub(channel).Connect, worker_pb2_grpc.HandoffStub(channel).Watch):
                error = await failure(stub(timeout=20.0).read())
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await answer(small.inference, request(PROMPT, 5))).tokens == paper_output(PROMPT, 5)


async def test_half_open_streams_by_the_thousand_leave_memory_flat_and_tokens_coming(paper_dir, monkeypatch) -> None:
    monkeypatch.setattr(guard, "REQUEST_S", 1.0)
    own = psutil.Process()
    async with serving(paper_dir, max_requests_at_once=128) as small:
        await answer(small.inference, request(PROMPT, 5))
        num_tasks, peaks = len(asyncio.all_tasks()), []
        host, number = small.address.rsplit(":", 1)
        port = Port("gRPC", host, int(number), own.pid)
        for _ in range(4):
            peak = 0
            attack = asyncio.gather(*(ended_streams(port, 200) for _ in range(10)))
            while not attack.done():
                await asyncio.wait({attack}, timeout=0.1)
                peak = max(peak, own.memory_info().rss)
                # From the same address there may be no room; then it is said so, and soon there is.
                with suppress(grpc.aio.AioRpcError):
                    got = await answer(small.inference, request(PROMPT, 5), timeout=20.0)
                    assert got.tokens == paper_output(PROMPT, 5)
            assert sum(await attack) == 2_000
            peaks.append(peak)
        # The first two make the allocator take what waves need; one that kept its streams would add 20 KiB for each.
        assert peaks[3] - peaks[1] < 40 << 20, [peak >> 20 for peak in peaks]
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 2, timeout_s=20.0, what="the end of their tasks")
        assert not small.server._allowance._open
        assert (await answer(small.inference, request(PROMPT, 20))).tokens == paper_output(PROMPT, 20)
        await small.at_rest()


async def test_one_connection_gets_no_more_streams_than_are_allowed(paper_dir) -> None:
    """By HTTP/2's own rules, for a client that does not wait for the server's settings."""
    async with serving(paper_dir) as small:
        reader, writer = await asyncio.open_connection(*small.address.rsplit(":", 1))
        writer.write(GREETING)
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        fields = [payload[place : place + 6] for place in range(0, len(payload), 6)]
        said = {int.from_bytes(field[:2]): int.from_bytes(field[2:]) for field in fields}
        assert said[3] == server.MAX_STREAMS_A_CONNECTION
        writer.close()


async def test_a_connection_too_many_is_closed_and_the_others_stay(paper_dir, monkeypatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    async with serving(paper_dir) as small:
        host, port = small.http_address.rsplit(":", 1)
        held = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        reader, _ = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(10.0):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        first_reader, first_writer = held[0]
        first_writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10.0):
            assert (await first_reader.readline()).startswith(b"HTTP/1.1 ")
        for _, writer in held:
            writer.close()
