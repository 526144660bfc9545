"""A router behind which nothing is computed: its process, and one process of workers that only say tokens.

Owns: both processes, and what a null worker says. It speaks the real protocol over real gRPC: at each step all tokens
of all streams of one router in one message, with its load. Which tokens a request gets is in its seed (`seed_for`):
where in a text to begin, and how many tokens a step. A decode leg waits for nobody, since there is no KV to wait for.
Refuses to know: who asks, and what is measured.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.context import Context
from baton.proto.messages import (
    FinishReason,
    Leg,
    LegSummary,
    LoadReport,
    Request,
    Role,
    TokenBatch,
    WorkerDescription,
    WorkerReport,
)
from baton.router.cluster import WorkerState
from baton.router.config import ClusterConfig, RouterSettings, defaults
from baton.router.link import WorkerLink
from baton.router.router import Router
from baton.router.server import Addresses, RouterServer
from baton.router.tokenizer import Tokenizer

START_TIMEOUT_S = 60.0
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 1 << 20, 1 << 20
_TOKENS_A_STEP_SHIFT = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """How many workers, and the time of their steps, in each of which a stream gets its tokens. Without a time they
    step whenever they have a stream: an answer takes what its messages take."""

    decode: int = 4
    step_s: float = 0.1


@dataclass(frozen=True, slots=True)
class NullCluster:
    """Where the router is reached, and its process."""

    addresses: Addresses
    router_pid: int


def seed_for(start: int, tokens_a_step: int = 1) -> int:
    """The seed of a request whose output begins at a place of the text."""
    return start | tokens_a_step << _TOKENS_A_STEP_SHIFT


def output(text_ids: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """What a request with this seed gets: the text from its place on, over and over."""
    start = seed & ((1 << _TOKENS_A_STEP_SHIFT) - 1)
    return [text_ids[(start + index) % len(text_ids)] for index in range(num_tokens)]


@contextmanager
def null_cluster(model_dir: Path, text_ids: Sequence[int], shape: Shape) -> Iterator[NullCluster]:
    """A router with one prefill worker and `shape.decode` decode workers, in two processes of their own."""
    with (
        process(_run_workers, tuple(text_ids), shape) as (_, descriptions),
        process(_run_router, model_dir, descriptions) as (router_pid, addresses),
    ):
        yield NullCluster(addresses, router_pid)


@contextmanager
def process(main: Callable[..., Coroutine[None, None, None]], *arguments: object) -> Iterator[tuple[int, object]]:
    """Runs `main(pipe, *arguments)` in a process; yields its pid and what it sent first. It ends when the pipe does."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_run, args=(main, theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise TimeoutError(f"{main.__name__} did not start within {START_TIMEOUT_S:.0f} s")
        yield child.pid or 0, ours.recv()
    finally:
        ours.close()
        child.join(5.0)
        if child.exitcode is None:
            child.kill()
            child.join()


def _run(main: Callable[..., Coroutine[None, None, None]], pipe: Connection, *arguments: object) -> None:
    asyncio.run(main(pipe, *arguments))


async def closed(pipe: Connection) -> None:
    """Waits until the other end is closed, and ends the process: nothing here is worth an orderly end."""
    await asyncio.to_thread(pipe.poll, None)
    os._exit(0)


# --- the workers' process -------------------------------------------------------------------------------------------


class _Link:
    """One router's stream. `streams`: what is left to say on each leg."""

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[wire.WorkerMessage] = asyncio.Queue()
        self.streams: dict[str, _Stream] = {}
        self.last_submit = 0


@dataclass(slots=True)
class _Stream:
    tokens: list[int]
    position: int
    end: int
    tokens_a_step: int
    is_prefill: bool


