"""S5: what the router costs with workers that compute nothing, beside vLLM's router (Rust) in its P/D mode.

Owns: the backend that the peer's router is given, and the rows. The clients, over HTTP, and our null workers are those
of `streams.py`. Both routers hand each request to a prefill and then to a decode worker.

    CPU      many streams at once, a token for each of them every 100 ms, each in a message of its own: user and system
             time of the router's process over all tokens, admission of the requests included
    latency  one request at a time, two tokens, from workers that answer at once: from connecting to the last byte
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bars import Better, Measure, Row
from case import Options
from null_workers import Shape, closed, null_cluster, process
from peers import rust_router
from streams import HTTP_CHUNK, Ask, Broken, Figures, HttpFace, Steps, Text, measure, sample_text

from baton.engine.checkpoint import resolve_model
from baton.router.tokenizer import Tokenizer

BAR = 0.5
"""At most twice the CPU of the peer's; as much as the peer's is the aim beyond."""
STREAMS, TOKENS, STEP_S, DECODE = 512, 64, 0.1, 4
REQUESTS = 300


@dataclass(frozen=True, slots=True)
class Side:
    """A router: where it listens, its process, and how its answers are checked."""

    name: str
    address: str
    pid: int
    text: Text | None


def rows(options: Options) -> Iterator[Row]:
    model = resolve_model(options.model)
    text = Text(Tokenizer(model), sample_text())
    streams, tokens = (32, 8) if options.quick else (STREAMS, TOKENS)
    asks = text.asks(streams, tokens)

    def cpu_us(side: Side) -> float:
        figures = asyncio.run(_streamed(side, asks))
        if figures.messages_a_token < 1 and side.text is None:
            raise Broken(f"{side.name} sent {figures.messages_a_token} messages a token")
        return figures.cpu_us_a_token

    cpu = _both(options, model, text, Shape(DECODE, STEP_S), cpu_us)
    measured = Measure("vllm-router", Better.LESS, BAR, tuple(cpu["ours"]), tuple(cpu["theirs"]))
    yield Row("S5", f"router CPU of a streamed token, {streams} streams", "us", (measured,))

    def latency_us(side: Side) -> float:
        return asyncio.run(_latency_us(side, text.asks(20 if options.quick else REQUESTS, 2)))

    latency = _both(options, model, text, Shape(1, 0.0), latency_us)
    measured = Measure("vllm-router", Better.LESS, None, tuple(latency["ours"]), tuple(latency["theirs"]))
    yield Row("S5", "request of 2 tokens, p50, null workers", "us", (measured,))


def _both(
    options: Options, model: Path, text: Text, shape: Shape, figure: Callable[[Side], float]
) -> dict[str, list[float]]:
    """Both routers are up together and are asked in turn; who is not asked has nothing to do."""
    with ExitStack() as stack:
        ours = stack.enter_context(null_cluster(model, text.ids, shape))
        sides = {"ours": Side("baton", ours.addresses.http, ours.router_pid, text)}
        if options.peers is not None:
            _, urls = stack.enter_context(process(_run_backend, shape))
            prefill, decode = urls  # type: ignore[misc]
            router = stack.enter_context(
                rust_router(options.peers, prefill=prefill, decode=decode, cores=set(options.cores))
            )
            sides["theirs"] = Side("vllm-router", router.url.removeprefix("http://"), router.pid, None)
        found: dict[str, list[float]] = {"ours": [], "theirs": []}
        for side in sides.values():
            figure(side)  # the first requests of a process cost more
        for _ in range(options.rounds_or(3)):
            for name, side in sides.items():
                found[name].append(figure(side))
        return found


async def _streamed(side: Side, asks: Sequence[Ask]) -> Figures:
    return await measure(side.name, HttpFace(side.address), side.pid, side.text, asks)


async def _latency_us(side: Side, asks: Sequence[Ask]) -> float:
    face = HttpFace(side.address)
    times = []
    for number, ask in enumerate(asks):
        stream = face.stream(number, ask)
        began_s = time.perf_counter()
        await stream.begin()
        heard = await stream.read()
        times.append(1e6 * (time.perf_counter() - began_s))
        if (stream.check(heard, side.text) if side.text is not None else stream.count(heard)) < 1:
            raise Broken(f"{side.name} sent no token")
    return statistics.median(times)


# --- what the peer's router is given ----------------------------------------------------------------------------------


async def _run_backend(pipe: Connection, shape: Shape) -> None:
    """An OpenAI-style server on two ports, one for each role, that says ready-made words at the steps of `shape`."""
    steps = Steps(shape) if shape.step_s else None
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: _Backend(steps), "127.0.0.1", 0, backlog=1024) for _ in range(2)]
    pipe.send([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers])
    await closed(pipe)


class _Backend(asyncio.Protocol):
    """One connection, one request after the other. As little as possible, so that it is the router that is measured."""

    def __init__(self, steps: Steps | None) -> None:
        self._steps = steps
        self._received = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        # The router sends head and body apart and waits for the head's acknowledgement, which Linux would delay.
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        length = _content_length(head)
        if not separator or len(rest) < length:
            return
        self._received = rest[length:]
        if head.startswith(b"GET"):
            self._transport.write(_json_answer({"object": "list", "data": [{"id": "demo", "object": "model"}]}))
            return
        question = json.loads(rest[:length])
        if not question.get("stream"):
            self._transport.write(PREFILLED)
        elif self._steps is None:
            self._transport.write(STREAM_HEAD + CHUNK * question["max_tokens"] + STREAM_END)
        else:
            task = asyncio.create_task(self._say(self._steps, question["max_tokens"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _say(self, steps: Steps, num_tokens: int) -> None:
        self._transport.write(STREAM_HEAD)
        async for _ in steps.each(num_tokens):
            self._transport.write(CHUNK)
        self._transport.write(STREAM_END)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def _json_answer(content: object) -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(HTTP_CHUNK), HTTP_CHUNK)
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
PREFILLED = _json_answer(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "demo",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 16, "total_tokens": 17, "completion_tokens": 1},
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": "0",
            "remote_request_id": "0",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        },
    }
)
"""What a prefill server says when it is done: where the KV is."""
