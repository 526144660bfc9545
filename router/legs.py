"""The legs of one attempt at a request: what was sent to workers, and what comes back, in the order of the output.

Owns: the mailbox of an attempt, and that every leg is aborted or over, and its load released, when the attempt is.
Refuses to know: which worker is chosen, and what follows from a failure (`router.journey`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from baton.proto.messages import FailureKind, Leg, LegFailure, Request, TokenBatch
from baton.router.link import LegEvent, WorkerLink
from baton.router.load import LoadBook
from baton.router.placement import Placement, PlacementQuery


class Legs:
    """The legs of one attempt: open until `close`, which aborts what has not ended and releases what was booked.

    Events come in the order of the output: what decode says first waits until prefill's first token, which travels on
    another stream, is there. A prefill leg that fails when its token is there and a decode leg is open is passed over:
    decode has the KV, or will say that it cannot have it.
    """

    def __init__(
        self, query: PlacementQuery, placement: Placement, links: Mapping[str, WorkerLink], book: LoadBook
    ) -> None:
        self._query = query
        self._prefill_id, self._decode_id = query.leg_id(Leg.PREFILL), query.leg_id(Leg.DECODE)
        self._links = links
        self._book = book
        self._events: asyncio.Queue[LegEvent] = asyncio.Queue()
        self._early: list[TokenBatch] | None = []
        self._open: dict[str, WorkerLink] = {}
        self._booked: list[Placement] = [placement]

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
        """The next event of any leg; None when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._events.get()
        except TimeoutError:
            return None

    def ended(self, sequence_id: str) -> None:
        """The leg has ended by itself: its load is released now, not at the end of the attempt."""
        link = self._open.pop(sequence_id, None)
        if link is not None:
            link.forget(sequence_id)
            self._book.ended(sequence_id)

    def close(self) -> None:
        for sequence_id, link in self._open.items():
            link.abort(sequence_id)
            self._book.ended(sequence_id)
        self._open.clear()
        for placement in self._booked:
            self._book.withdraw(self._query, placement)

    def _receive(self, event: LegEvent) -> None:
        if isinstance(event, LegFailure):
            if self._early is None and event.sequence_id == self._prefill_id and self._decode_id in self._open:
                self.ended(event.sequence_id)
            else:
                self._events.put_nowait(event)
            return
        if self._early is not None:
            if event.sequence_id == self._decode_id:
                self._early.append(event)
                return
            self._events.put_nowait(event)
            for batch in self._early:
                self._events.put_nowait(batch)
            self._early = None
            return
        self._events.put_nowait(event)
