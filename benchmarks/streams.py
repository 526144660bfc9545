"""What a streamed token costs the router, and whether any is lost: many streams at once, nothing computed.

    python benchmarks/streams.py [--streams 512] [--tokens 96] [--rate 10] [--slow 0] [--json OUT]

One router process with null workers (`null_workers.py`), clients in this process: first all streams over gRPC, then all
over HTTP. Each stream is compared with what its worker said: over gRPC every token once, in order, over both the text
that one decoding of all of them gives, and the count. CPU is user and system time of the router's process from the
first request to the last token, divided by the tokens. `floor` is the same without a router: a server of the same kind
whose handler sends the same messages, ready made, at the same times; what is above it is Baton's own.

`--slow N` adds N streams whose clients read nothing until all others are done, and then everything.

Owns: the clients, the floors and the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import psutil
from null_workers import Shape, closed, null_cluster, output, process, seed_for
from starlette.types import Receive, Scope, Send

from baton.engine.checkpoint import resolve_model
from baton.proto import inference_pb2 as inference
from baton.proto import inference_pb2_grpc
from baton.proto.context import Context
from baton.router.http.server import HttpServer
from baton.router.tokenizer import Tokenizer

GENERATE = "/baton.v1.Inference/Generate"
STREAMS_A_CHANNEL = 8
PROMPT_TOKENS = 16
DEADLINE_S = 600.0
RECEIVE_BUFFER = 16 << 10
SETTLE_S = 3.0
"""After the last token, until slow readers begin to read."""
OTHER_TEXT = " 一步一步来。 Zażółć gęślą jaźń — 👍🏽🎉. "


class Broken(Exception):
    """A stream that is not what its worker said."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One stream: its prompt, the seed that decides its tokens, and how many there are."""

    prompt: tuple[int, ...]
    seed: int
    num_tokens: int


@dataclass(slots=True)
class Heard:
    """What one client got: raw messages, and the time of each."""

    messages: list[bytes]
    times_s: list[float]


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Gaps are between the messages of one stream, at the client; `slow` streams are not in them."""

    what: str
    streams: int
    slow: int
    tokens: int
    seconds: float
    cpu_us_a_token: float
    messages_a_token: float
    gap_p50_ms: float
    gap_p99_ms: float
    rss_mib: float
    rss_growth_mib: float


class Text:
    """The text that workers say, and what each stream of it must look like."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self.ids = tuple(tokenizer.encode(text))

    def asks(self, number: int, num_tokens: int, tokens_a_step: int = 1) -> list[Ask]:
        """Streams that begin at places of their own, the same in every run."""
        places = random.Random(number)
        starts = [places.randrange(PROMPT_TOKENS, len(self.ids)) for _ in range(number)]
        return [
            Ask(self.ids[start - PROMPT_TOKENS : start], seed_for(start, tokens_a_step), num_tokens) for start in starts
        ]

    def expected(self, ask: Ask) -> tuple[list[int], str]:
        tokens = output(self.ids, ask.seed, ask.num_tokens)
        return tokens, self._tokenizer.decode(tokens)


# --- clients --------------------------------------------------------------------------------------------------------


class GrpcStream:
    """One call; bytes are read as they come and understood later."""

    def __init__(self, generate: grpc.aio.UnaryStreamMultiCallable, ask: Ask) -> None:  # type: ignore[type-arg]
        self._ask = ask
        self._call = generate(
            inference.GenerateRequest(
                token_ids=inference.TokenIds(ids=ask.prompt),
                sampling=inference.SamplingParams(
                    max_tokens=ask.num_tokens, temperature=0.0, ignore_eos=True, seed=ask.seed
                ),
            ),
            timeout=DEADLINE_S,
        )

    async def begin(self) -> None:
        await self._call.initial_metadata()

    @staticmethod
    def count(heard: Heard) -> int:
        """The number of messages, unchecked."""
        return len(heard.messages)

    async def read(self) -> Heard:
        heard = Heard([], [])
        async for data in self._call:
            heard.messages.append(data)
            heard.times_s.append(time.perf_counter())
        return heard

    def check(self, heard: Heard, text: Text) -> int:
        """The number of messages with tokens. Raises Broken."""
        tokens: list[int] = []
        said, number, finish = "", 0, None
        for data in heard.messages:
            message = inference.GenerateResponse.FromString(data)
            if finish is not None or message.first_token_index != len(tokens):
                raise Broken(f"token {message.first_token_index} came when {len(tokens)} was due")
            tokens += message.token_ids
            said += message.text
            number += bool(message.token_ids)
            finish = message.finish if message.HasField("finish") else None
        if (tokens, said) != text.expected(self._ask):
            raise Broken(f"{len(tokens)} tokens of {self._ask.num_tokens}, or their text, are not what was said")
        if finish is None or finish.usage.completion_tokens != self._ask.num_tokens:
            raise Broken("the last message is missing or counts wrong")
        return number


