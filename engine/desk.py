"""The desk at which routers hand in legs and get tokens back.

Owns: the `Worker` gRPC service, one `RouterLink` a connected router, and who asked for which sequence.
Refuses to know: how KV moves; the role's own part (`LegHandler`) takes a leg from here.

    router stream --Submit--> [event loop] --call--> [step loop] handler.submit -> scheduler.add
                  <--WorkerMessage-- outbox <--call_soon-- batches of a step, failures, load

All legs of a router end when its stream ends. Everything of one step for one router travels in one message. A router
that does not read what it is sent is hung up on, so that nothing piles up for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Protocol

import grpc

from baton.engine.clock import Clock
from baton.engine.loop import StepLoop
from baton.engine.vital import Failed, vital
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

MAX_BACKLOG = 10_000
"""Reports that may wait for one router: minutes of steps."""
HELLO_S = 10.0
"""For the first message of a stream."""
MAX_TURN_S = 120.0
"""A step that takes longer will never end."""


class StepLoopStalled(Exception):
    """The step loop has not turned for so long that it never will."""


class LegHandler(Protocol):
    """The role's part of a worker. Every call comes on the step loop's thread."""

    def submit(self, request: Request, arrived_s: float) -> LegFailure | None:
        """Takes a leg that came in at `arrived_s`, or says why not."""
        ...

    def abort(self, sequence_id: str) -> None:
        """Ends a leg wherever it stands. Unknown ids are ignored: an abort may cross the leg's own end."""
        ...

    def load(self) -> LoadReport:
        """How busy the worker is now."""
        ...