class NullWorker(worker_pb2_grpc.WorkerServicer):
    """A worker that says the text it was given."""

    def __init__(self, worker_id: str, role: Role, text_ids: Sequence[int], step_s: float) -> None:
        self._worker_id = worker_id
        self._role = role
        self._text_ids = text_ids
        self._step_s = step_s
        self._links: list[_Link] = []
        self._asked = asyncio.Event()
        self._reports = 0
        self._address = ""

    async def start(self) -> WorkerDescription:
        server = grpc.aio.server(
            options=(
                # The router's end pings each second, also where nothing is said.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_send_message_length", 64 << 20),
            )
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        self._address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._server = server
        self._task = asyncio.create_task(self._step())
        return self._describe()

    async def Connect(
        self, requests: AsyncIterator[wire.RouterMessage], context: Context
    ) -> AsyncIterator[wire.WorkerMessage]:
        link = _Link()
        self._links.append(link)
        reader = asyncio.create_task(self._read(requests, link))
        try:
            yield wire.WorkerMessage(hello=wire.WorkerHello(worker=self._describe().to_wire()))
            while True:
                yield await link.outbox.get()
        finally:
            reader.cancel()
            self._links.remove(link)

    async def _read(self, requests: AsyncIterator[wire.RouterMessage], link: _Link) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "submit":
                    link.last_submit = message.submit.number
                    request = Request.from_wire(message.submit)
                    link.streams[request.sequence_id] = self._stream(request)
                    self._asked.set()
                case "abort":
                    link.streams.pop(message.abort.sequence_id, None)

    def _stream(self, request: Request) -> _Stream:
        sampling = request.sampling
        first = len(request.token_ids) - request.num_prompt_tokens
        prefills = request.leg is Leg.PREFILL
        return _Stream(
            tokens=output(self._text_ids, sampling.seed, sampling.max_tokens),
            position=first + (request.leg is Leg.DECODE),
            end=first + 1 if prefills else sampling.max_tokens,
            tokens_a_step=max(1, sampling.seed >> _TOKENS_A_STEP_SHIFT),
            is_prefill=prefills,
        )

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + self._step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            if not self._step_s and not any(link.streams for link in self._links):
                self._asked.clear()
                await self._asked.wait()
            for link in self._links:
                batches = [self._advance(sequence_id, stream) for sequence_id, stream in link.streams.items()]
                for batch in batches:
                    if batch.summary is not None:
                        del link.streams[batch.sequence_id]
                report = WorkerReport(tuple(batches), load=self._load(link))
                link.outbox.put_nowait(report.to_wire())

    def _advance(self, sequence_id: str, stream: _Stream) -> TokenBatch:
        first, end = stream.position, min(stream.position + stream.tokens_a_step, stream.end)
        stream.position = end
        finishes = not stream.is_prefill or end == len(stream.tokens)
        return TokenBatch(
            sequence_id,
            first,
            tuple(stream.tokens[first:end]),
            finish_reason=FinishReason.LENGTH if finishes and end == stream.end else None,
            summary=LegSummary() if end == stream.end else None,
        )

    def _load(self, link: _Link) -> LoadReport:
        self._reports += 1
        return LoadReport(
            worker_id=self._worker_id,
            incarnation="null",
            role=self._role,
            sequence_number=self._reports,
            running=len(link.streams),
            total_blocks=NUM_BLOCKS,
            free_blocks=NUM_BLOCKS,
            step_s=self._step_s,
            last_submit=link.last_submit,
        )

    def _describe(self) -> WorkerDescription:
        return WorkerDescription(
            worker_id=self._worker_id,
            incarnation="null",
            address=self._address,
            role=self._role,
            model="null",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=max(self._text_ids) + 1,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_num_batched_tokens=1 << 20,
            max_num_seqs=1 << 14,
            dtype="float32",
            connector="null",
            version="0",
            kv_bytes_per_token=1,
            pid=os.getpid(),
        )


async def _run_workers(pipe: Connection, text_ids: Sequence[int], shape: Shape) -> None:
    workers = [NullWorker("prefill-0", Role.PREFILL, text_ids, shape.step_s)]
    workers += [NullWorker(f"decode-{index}", Role.DECODE, text_ids, shape.step_s) for index in range(shape.decode)]
    descriptions = []
    for worker in workers:
        descriptions.append(await worker.start())
        # Workers' steps do not fall together.
        await asyncio.sleep(shape.step_s / len(workers))
    pipe.send(tuple(descriptions))
    await closed(pipe)


# --- the router's process -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seat:
    """A `Member` that never changes."""

    description: WorkerDescription
    state: WorkerState = WorkerState.READY
    restarts: int = 0
    note: str = ""

    @property
    def worker_id(self) -> str:
        return self.description.worker_id

    @property
    def pool(self) -> str:
        return self.description.role.value

    @property
    def role(self) -> Role:
        return self.description.role


class _Seats:
    """The `Workforce` of workers that nobody drains or scales."""

    def __init__(self, seats: list[_Seat]) -> None:
        self._seats = seats

    def members(self) -> list[_Seat]:
        return self._seats

    async def drain(self, worker_id: str, timeout_s: float) -> int:
        raise KeyError(worker_id)

    async def scale(self, pool: str, size: int) -> None:
        raise KeyError(pool)


async def _run_router(pipe: Connection, model_dir: Path, descriptions: Sequence[WorkerDescription]) -> None:
    decode = sum(description.role is Role.DECODE for description in descriptions)
    config = defaults(prefill=1, decode=decode)
    settings = replace(RouterSettings(), port=0, http_port=0)
    router = Router(ClusterConfig(config.model, config.pools, settings), Tokenizer(model_dir))
    for description in descriptions:
        link = WorkerLink(description, router.incarnation, silence_s=30.0)
        await link.open(router.reported, timeout_s=10.0)
        router.connect(link)
    server = RouterServer(router, _Seats([_Seat(description) for description in descriptions]))
    addresses = await server.open(settings)
    await router.prove_ready()
    await server.mark_ready()
    pipe.send(addresses)
    await closed(pipe)
