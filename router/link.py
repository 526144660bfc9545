"""The router's end of its one stream to one incarnation of one worker.

Owns: the channel, the numbering of Submits, the mailbox of every leg that is on the worker.
Refuses to know: placement, retries, what a request is beyond its legs.

    CONNECTING --hello--> OPEN --stream ended, silence--> LOST     every mailbox then gets LegFailure(WORKER_LOST)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable

import grpc

from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.credentials import PLAIN, ClusterWire
from baton.proto.messages import (
    FailureKind,
    LegFailure,
    LoadReport,
    Request,
    TokenBatch,
    WorkerDescription,
)
from baton.router.legs import LegEvent, Mailbox

log = logging.getLogger(__name__)

# A cut cable shows within about three seconds, a killed process at once.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)


class WorkerLink:
    """See the module's drawing. Made by `open`; belongs to one event loop."""

    def __init__(
        self,
        description: WorkerDescription,
        router_incarnation: str,
        silence_s: float,
        wire_to_worker: ClusterWire = PLAIN,
    ) -> None:
        self.description = description
        self._wire = wire_to_worker
        self._router_incarnation = router_incarnation
        self._silence_s = silence_s
        self._outbox: asyncio.Queue[wire.RouterMessage] = asyncio.Queue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._resting = asyncio.Event()
        self._resting.set()
        self._last_number = 0
        self._connected = False
        self._opened = asyncio.Event()
        self._reported: Callable[[LoadReport], object] = lambda report: None
        self._channel: grpc.aio.Channel | None = None
        self.lanes: tuple[wire.Lane, ...] = ()  # by which KV comes to the worker, and when it has said so
        self.lanes_s = 0.0
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def open(self, reported: Callable[[LoadReport], object], timeout_s: float) -> None:
        """Connects; returns when the worker has said hello. Raises ConnectionError with the reason if it does not."""
        self._reported = reported
        self._task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
        except TimeoutError:
            pass
        if not self._connected:
            reason = self.lost.result() if self.lost.done() else f"no hello within {timeout_s:.1f} s"
            await self.close()
            raise ConnectionError(f"{self.description.worker_id} at {self.description.address}: {reason}")

    async def close(self) -> None:
        """Ends the stream: the worker aborts what this router has on it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._end("closed by the router")

    @property
    def worker_id(self) -> str:
        return self.description.worker_id

    def submit(self, request: Request, mailbox: Mailbox) -> int:
        """For this and the next two see `LegLink`."""
        if self.lost.done():
            mailbox(LegFailure(request.sequence_id, FailureKind.WORKER_LOST, self.lost.result()))
            return self._last_number
        self._last_number += 1
        self._mailboxes[request.sequence_id] = mailbox
        self._resting.clear()
        self._outbox.put_nowait(wire.RouterMessage(submit=request.to_wire(self._last_number)))
        return self._last_number

    def abort(self, sequence_id: str) -> None:
        if self._mailboxes.pop(sequence_id, None) is not None and not self.lost.done():
            self._outbox.put_nowait(wire.RouterMessage(abort=wire.AbortLeg(sequence_id=sequence_id)))
        self._note_rest()

    def forget(self, sequence_id: str) -> None:
        self._mailboxes.pop(sequence_id, None)
        self._note_rest()

    def set_draining(self, draining: bool) -> None:
        self._outbox.put_nowait(wire.RouterMessage(draining=wire.SetDraining(draining=draining)))

    async def examine(self, request: wire.ExamineRequest, timeout_s: float) -> wire.WorkerExamination:
        """Asks the worker how things are there. Raises ConnectionError with the reason if it does not answer."""
        if self._channel is None or self.lost.done():
            raise ConnectionError(self.lost.result() if self.lost.done() else "not connected")
        try:
            stub = worker_pb2_grpc.ExaminationStub(self._channel)
            answer: wire.WorkerExamination = await stub.Examine(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ConnectionError(f"no answer within {timeout_s:.1f} s") from None
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
        return answer

    async def rest(self, timeout_s: float) -> bool:
        """Waits until no leg is on the worker; returns whether that came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._resting.wait()
        except TimeoutError:
            return False
        return True

    @property
    def num_legs(self) -> int:
        return len(self._mailboxes)

    # --- the stream -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        reason = "an unexpected error"
        try:
            async with self._wire.channel(self.description.address, CHANNEL_OPTIONS) as channel:
                self._channel = channel
                stream = worker_pb2_grpc.WorkerStub(channel).Connect(self._outgoing())
                reason = await self._read(stream)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            reason = f"silent for {self._silence_s:.1f} s"
        except asyncio.CancelledError:
            reason = "closed by the router"
            raise
        except Exception:
            log.exception("the link to %s", self.worker_id)
        finally:
            # Whatever ended it: legs that nobody hears of would wait for ever.
            self._end(reason)

    async def _outgoing(self) -> AsyncIterator[wire.RouterMessage]:
        yield wire.RouterMessage(hello=wire.RouterHello(router_incarnation=self._router_incarnation))
        while True:
            yield await self._outbox.get()

    async def _read(self, stream: AsyncIterable[wire.WorkerMessage]) -> str:
        messages = aiter(stream)
        while True:
            async with asyncio.timeout(self._silence_s):
                message = await anext(messages, None)
            if message is None:
                return "the stream ended"
            if message.HasField("hello"):
                description = WorkerDescription.from_wire(message.hello.worker)
                if description.worker_id != self.worker_id:
                    # Its port has become another's, as may be where workers share a range of them.
                    return f"{description.worker_id} answers there"
                self.description = description
                self._connected = True
                self._opened.set()
                continue
            for said in message.batches:
                batch = TokenBatch.from_wire(said)
                self._deliver(batch, ended=batch.finish_reason is not None)
            for failure in message.failures:
                self._deliver(LegFailure.from_wire(failure), ended=True)
            if message.HasField("lanes"):
                self.lanes, self.lanes_s = tuple(message.lanes.lanes), asyncio.get_running_loop().time()
            if message.HasField("load"):
                self._reported(LoadReport.from_wire(message.load))

    def _deliver(self, event: LegEvent, ended: bool) -> None:
        if ended:
            mailbox = self._mailboxes.pop(event.sequence_id, None)
            self._note_rest()
        else:
            mailbox = self._mailboxes.get(event.sequence_id)
        if mailbox is not None:
            mailbox(event)

    def _note_rest(self) -> None:
        if not self._mailboxes:
            self._resting.set()

    def _end(self, reason: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(reason)
        self._opened.set()
        mailboxes, self._mailboxes = self._mailboxes, {}
        self._note_rest()
        for sequence_id, mailbox in mailboxes.items():
            mailbox(LegFailure(sequence_id, FailureKind.WORKER_LOST, f"{self.worker_id} was lost: {reason}"))
