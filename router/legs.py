"""The legs of one attempt at a request: what was sent to workers, and what comes back, in the order of the output.

Owns: the mailbox of an attempt, and that every leg is aborted or over, and its load released, when the attempt is.
Refuses to know: which worker is chosen, and what follows from a failure (`router.journey`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from baton.proto.messages import FailureKind, Leg, LegFailure, Request, TokenBatch, WorkerDescription
from baton.router.load import LoadBook
from baton.router.placement import Placement, PlacementQuery

SLACK_S = 0.001
"""How late a wait for an event may end. Reading the clock twice already gives two different ends."""

LegEvent = TokenBatch | LegFailure
Mailbox = Callable[[LegEvent], None]


class LegLink(Protocol):
    """The router's end of a connection to one incarnation of one worker, as far as legs need it."""

    @property
    def description(self) -> WorkerDescription: ...

    def submit(self, request: Request, mailbox: Mailbox) -> int:
        """Sends a leg; returns the Submit's number. On a lost link the mailbox gets the failure at once."""
        ...

    def abort(self, sequence_id: str) -> None:
        """Ends a leg and closes its mailbox. Unknown ids are ignored: the leg may have ended by itself."""
        ...

    def forget(self, sequence_id: str) -> None:
        """Closes the mailbox of a leg that has ended by itself."""
        ...


class Legs:
    """The legs of one attempt: open until `close`, which aborts what has not ended and releases what was booked.

    Events come in the order of the output: what decode says first waits until prefill's first token, which travels on
    another stream, is there. A prefill leg that fails when its token is there and a decode leg is open is passed over:
    decode has the KV, or will say that it cannot have it.
    """

    def __init__(
        self, query: PlacementQuery, placement: Placement, links: Mapping[str, LegLink], book: LoadBook
    ) -> None:
        self._query = query
        self._prefill_id, self._decode_id = query.leg_id(Leg.PREFILL), query.leg_id(Leg.DECODE)
        self._links = links
        self._book = book
        self._events: deque[LegEvent] = deque()
        self._alarm = _Alarm()
        self._early: list[TokenBatch] | None = []
        self._streaming_id = ""
        self._hear: Callable[[TokenBatch], bool] | None = None
        self._broken: Exception | None = None
        self._open: dict[str, LegLink] = {}
        self._booked: list[Placement] = [placement]
        self.heard_enough = False

    def add(self, placement: Placement) -> None:
        """A further placement of the same attempt: it is released with the rest."""
        self._booked.append(placement)

    def open(self, worker_id: str, request: Request) -> None:
        """Sends a leg. A worker that is gone by now answers with a failure, as one that goes later would."""
        link = self._links.get(worker_id)
        if link is None:
            self.lose(request.sequence_id, worker_id)
            return
        self._open[request.sequence_id] = link
        self._book.sent(request.sequence_id, link.submit(request, self._receive))

    def lose(self, sequence_id: str, worker_id: str) -> None:
        """Has the leg fail because its worker is gone."""
        self._receive(LegFailure(sequence_id, FailureKind.WORKER_LOST, f"{worker_id} is gone"))

    async def next(self, timeout_s: float | None) -> LegEvent | None:
        """The next event of any leg; None when the time is over, or who hears a leg has heard enough."""
        if not self._events and not self.heard_enough:
            await self._alarm.wait(timeout_s)
        if self._broken is not None:
            raise self._broken
        return self._events.popleft() if self._events and not self.heard_enough else None

    def stream(self, sequence_id: str, hear: Callable[[TokenBatch], bool]) -> None:
        """From here on `hear` gets the leg's tokens the moment they come, but for those that also end it or that come
        while others wait: a coroutine that is woken for each costs more than all else that a token costs.

        It returns whether it has heard enough. What it raises, `next` raises.
        """
        self._streaming_id, self._hear = sequence_id, hear

    def ended(self, sequence_id: str) -> None:
        """The leg has ended by itself: its load is released now, not at the end of the attempt."""
        link = self._open.pop(sequence_id, None)
        if link is not None:
            link.forget(sequence_id)
            self._book.ended(sequence_id)

    def close(self) -> None:
        self._alarm.close()
        for sequence_id, link in self._open.items():
            link.abort(sequence_id)
            self._book.ended(sequence_id)
        self._open.clear()
        for placement in self._booked:
            self._book.withdraw(self._query, placement)

    def _receive(self, event: LegEvent) -> None:
        if (
            self._hear is not None
            and not self._events
            and isinstance(event, TokenBatch)
            and event.sequence_id == self._streaming_id
            and event.summary is None
            and event.finish_reason is None
        ):
            try:
                self.heard_enough = self._hear(event)
            except Exception as error:  # noqa: BLE001 - raised by `next`, where it belongs
                # The worker's stream, which calls this, is shared with others; the fault is this request's.
                self._broken = error
            if self.heard_enough or self._broken is not None:
                self._hear = None
                self._alarm.wake()
            return
        if isinstance(event, LegFailure):
            if self._early is None and event.sequence_id == self._prefill_id and self._decode_id in self._open:
                self.ended(event.sequence_id)
            else:
                self._put(event)
            return
        if self._early is not None:
            if event.sequence_id == self._decode_id:
                self._early.append(event)
                return
            self._events.append(event)
            self._events.extend(self._early)
            self._early = None
            self._alarm.wake()
            return
        self._put(event)

    def _put(self, event: LegEvent) -> None:
        self._events.append(event)
        self._alarm.wake()


class _Alarm:
    """Lets one coroutine wait until it is woken or a time is over, thousands of times in a row.

    The timer of one wait is left to the next, since it seldom ends one: it rings, sees that it is early, and is set
    anew. A timer a wait costs more than all else that a token costs here.
    """

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until_s = math.inf

    async def wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._until_s = math.inf if timeout_s is None else loop.time() + timeout_s
        if self._timer is not None and self._timer.when() > self._until_s + SLACK_S:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and self._until_s < math.inf:
            self._timer = loop.call_at(self._until_s, self._ring)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._until_s <= loop.time():
            self.wake()
        elif self._until_s < math.inf:
            self._timer = loop.call_at(self._until_s, self._ring)