class GrpcFace:
    def __init__(self, address: str, streams: int) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20))
        number = -(-streams // STREAMS_A_CHANNEL)
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(number)]
        self._generate = [
            channel.unary_stream(GENERATE, inference.GenerateRequest.SerializeToString) for channel in self._channels
        ]

    def stream(self, number: int, ask: Ask) -> GrpcStream:
        return GrpcStream(self._generate[number % len(self._generate)], ask)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class HttpStream(asyncio.Protocol):
    """One connection with one streamed completion."""

    def __init__(self, address: str, ask: Ask) -> None:
        self._address = address
        self._ask = ask
        self._heard = Heard([], [])
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    async def begin(self) -> None:
        """Sends the request. Nothing is read before `read`: not even by the kernel, beyond a small buffer."""
        host, port = self._address.rsplit(":", 1)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(listener, (host, int(port)))
        self._transport, _ = await loop.create_connection(lambda: self, sock=listener)
        self._transport.pause_reading()
        body = json.dumps(
            {
                "model": "demo",
                "prompt": list(self._ask.prompt),
                "max_tokens": self._ask.num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "seed": self._ask.seed,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._address}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._heard.messages.append(data)
        self._heard.times_s.append(time.perf_counter())
        if data.endswith(b"0\r\n\r\n"):
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(error or Broken("the connection was closed early"))

    @staticmethod
    def count(heard: Heard) -> int:
        """The number of events with a body, unchecked."""
        return b"".join(heard.messages).count(b"data: {")

    async def read(self) -> Heard:
        assert self._transport is not None
        self._transport.resume_reading()
        async with asyncio.timeout(DEADLINE_S):
            await self._ended
        self._transport.close()
        return self._heard

    def check(self, heard: Heard, text: Text) -> int:
        """The number of messages with text. Raises Broken."""
        head, _, rest = b"".join(heard.messages).partition(b"\r\n\r\n")
        if b" 200 " not in head.splitlines()[0]:
            raise Broken(f"{head.splitlines()[0]!r}: {rest[:300]!r}")
        body = _dechunked(rest) if b"chunked" in head.lower() else rest
        lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
        if lines.pop() != b"[DONE]":
            raise Broken("the stream did not end with [DONE]")
        messages = [json.loads(line) for line in lines]
        said = "".join(choice["text"] for message in messages for choice in message.get("choices", ()))
        if said != text.expected(self._ask)[1]:
            raise Broken(f"the text of {self._ask.num_tokens} tokens is not what was said")
        if messages[-1]["usage"]["completion_tokens"] != self._ask.num_tokens:
            raise Broken(f"the usage is wrong: {messages[-1]['usage']}")
        return sum(bool(message.get("choices")) for message in messages)


class HttpFace:
    def __init__(self, address: str) -> None:
        self._address = address

    def stream(self, number: int, ask: Ask) -> HttpStream:
        return HttpStream(self._address, ask)

    async def close(self) -> None:
        """Every stream has closed its own connection."""


Face = GrpcFace | HttpFace


def _dechunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


# --- a run ----------------------------------------------------------------------------------------------------------


class Meter:
    """CPU and memory of one process during a run."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before_s = self._cpu_s()
        self.rss_before = self.rss_peak = self._process.memory_info().rss
        self._task = asyncio.create_task(self._watch())

    def close(self) -> float:
        """CPU seconds since the start."""
        self._task.cancel()
        self.look()
        return self._cpu_s() - self._before_s

    def look(self) -> None:
        self.rss_peak = max(self.rss_peak, self._process.memory_info().rss)

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self.look()


async def measure(
    what: str, face: Face, pid: int, text: Text | None, asks: Sequence[Ask], slow: Sequence[Ask] = ()
) -> Figures:
    """Runs all streams at once, the slow ones first and read last; raises Broken if any is not what `text` makes it."""
    meter = Meter(pid)
    lazy = [face.stream(number, ask) for number, ask in enumerate(slow)]
    streams = [face.stream(number, ask) for number, ask in enumerate(asks)]
    async with asyncio.timeout(DEADLINE_S):
        for stream in lazy:
            await stream.begin()
        began_s = time.perf_counter()
        await asyncio.gather(*(stream.begin() for stream in streams))
        heard = await asyncio.gather(*(stream.read() for stream in streams))
        seconds = time.perf_counter() - began_s
        if slow:
            # They are slow until everything has been said to them.
            await asyncio.sleep(SETTLE_S)
        cpu_s = meter.close()
        heard_late = [await stream.read() for stream in lazy]
    if text is None:
        number = sum(stream.count(result) for stream, result in zip(streams, heard, strict=True))
    else:
        number = sum(stream.check(result, text) for stream, result in zip(streams, heard, strict=True))
        for stream, result in zip(lazy, heard_late, strict=True):
            stream.check(result, text)
    tokens = sum(ask.num_tokens for ask in asks)
    gaps = sorted(
        later - earlier for result in heard for earlier, later in zip(result.times_s, result.times_s[1:], strict=False)
    ) or [0.0]
    return Figures(
        what=what,
        streams=len(asks),
        slow=len(slow),
        tokens=tokens,
        seconds=round(seconds, 3),
        cpu_us_a_token=round(1e6 * cpu_s / (tokens + sum(ask.num_tokens for ask in slow)), 1),
        messages_a_token=round(number / tokens, 3),
        gap_p50_ms=round(1e3 * gaps[len(gaps) // 2], 1),
        gap_p99_ms=round(1e3 * gaps[len(gaps) * 99 // 100], 1),
        rss_mib=round(meter.rss_peak / 2**20, 1),
        rss_growth_mib=round((meter.rss_peak - meter.rss_before) / 2**20, 1),
    )


# --- floors: the same servers with nothing behind them --------------------------------------------------------------


class Steps:
    """Wakes streams as a router is woken by its workers: a group at a time, each group once a step."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._groups = [asyncio.get_running_loop().create_future() for _ in range(shape.decode)]
        self._numbers = itertools.count()
        self._task = asyncio.create_task(self._run())

    async def each(self, num_tokens: int) -> AsyncIterator[int]:
        group = next(self._numbers) % len(self._groups)
        for index in range(num_tokens):
            await self._groups[group]
            yield index

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            for group in range(len(self._groups)):
                due_s = max(due_s + self._shape.step_s / len(self._groups), loop.time())
                await asyncio.sleep(due_s - loop.time())
                woken, self._groups[group] = self._groups[group], loop.create_future()
                woken.set_result(None)


class _EmptyInference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def Generate(
        self, request: inference.GenerateRequest, context: Context
    ) -> AsyncIterator[inference.GenerateResponse]:
        message = inference.GenerateResponse(request_id="0" * 24, token_ids=[1234], text=" word", first_token_index=50)
        async for _ in self._steps.each(request.sampling.max_tokens):
            yield message


async def _run_grpc_floor(pipe: Connection, shape: Shape) -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(_EmptyInference(Steps(shape)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(f"127.0.0.1:{port}")
    await closed(pipe)


HTTP_CHUNK = (
    b"data: "
    + json.dumps(
        {
            "id": "cmpl-" + "0" * 24,
            "object": "text_completion",
            "created": 1_700_000_000,
            "model": "demo",
            "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
        },
        separators=(",", ":"),
    ).encode()
    + b"\n\n"
)


async def _run_http_floor(pipe: Connection, shape: Shape) -> None:
    steps = Steps(shape)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            part = await receive()
            body += part["body"]
            if not part["more_body"]:
                break
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for _ in steps.each(json.loads(body)["max_tokens"]):
            await send({"type": "http.response.body", "body": HTTP_CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    server = HttpServer(app)
    (address,) = await server.open("127.0.0.1", 0)
    pipe.send(address)
    await closed(pipe)


# --- the whole ------------------------------------------------------------------------------------------------------


def sample_text() -> str:
    """English, and after each paragraph words whose characters are cut by tokens."""
    return OTHER_TEXT.join(Path(__file__).with_name("README.md").read_text(encoding="utf-8").split("\n\n"))


HEADINGS = {
    "what": "",
    "streams": "streams",
    "tokens": "tokens",
    "tokens_a_s": "tokens/s",
    "cpu_us_a_token": "router CPU us a token",
    "messages_a_token": "messages a token",
    "gap_p50_ms": "gap p50 ms",
    "gap_p99_ms": "gap p99 ms",
    "rss_mib": "RSS MiB",
    "rss_growth_mib": "RSS growth MiB",
}


def row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


FLOORS = {"grpc": _run_grpc_floor, "http": _run_http_floor}


async def once(
    what: str, make: Callable[[], Face], pid: int, text: Text | None, asks: Sequence[Ask], slow: Sequence[Ask] = ()
) -> Figures:
    face = make()
    try:
        return await measure(what, face, pid, text, asks, slow)
    finally:
        await face.close()


def measure_face(name: str, model_dir: Path, text: Text, shape: Shape, arguments: argparse.Namespace) -> list[Figures]:
    """The floor, then the router, as often as asked, then with slow readers beside."""
    asks = text.asks(arguments.streams, arguments.tokens)
    found: list[Figures] = []

    def note(figures: Figures) -> None:
        found.append(figures)
        values = asdict(figures) | {"tokens_a_s": round(figures.tokens / figures.seconds)}
        print(row([values[heading] for heading in HEADINGS]), flush=True)

    def face(address: str) -> Callable[[], Face]:
        return partial(GrpcFace, address, len(asks)) if name == "grpc" else partial(HttpFace, address)

    with process(FLOORS[name], shape) as (pid, address):
        note(asyncio.run(once(f"{name}, floor", face(str(address)), pid, None, asks)))
    with null_cluster(model_dir, text.ids, shape) as cluster:
        make = face(getattr(cluster.addresses, name))
        # The first tokens of a process cost more than those that follow.
        asyncio.run(once(name, make, cluster.router_pid, text, text.asks(len(asks), 2)))
        for _ in range(arguments.repeats):
            note(asyncio.run(once(name, make, cluster.router_pid, text, asks)))
        if arguments.slow:
            slow = text.asks(arguments.slow, arguments.slow_tokens, -(-arguments.slow_tokens // arguments.tokens))
            what = f"{name}, {arguments.slow} slow"
            note(asyncio.run(once(what, make, cluster.router_pid, text, asks, slow)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=96, help="of each stream")
    parser.add_argument("--rate", type=float, default=10.0, help="steps a second of each worker")
    parser.add_argument("--decode", type=int, default=4, help="decode workers")
    parser.add_argument("--faces", default="grpc,http")
    parser.add_argument("--slow", type=int, default=0, help="readers that read nothing until the others are done")
    parser.add_argument("--slow-tokens", type=int, default=4096, help="of each slow reader's stream")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--model", default="demo", help="whose tokenizer the router uses")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model_dir = resolve_model(arguments.model)
    text = Text(Tokenizer(model_dir), sample_text())
    shape = Shape(arguments.decode, 1 / arguments.rate)
    cores, load = len(os.sched_getaffinity(0)), round(os.getloadavg()[0], 2)
    print(f"{cores} cores, load average {load} at the start", flush=True)
    print(row(HEADINGS.values()))
    print(row(["---"] * len(HEADINGS)))
    found = []
    for name in arguments.faces.split(","):
        found += measure_face(name, model_dir, text, shape, arguments)
    if arguments.json:
        result = {
            "cores": cores,
            "load_average": load,
            "shape": asdict(shape),
            "figures": [asdict(figures) for figures in found],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