class RouterLink:
    """One router's stream: what goes out on it, and which of its Submits the worker has taken in.

    `outbox` belongs to the event loop; `last_submit` and `batches` to the step loop. Made by the stream's handler.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.outbox: asyncio.Queue[WorkerReport | None] = asyncio.Queue()
        self.lanes: tuple[wire.Lane, ...] = ()  # as this router knows them
        self.last_submit = 0
        self.batches: list[TokenBatch] = []
        self.failures: list[LegFailure] = []
        self.open = True
        self._handler = asyncio.current_task()

    def post(self, report: WorkerReport) -> None:
        """Queues a report; hangs up on a router that has left too many unread."""
        if self.outbox.qsize() < MAX_BACKLOG:
            self.outbox.put_nowait(report)
        elif self.open and self._handler is not None:
            log.error("router %s does not read: its stream is ended", self.incarnation)
            self.open = False
            self._handler.cancel()


class RouterDesk(worker_pb2_grpc.WorkerServicer):
    """Serves `Worker.Connect`; see the module's drawing."""

    def __init__(
        self, describe: Callable[[], WorkerDescription], handler: LegHandler, clock: Clock, failed: Failed
    ) -> None:
        self._describe = describe
        self._handler = handler
        self._clock = clock
        self._failed = failed
        self._links: list[RouterLink] = []
        self._owners: dict[str, RouterLink] = {}
        self._last_load: LoadReport | None = None
        self._last_load_s = clock()
        self._last_send_s = clock()
        self._step_loop: StepLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._introducible = asyncio.Event()
        self._introducible.set()
        self.lanes: tuple[wire.Lane, ...] = ()  # by which KV comes here; set on the event loop
        self.draining = False
        self.leaving = False  # the worker is about to change its role

    def open(self, step_loop: StepLoop) -> None:
        """Binds the desk to the two loops that it stands between; called on the event loop, before the first stream."""
        self._step_loop = step_loop
        self._event_loop = asyncio.get_running_loop()

    # --- event loop: the gRPC face -------------------------------------------------------------------------------

    async def Connect(
        self, requests: AsyncIterator[wire.RouterMessage], context: Context
    ) -> AsyncIterator[wire.WorkerMessage]:
        assert self._step_loop is not None
        hello = await first_message(requests, context)
        if hello is None or hello.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a router must be hello")
            return
        # What this worker is may be changing: a router is told when that is known.
        await self._introducible.wait()
        link = RouterLink(hello.hello.router_incarnation)
        self._step_loop.call(lambda: self._links.append(link))
        reader = asyncio.create_task(self._read(requests, link))
        try:
            yield wire.WorkerMessage(hello=wire.WorkerHello(worker=self._describe().to_wire()))
            while (report := await link.outbox.get()) is not None:
                message = report.to_wire()
                if link.lanes is not self.lanes:
                    link.lanes = self.lanes
                    message.lanes.lanes.extend(link.lanes)
                    message.lanes.SetInParent()
                yield message
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
                        self._receive(message.submit, link)
                    case "abort":
                        self._step_loop.call(partial(self._abort, message.abort.sequence_id))
                    case "draining":
                        self.draining = message.draining.draining
                    case _:
                        log.warning("router %s sent an unknown message", link.incarnation)
        except ValueError as error:
            log.error("router %s sent what no router sends, its stream is ended: %s", link.incarnation, error)
        finally:
            link.outbox.put_nowait(None)

    def _receive(self, message: wire.Submit, link: RouterLink) -> None:
        assert self._step_loop is not None
        request, arrived_s = Request.from_wire(message), self._clock()
        self._step_loop.call(partial(self._submit, link, request, message.number, arrived_s))

    def hold(self) -> None:
        """Lets no router in until `admit`: none may hear of an incarnation that is just ending."""
        self._introducible.clear()

    def admit(self) -> None:
        self._introducible.set()

    def close(self) -> None:
        """Ends every router's stream."""
        for link in list(self._links):
            link.outbox.put_nowait(None)

    async def beat(self, interval_s: float) -> None:
        """Repeats the last load report while a long step keeps the step loop from sending a fresh one.

        A worker whose step never ends is not alive because it still says so: `failed` hears of it.
        """
        assert self._step_loop is not None
        with vital(self._failed):
            while True:
                await asyncio.sleep(interval_s)
                now = self._clock()
                turn_s = now - self._step_loop.last_turn_s
                if turn_s > MAX_TURN_S:
                    raise StepLoopStalled(f"the step loop has not turned for {turn_s:.0f} s")
                if self._last_load is not None and now - self._last_send_s >= interval_s:
                    self._last_send_s = now
                    for link in list(self._links):
                        load = self._last_load.stamped(link.last_submit, now - self._last_load_s)
                        link.post(WorkerReport(load=load))

    # --- step loop ------------------------------------------------------------------------------------------------

    def _submit(self, link: RouterLink, request: Request, number: int, arrived_s: float) -> None:
        link.last_submit = number
        if not link.open:
            return
        if self.takes_nothing:
            refusal: LegFailure | None = LegFailure(request.sequence_id, FailureKind.DRAINING, "the worker is draining")
        else:
            refusal = self._handler.submit(request, arrived_s)
        if refusal is not None:
            # Not by `fail`: a leg of that name may be here already, and it keeps its owner.
            link.failures.append(refusal)
            return
        self._owners[request.sequence_id] = link

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

    def dismiss(self) -> None:
        """Ends every router's stream and takes nothing more from it: it was opened to an incarnation that is over."""
        assert self._event_loop is not None
        for link in self._links:
            link.open = False
        self._last_load = None
        self.lanes = ()
        self._event_loop.call_soon_threadsafe(_end, list(self._links))

    @property
    def takes_nothing(self) -> bool:
        return self.draining or self.leaving

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
            # A prompt's log-probabilities can fill a message by themselves.
            large = [batch for batch in link.batches if batch.prompt_logprobs]
            reports.extend((link, WorkerReport((batch,))) for batch in large)
            small = tuple(batch for batch in link.batches if not batch.prompt_logprobs)
            report = WorkerReport(small, tuple(link.failures), load.stamped(link.last_submit, 0.0))
            link.batches.clear()
            link.failures.clear()
            reports.append((link, report))
        if reports:
            self._event_loop.call_soon_threadsafe(_post, reports)


def _post(reports: list[tuple[RouterLink, WorkerReport]]) -> None:
    for link, report in reports:
        link.post(report)


def _end(links: list[RouterLink]) -> None:
    for link in links:
        link.outbox.put_nowait(None)


async def first_message(messages: AsyncIterator[Any], context: Context) -> Any:
    """None if the other side ends the stream instead; who opens one and says nothing is hung up on."""
    try:
        async with asyncio.timeout(HELLO_S):
            return await anext(aiter(messages), None)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello came within {HELLO_S:g} s")
