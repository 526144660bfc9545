"""HTTP clients that do not read cost the router little and others nothing, and get everything when they read again."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import grpc
import psutil
from asking import until
from null_workers import Shape, null_cluster, output, seed_for

from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc
from baton.router.tokenizer import Tokenizer

SLOW, OTHERS = 64, 16
SLOW_TOKENS, OTHERS_TOKENS = 3072, 128
# A message of one token takes about 450 bytes in the router, so unread ones would take 1.3 MiB a reader. The server's
# buffer of 64 KiB, which is copied as it grows, is part of this.
READER_KIB = 384
RECEIVE_BUFFER = 4096
TEXT_IDS = tuple(32 + (7 * index * index + index) % 90 for index in range(5000))


class Stream:
    """One streamed completion on a connection of its own, read when the test says so."""

    def __init__(self, address: str, start: int, num_tokens: int) -> None:
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)
        self._start, self._num_tokens = start, num_tokens

    async def begin(self) -> None:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (self._host, self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=connection, limit=RECEIVE_BUFFER)
        body = json.dumps(
            {
                "prompt": list(TEXT_IDS[:16]),
                "max_tokens": self._num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "seed": seed_for(self._start),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nhost: router\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def heard(self, tokenizer: Tokenizer) -> int:
        """Reads to the end; the number of events with text. They must have all of it, once and in order."""
        data = await self._reader.read()
        self._writer.close()
        head, _, body = data.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], data[:500]
        events = [event.removeprefix(b"data: ") for event in _whole(head, body).split(b"\n\n") if event]
        assert events.pop() == b"[DONE]"
        messages = [json.loads(event) for event in events]
        texts = [choice["text"] for message in messages for choice in message["choices"]]
        expected = tokenizer.decode(output(TEXT_IDS, seed_for(self._start), self._num_tokens))
        assert "".join(texts) == expected
        assert messages[-1]["usage"]["completion_tokens"] == self._num_tokens
        return len(texts)


def _whole(head: bytes, body: bytes) -> bytes:
    if b"chunked" not in head.lower():
        return body
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


async def test_clients_that_do_not_read_are_bounded_and_do_not_slow_others(paper_dir: Path):
    tokenizer = Tokenizer(paper_dir)
    with null_cluster(paper_dir, TEXT_IDS, Shape(decode=2, step_s=0.005)) as nulls:
        router, address = psutil.Process(nulls.router_pid), nulls.addresses.http
        async with grpc.aio.insecure_channel(nulls.addresses.grpc) as channel, asyncio.timeout(200):
            clusters = cluster_pb2_grpc.ClusterStub(channel)

            async def whole(start: int, num_tokens: int) -> int:
                stream = Stream(address, start, num_tokens)
                await stream.begin()
                return await stream.heard(tokenizer)

            async def is_said() -> bool:
                status = await clusters.GetStatus(cluster.GetStatusRequest())
                return status.router.running == 0

            await asyncio.gather(*(whole(start, 64) for start in range(SLOW)))
            before = router.memory_info().rss
            slow = [Stream(address, start, SLOW_TOKENS) for start in range(SLOW)]
            for stream in slow:
                await stream.begin()
            others = await asyncio.gather(*(whole(start, OTHERS_TOKENS) for start in range(OTHERS)))
            assert all(others)
            await until(is_said, 150.0, "the end of all that slow readers are told")
            assert (router.memory_info().rss - before) / SLOW < READER_KIB << 10
            numbers = [await stream.heard(tokenizer) for stream in slow]
            assert max(numbers) < SLOW_TOKENS / 2
