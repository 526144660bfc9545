"""The desk at which routers hand in legs and get tokens back.

Owns: the `Worker` gRPC service, one `RouterLink` a connected router, and who asked for which sequence.
Refuses to know: how KV moves; the role's own part (`LegHandler`) takes a leg from here.

    router stream --Submit--> [event loop] --call--> [step loop] handler.submit -> scheduler.add
                  <--WorkerMessage-- outbox <--call_soon-- batches of a step, failures, load

All legs of a router end when its stream ends. Everything of one step for one router travels in one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc

from baton.engine.clock import Clock
from baton.engine.loop import StepLoop
from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.context import Context
from baton.proto.messages import (
    FailureKind,
    LegFailure,
    LoadReport,
    Request,
    TokenBatch,
    WorkerDescription,
    WorkerReport,
)

log = logging.getLogger(__name__)


class LegHandler(Protocol):
    """The role's part of a worker. Every call comes on the step loop's thread."""

    def submit(self, request: Request) -> LegFailure | None:
        """Takes a leg, or says why not."""
        ...

    def abort(self, sequence_id: str) -> None:
        """Ends a leg wherever it stands. Unknown ids are ignored: an abort may cross the leg's own end."""
        ...

    def load(self) -> LoadReport:
        """How busy the worker is now."""
        ...


class RouterLink:
    """One router's stream: what goes out on it, and which of its Submits the worker has taken in.

    `outbox` belongs to the event loop; `last_submit` and `batches` to the step loop.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.outbox: asyncio.Queue[WorkerReport | None] = asyncio.Queue()
        self.last_submit = 0
        self.batches: list[TokenBatch] = []
        self.failures: list[LegFailure] = []
        self.open = True


class RouterDesk(worker_pb2_grpc.WorkerServicer):
    """Serves `Worker.Connect`; see the module's drawing."""

    def __init__(self, describe: Callable[[], WorkerDescription], handler: LegHandler, clock: Clock) -> None:
        self._describe = describe
        self._handler = handler
        self._clock = clock
        self._links: list[RouterLink] = []
        self._owners: dict[str, RouterLink] = {}
        self._last_load: LoadReport | None = None
        self._last_load_s = clock()
        self._last_send_s = clock()
        self._step_loop: StepLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.draining = False

    def open(self, step_loop: StepLoop) -> None:
        """Binds the desk to the two loops that it stands between; called on the event loop, before the first stream."""
        self._step_loop = step_loop
        self._event_loop = asyncio.get_running_loop()

    # --- event loop: the gRPC face -------------------------------------------------------------------------------

    async def Connect(
        self, requests: AsyncIterator[wire.RouterMessage], context: Context
    ) -> AsyncIterator[wire.WorkerMessage]:
        assert self._step_loop is not None
        hello = await anext(aiter(requests), None)
        if hello is None or hello.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a router must be hello")
            return
        link = RouterLink(hello.hello.router_incarnation)
        self._step_loop.call(lambda: self._links.append(link))
        reader = asyncio.create_task(self._read(requests, link))
        try:
            yield wire.WorkerMessage(hello=wire.WorkerHello(worker=self._describe().to_wire()))
            while (report := await link.outbox.get()) is not None:
                yield report.to_wire()
        finally:
            link.open = False
            reader.cancel()
            self._step_loop.call(lambda: self._hang_up(link))

    async def _read(self, requests: AsyncIterator[wire.RouterMessage], link: RouterLink) -> None:
        assert self._step_loop is not None
        try:
            async for message in requests:
                match message.WhichOneof("message"):
                    case "submit":
                        request, number = Request.from_wire(message.submit), message.submit.number
                        self._step_loop.call(lambda r=request, n=number: self._submit(link, r, n))  # type: ignore[misc]
                    case "abort":
                        self._step_loop.call(lambda i=message.abort.sequence_id: self._abort(i))  # type: ignore[misc]
                    case "draining":
                        self.draining = message.draining.draining
                    case _:
                        log.warning("router %s sent an unknown message", link.incarnation)
        finally:
            link.outbox.put_nowait(None)

    def close(self) -> None:
        """Ends every router's stream."""
        for link in list(self._links):
            link.outbox.put_nowait(None)

    async def beat(self, interval_s: float) -> None:
        """Repeats the last load report while a long step keeps the step loop from sending a fresh one."""
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            if self._last_load is not None and now - self._last_send_s >= interval_s:
                self._last_send_s = now
                for link in list(self._links):
                    load = self._last_load.stamped(link.last_submit, now - self._last_load_s)
                    link.outbox.put_nowait(WorkerReport(load=load))

    # --- step loop ------------------------------------------------------------------------------------------------

    def _submit(self, link: RouterLink, request: Request, number: int) -> None:
        link.last_submit = number
        if not link.open:
            return
        if self.draining:
            failure = LegFailure(request.sequence_id, FailureKind.DRAINING, "the worker is draining")
            link.failures.append(failure)
            return
        self._owners[request.sequence_id] = link
        refusal = self._handler.submit(request)
        if refusal is not None:
            self.fail(refusal)

    def _abort(self, sequence_id: str) -> None:
        if self._owners.pop(sequence_id, None) is not None:
            self._handler.abort(sequence_id)

    def _hang_up(self, link: RouterLink) -> None:
        self._links.remove(link)
        for sequence_id in [name for name, owner in self._owners.items() if owner is link]:
            self._abort(sequence_id)

    def emit(self, batch: TokenBatch, ended: bool) -> None:
        """Queues a leg's tokens for the next `flush`; `ended`: the leg has nothing more to say."""
        link = self._owners.pop(batch.sequence_id, None) if ended else self._owners.get(batch.sequence_id)
        if link is not None:
            link.batches.append(batch)

    def fail(self, failure: LegFailure) -> None:
        """Queues a leg's failure for the next `flush`. The leg's owner hears of at most one."""
        link = self._owners.pop(failure.sequence_id, None)
        if link is not None:
            link.failures.append(failure)

    def forget(self, sequence_id: str) -> None:
        """The leg is over and has nothing more to say."""
        self._owners.pop(sequence_id, None)

    @property
    def has_news(self) -> bool:
        """Whether something is queued for a router."""
        return any(link.batches or link.failures for link in self._links)

    def flush(self, now: float) -> None:
        """Sends every router what was queued for it, and the load."""
        assert self._event_loop is not None
        load = self._handler.load()
        self._last_load, self._last_load_s, self._last_send_s = load, now, now
        reports: list[tuple[RouterLink, WorkerReport]] = []
        for link in self._links:
            report = WorkerReport(tuple(link.batches), tuple(link.failures), load.stamped(link.last_submit, 0.0))
            link.batches.clear()
            link.failures.clear()
            reports.append((link, report))
        if reports:
            self._event_loop.call_soon_threadsafe(_post, reports)


def _post(reports: list[tuple[RouterLink, WorkerReport]]) -> None:
    for link, report in reports:
        link.outbox.put_nowait(report)
