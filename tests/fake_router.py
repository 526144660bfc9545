"""A router that is only its gRPC face, and a wire in front of it that can be cut.

The router's tokens are a function of (seed, position), like Baton's, so a continued output can be compared with a whole
one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import status_pb2

from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto import inference_pb2 as inference
from baton.proto import worker_pb2 as wire_messages


def token_at(seed: int, position: int) -> int:
    return (seed * 31 + position * 7) % 1000


def text_of(token_id: int) -> str:
    return f"<{token_id}>"


def whole_tokens(seed: int, number: int) -> tuple[int, ...]:
    return tuple(token_at(seed, position) for position in range(number))


def whole_text(seed: int, number: int) -> str:
    return "".join(map(text_of, whole_tokens(seed, number)))


@dataclass
class Refusal:
    """A status with details, instead of a stream or in the middle of one."""

    code: grpc.StatusCode
    message: str = "refused"
    details: tuple[Message, ...] = ()


Happening = Callable[[], Awaitable[None]] | Refusal


@dataclass
class FakeRouter(inference_pb2_grpc.InferenceServicer, cluster_pb2_grpc.ClusterServicer):
    """`happenings[i]` of call i maps the number of messages that it has sent to what happens then; `ends_early` maps i
    to the number of messages after which its stream ends as if that were all."""

    happenings: list[dict[int, Happening]] = field(default_factory=list)
    requests: list[inference.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    skip_tokens: int = 0
    is_endless: bool = False
    ends_early: dict[int, int] = field(default_factory=dict)
    port: int = 0
    drained: list[str] = field(default_factory=list)
    roles: list[cluster.SetRoleRequest] = field(default_factory=list)

    async def Generate(
        self, request: inference.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference.GenerateResponse]:
        happenings = self.happenings[len(self.requests)] if len(self.requests) < len(self.happenings) else {}
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        self.called.set()
        sent = 0
        try:
            for message in self._messages(request)[: self.ends_early.get(len(self.requests) - 1)]:
                await self._happen(happenings.get(sent), context)
                yield message
                sent += 1
            await self._happen(happenings.get(sent), context)
            if self.is_endless:
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    def _messages(self, request: inference.GenerateRequest) -> list[inference.GenerateResponse]:
        sampling = request.sampling
        n = sampling.n if sampling.HasField("n") else 1
        number = sampling.max_tokens if sampling.HasField("max_tokens") else 8
        first = len(request.resume_token_ids)
        return [
            inference.GenerateResponse(
                request_id=request.request_id,
                index=index,
                token_ids=[token_at(sampling.seed + index, position)],
                text=text_of(token_at(sampling.seed + index, position)),
                first_token_index=position + self.skip_tokens,
                finish=self._finish(number) if position == number - 1 and not self.is_endless else None,
            )
            for position in range(first, number)
            for index in range(n)
        ]

    def _finish(self, number: int) -> inference.Finish:
        return inference.Finish(
            reason=inference.FINISH_REASON_LENGTH,
            usage=inference.Usage(prompt_tokens=12, completion_tokens=number, cached_tokens=4, transferred_tokens=11),
            timeline=inference.Timeline(
                router_wait=0.001,
                prefill_queue=0.002,
                prefill_compute=0.05,
                handoff_wait=0.003,
                decode=0.1,
                total=0.156,
            ),
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            connector="nixl",
        )

    async def _happen(self, happening: Happening | None, context: grpc.aio.ServicerContext) -> None:
        if isinstance(happening, Refusal):
            status = status_pb2.Status(code=happening.code.value[0], message=happening.message)
            for detail in happening.details:
                packed = Any()
                packed.Pack(detail)
                status.details.append(packed)
            trailing = (("grpc-status-details-bin", status.SerializeToString()),)
            await context.abort(happening.code, happening.message, trailing_metadata=trailing)
        elif happening is not None:
            await happening()

    async def Abort(
        self, request: inference.AbortRequest, context: grpc.aio.ServicerContext
    ) -> inference.AbortResponse:
        return inference.AbortResponse(found=request.request_id == "known")

    async def GetModel(
        self, request: inference.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> inference.ModelInfo:
        return inference.ModelInfo(name="demo", max_model_len=2048, vocab_size=49152, eos_token_ids=[2])

    async def GetStatus(
        self, request: cluster.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> cluster.ClusterStatus:
        return a_status()

    async def WatchStatus(
        self, request: cluster.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cluster.ClusterStatus]:
        for _ in range(3):
            yield a_status()

    async def Drain(self, request: cluster.DrainRequest, context: grpc.aio.ServicerContext) -> cluster.DrainResponse:
        self.drained.append(request.worker_id)
        return cluster.DrainResponse(moved=2)

    async def SetRole(
        self, request: cluster.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> cluster.SetRoleResponse:
        if request.worker_id != "decode-0":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {request.worker_id}")
        self.roles.append(request)
        return cluster.SetRoleResponse(drain_s=1.25, total_s=1.5, moved=3)

    async def Scale(self, request: cluster.ScaleRequest, context: grpc.aio.ServicerContext) -> cluster.ScaleResponse:
        return cluster.ScaleResponse(size=request.size)


def a_status() -> cluster.ClusterStatus:
    load = wire_messages.LoadReport(
        role="decode",
        running=3,
        waiting=1,
        receiving=2,
        queued_tokens=1234,
        total_blocks=100,
        free_blocks=25,
        step_s=0.0123,
    )
    decode = [
        cluster.WorkerStatus(
            worker_id="decode-0", pool="decode", state="ready", incarnation="0123456789abcdef", load=load, restarts=2
        ),
        cluster.WorkerStatus(worker_id="decode-1", pool="decode", state="starting"),
    ]
    return cluster.ClusterStatus(
        model="demo",
        router=cluster.RouterStatus(incarnation="fedcba98", queued=5, running=7, requests_total=1000, uptime_s=3700),
        pools=[
            cluster.PoolStatus(name="prefill", role="prefill", size=0),
            cluster.PoolStatus(name="decode", role="decode", size=2, workers=decode),
        ],
    )


class Wire:
    """Carries bytes between clients and the router. `cut` resets every connection and refuses new ones until `mend`."""

    def __init__(self, router_port: int) -> None:
        self._router_port = router_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def restart(self) -> None:
        """A router that dies here and is back at once: nobody who was connected hears more."""
        # A task of its own: the cut cancels the call that this is called from.
        self._keep(asyncio.create_task(self._cut_and_mend()))
        await asyncio.Event().wait()

    async def _cut_and_mend(self) -> None:
        await self.cut()
        await self.mend()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        router_reader, router_writer = await asyncio.open_connection("127.0.0.1", self._router_port)
        self._writers |= {writer, router_writer}
        for source, sink in ((reader, router_writer), (router_reader, writer)):
            self._keep(asyncio.create_task(self._pipe(source, sink)))

    @staticmethod
    async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()
