"""The receiving half of the hand-off: every KV range that this worker is pulling.

Owns: the links to prefill workers, the pulls in flight, the moment at which a sequence may be called landed or failed.
Refuses to know: blocks beyond the ids it was given, and what happens to a sequence afterwards.

    step loop:   accepted ---------> reserved                                 <- announce, land, fail, settle
                    |                   |                                          ^
    event loop:  subscribe -> notices -> want -> pull -> finished -> validate -> complete -> acknowledge
                                                   \\-> failed -> settled -> fail
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from baton.decode_worker.lanes import LaneBook, Tell
from baton.decode_worker.peer import PeerLink
from baton.decode_worker.probe import Prober
from baton.engine.clock import Clock
from baton.engine.duty import TransferCounters
from baton.engine.leg import HandoffTimes
from baton.engine.metrics import WorkerMetrics
from baton.engine.vital import Failed, vital
from baton.kvtransfer.connector import Connector, Pull, PullEvent, PullState
from baton.kvtransfer.incoming import Incoming, ProtocolError, WantedPull
from baton.kvtransfer.runs import count_runs
from baton.proto import worker_pb2 as wire
from baton.proto.credentials import PLAIN, ClusterWire
from baton.proto.messages import ChunkNotice, HandoffSource, KvGeometry, Leg
from baton.proto.settings import TransferSettings
from baton.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.0005


class LandingStrip(Protocol):
    """What the receiver asks of the step loop. May be called from the event loop; done in the order of the calls."""

    def announce(self, sequence_id: str) -> None:
        """The source has KV: blocks may be reserved."""
        ...

    def land(
        self, sequence_id: str, next_token: int, num_transferred_tokens: int, landed_s: float, times: HandoffTimes
    ) -> None:
        """All of the prompt's KV is in the reserved blocks."""
        ...

    def fail(self, sequence_id: str, reason: str) -> None:
        """The KV cannot be had. Its blocks are quarantined until `settle`."""
        ...

    def settle(self, sequence_id: str) -> None:
        """No read writes to its blocks any more, or to those borrowed under this name."""
        ...

    def borrow(self, name: str, num_blocks: int, answer: Callable[[list[int]], object]) -> None:
        """Takes at most so many free blocks out of use until `settle(name)`; `answer` hears which, over there."""
        ...


@dataclass(slots=True)
class _Handoff:
    """One hand-off in progress: its state machine, its link and its moments."""

    incoming: Incoming
    link: PeerLink
    final_s: float | None = None
    first_pull_s: float | None = None
    last_pull_s: float | None = None
    transferred: int = 0
    pulls: int = 0
    bytes: int = 0
    reading_s: float = 0.0
    runs: int = 0
    dropped: bool = False


@dataclass(slots=True)
class _Counts:
    tokens: int = 0
    chunks: int = 0
    chunks_early: int = 0
    bytes: int = 0
    failed: int = 0
    refused: int = 0
    unknown: int = 0


class Receiver:
    """See the module's drawing. A `HandoffSide` for the step loop, a `PeerListener` for the links."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        geometry: KvGeometry,
        connector: Connector,
        settings: TransferSettings,
        clock: Clock,
        strip: LandingStrip,
        failed: Failed,
        metrics: WorkerMetrics,
        pull_ids: Iterator[int],
        block_bytes: int,
        tell_lanes: Tell,
        wire_to_peers: ClusterWire = PLAIN,
    ) -> None:
        self._hello = wire.WatcherHello(
            worker_id=worker_id, incarnation=incarnation, geometry=geometry.to_wire(), connector=connector.name
        )
        self._geometry = geometry
        self._connector = connector
        self._settings = settings
        self._wire = wire_to_peers
        self._clock = clock
        self._strip = strip
        self._failed = failed
        self._metrics = metrics
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._handoffs: dict[str, _Handoff] = {}
        self._by_source: dict[str, _Handoff] = {}
        self._links: dict[str, PeerLink] = {}
        self._pull_ids = pull_ids
        self._pulls: dict[int, tuple[_Handoff, WantedPull]] = {}
        self._pulls_started = asyncio.Event()
        self._counts = _Counts()
        self._last_tick_s = clock()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._lanes = LaneBook(worker_id, settings.expected_gb_per_s, clock, tell_lanes)
        self._prober = Prober(
            connector, strip, self._lanes, block_bytes, pull_ids, clock, started=self._pulls_started.set
        )

    # --- step loop ------------------------------------------------------------------------------------------------

    def accepted(self, sequence: Sequence) -> None:
        if sequence.request.leg is Leg.DECODE:
            source = sequence.request.source
            assert source is not None
            self._post(self._expect, sequence.sequence_id, source, len(sequence.request.token_ids))

    def preempted(self, sequence: Sequence) -> None:
        """A sequence that runs has landed before: nothing of it is in flight."""

    def reserved(self, sequence: Sequence) -> None:
        self._post(self._reserve, sequence.sequence_id, tuple(sequence.block_ids), sequence.num_computed_tokens)

    def progressed(self, sequence: Sequence, num_tokens: int) -> None:
        """Nothing of a decode worker's own computation is lent."""

    def exported(self, sequence: Sequence, next_token: int) -> None:
        """Nothing of a decode worker's own computation is lent."""

    def ended(self, sequence: Sequence) -> None:
        if sequence.request.leg is Leg.DECODE:
            self._post(self._drop, sequence.sequence_id)

    def counters(self) -> TransferCounters:
        counts = self._counts
        return TransferCounters(
            prompt_tokens_transferred=counts.tokens,
            chunks_pulled=counts.chunks,
            chunks_pulled_early=counts.chunks_early,
            bytes_pulled=counts.bytes,
            pulls_failed=counts.failed,
            validations_refused=counts.refused,
            unknown_completions=counts.unknown,
        )

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._event_loop is not None
        self._event_loop.call_soon_threadsafe(self._run, function, arguments)

    def _run(self, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
        with vital(self._failed):
            function(*arguments)

    # --- event loop: life -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts to poll and tick, on the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._last_tick_s = self._clock()
        self._tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._tick())]

    async def close(self) -> None:
        self._closed = True
        for link in self._links.values():
            link.known.set()
        await self._prober.close()
        for task in self._tasks:
            task.cancel()
        for link in list(self._links.values()):
            await link.close()
            self._connector.forget(link.incarnation)
        self._links.clear()

    async def _poll(self) -> None:
        with vital(self._failed):
            while True:
                if not self._pulls and not self._prober.is_reading:
                    self._pulls_started.clear()
                    await self._pulls_started.wait()
                for event in self._connector.poll():
                    self._pull_event(event)
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _tick(self) -> None:
        """Fences this side: after a stall of more than half a lease, nothing that was in progress is trusted."""
        with vital(self._failed):
            while True:
                await asyncio.sleep(self._settings.heartbeat_s)
                now = self._clock()
                stall_s, self._last_tick_s = now - self._last_tick_s, now
                if stall_s > self._settings.lease_s / 2:
                    for sequence_id in list(self._handoffs):
                        self._fail(sequence_id, f"this worker stalled for {stall_s:.1f} s during the hand-off")
                for link in self._links.values():
                    self._lanes.heard(link.incarnation, link.round_trip_s)
                self._lanes.tick()
                self._probe_one()

    def _probe_one(self) -> None:
        """Measures a lane of which nothing is known, while nobody waits for KV."""
        probe_bytes = self._settings.probe_mib << 20
        if not probe_bytes or self._handoffs or self._prober.is_reading:
            return
        for link in self._links.values():
            if link.round_trip_s and not link.probed:
                link.probed = True
                if not self._lanes.is_measured(link.incarnation):
                    self._measure(link, probe_bytes)
                    return

    def _measure(self, link: PeerLink, num_bytes: int) -> asyncio.Task[None]:
        task = asyncio.create_task(self._probe(link, num_bytes))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    async def _probe(self, link: PeerLink, num_bytes: int) -> None:
        with vital(self._failed):
            await self._prober.measure(link, num_bytes)

    async def meet(self, sources: Many[HandoffSource], probe_bytes: int, timeout_s: float) -> tuple[wire.Lane, ...]:
        """See `Duty`. Lanes that are not open by then say so."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._meet(source, probe_bytes) for source in sources))
        except TimeoutError:
            log.warning("%d lanes were not all examined within %.1f s", len(sources), timeout_s)
        return self._lanes.lanes()

    async def _meet(self, source: HandoffSource, probe_bytes: int) -> None:
        if self._closed:
            return
        link = self._links.get(source.incarnation) or self._begin_link(source)
        await link.known.wait()
        if self._links.get(source.incarnation) is link:
            self._lanes.heard(link.incarnation, link.round_trip_s)
            if probe_bytes:
                await self._measure(link, probe_bytes)

    # --- event loop: what the step loop says ------------------------------------------------------------------------

    def _expect(self, sequence_id: str, source: HandoffSource, num_tokens: int) -> None:
        link = self._links.get(source.incarnation)
        if link is None:
            link = self._begin_link(source)
        incoming = Incoming(sequence_id, source, num_tokens, self._geometry.block_size)
        self._handoffs[sequence_id] = self._by_source[source.sequence_id] = _Handoff(incoming, link)
        link.post(wire.WatcherMessage(subscribe=wire.Subscribe(sequence_id=source.sequence_id)))

    def _begin_link(self, source: HandoffSource) -> PeerLink:
        link = PeerLink(source, self._hello, self._geometry, self._settings, self, self._failed, self._wire)
        self._links[source.incarnation] = link
        self._lanes.meeting(source)
        return link

    def _reserve(self, sequence_id: str, blocks: tuple[int, ...], num_cached_tokens: int) -> None:
        handoff = self._handoffs.get(sequence_id)
        if handoff is None:
            self._strip.settle(sequence_id)
            return
        handoff.incoming.reserve(blocks, num_cached_tokens)
        self._advance(handoff)

    def _drop(self, sequence_id: str) -> None:
        """The leg has ended. Its blocks are ours again when its read, if there is one, has settled."""
        handoff = self._handoffs.pop(sequence_id, None)
        if handoff is None:
            return
        del self._by_source[handoff.incoming.source.sequence_id]
        handoff.dropped = True
        if not handoff.incoming.pulling:
            self._strip.settle(sequence_id)

    # --- event loop: what the source says (PeerListener) --------------------------------------------------------------

    def opened(self, link: PeerLink) -> None:
        """An incarnation that answers is evidence that all others of its name are dead; a leg that names it is none."""
        self._lanes.opened(link.incarnation, self._connector.transport(link.incarnation))
        for other in list(self._links.values()):
            if other.worker_id == link.worker_id and other is not link:
                self.lost(other, f"{link.worker_id} has restarted as {link.incarnation}")

    def noticed(self, link: PeerLink, message: wire.ChunkNotice) -> None:
        handoff = self._find(link, message.sequence_id)
        if handoff is None:
            return
        incoming = handoff.incoming
        first = not incoming.announced
        try:
            incoming.notice(ChunkNotice.from_wire(message))
        except ProtocolError as error:
            self._fail(incoming.sequence_id, str(error))
            return
        if incoming.next_token is not None:
            handoff.final_s = self._clock() - message.age_s
        if first and incoming.announced:
            self._strip.announce(incoming.sequence_id)
        self._advance(handoff)

    def validated(self, link: PeerLink, message: wire.Validated) -> None:
        handoff = self._find(link, message.sequence_id)
        if handoff is None:
            return
        before = handoff.incoming.validated
        if handoff.incoming.answer(message.token, message.lent):
            handoff.transferred += handoff.incoming.validated - before
            self._counts.tokens += handoff.incoming.validated - before
        elif not message.lent:
            self._counts.refused += 1
        self._advance(handoff)

    def revoked(self, link: PeerLink, message: wire.Revoked) -> None:
        handoff = self._find(link, message.sequence_id)
        if handoff is None:
            return
        if message.gone:
            self._fail(handoff.incoming.sequence_id, f"the source gave the lease up: {message.reason}")
        else:
            handoff.incoming.revoke(message.epoch)
            self._advance(handoff)

    def lost(self, link: PeerLink, reason: str) -> None:
        link.known.set()
        if self._links.get(link.incarnation) is link:
            del self._links[link.incarnation]
            self._connector.forget(link.incarnation)
            self._lanes.ended(link.incarnation, reason, refused=link.refused)
        for handoff in list(self._handoffs.values()):
            if handoff.link is link:
                self._fail(handoff.incoming.sequence_id, f"{link.worker_id} was lost: {reason}")

    def _find(self, link: PeerLink, source_sequence_id: str) -> _Handoff | None:
        handoff = self._by_source.get(source_sequence_id)
        if handoff is None or handoff.link is not link:
            self._counts.unknown += 1
            return None
        return handoff

    # --- event loop: acting -----------------------------------------------------------------------------------------

    def _advance(self, handoff: _Handoff) -> None:
        incoming = handoff.incoming
        if incoming.complete:
            self._land(handoff)
            return
        wanted = incoming.want()
        if wanted is None:
            return
        now = self._clock()
        handoff.last_pull_s = now
        if handoff.first_pull_s is None:
            handoff.first_pull_s = now
        number = next(self._pull_ids)
        self._pulls[number] = (handoff, wanted)
        self._pulls_started.set()
        self._lanes.reading(incoming.source.incarnation)
        self._connector.pull(
            Pull(
                pull_id=number,
                peer=incoming.source.incarnation,
                address=handoff.link.kv_address,
                source_blocks=wanted.source_blocks,
                destination_blocks=wanted.destination_blocks,
                checksum=wanted.checksum,
            )
        )

    def _pull_event(self, event: PullEvent) -> None:
        if self._prober.take(event):
            return
        entry = self._pulls.get(event.pull_id)
        if entry is None:
            self._counts.unknown += 1
            return
        handoff, wanted = entry
        incoming = handoff.incoming
        if event.state is not PullState.SETTLED:
            transport = self._connector.transport(incoming.source.incarnation)
            self._lanes.read(incoming.source.incarnation, event.num_bytes, transport)
        match event.state:
            case PullState.FINISHED:
                self._counts.chunks += 1
                self._counts.chunks_early += wanted.early
                self._counts.bytes += event.num_bytes
                handoff.pulls += 1
                handoff.bytes += event.num_bytes
                handoff.reading_s += event.seconds
                handoff.runs += count_runs(wanted.source_blocks, wanted.destination_blocks)
                self._metrics.pulled(event.num_bytes, len(wanted.destination_blocks), event.seconds)
                question = incoming.finished()
                if question is not None and not handoff.dropped:
                    handoff.link.post(
                        wire.WatcherMessage(
                            validate=wire.Validate(
                                sequence_id=incoming.source.sequence_id, epoch=question.epoch, token=question.token
                            )
                        )
                    )
            case PullState.FAILED:
                self._counts.failed += 1
                # A read of blocks that were revoked meanwhile may well find a wrong checksum: it is done again.
                if not handoff.dropped and wanted.epoch == incoming.epoch:
                    self._fail(incoming.sequence_id, f"reading the KV failed: {event.reason}")
            case PullState.SETTLED:
                del self._pulls[event.pull_id]
                incoming.settled()
                if handoff.dropped:
                    self._strip.settle(incoming.sequence_id)
                else:
                    self._advance(handoff)

    def _land(self, handoff: _Handoff) -> None:
        """The KV is complete and validated: the source may have its blocks back."""
        incoming = handoff.incoming
        assert incoming.next_token is not None
        now = self._clock()
        final_s = handoff.final_s if handoff.final_s is not None else now
        start_s = max(final_s, handoff.last_pull_s) if handoff.last_pull_s is not None else final_s
        begun_s = handoff.first_pull_s if handoff.first_pull_s is not None else final_s
        times = HandoffTimes(
            wait_s=start_s - final_s,
            transfer_s=now - start_s,
            pulling_s=now - begun_s,
            num_pulls=handoff.pulls,
            num_bytes=handoff.bytes,
            reading_s=handoff.reading_s,
            num_runs=handoff.runs,
        )
        del self._handoffs[incoming.sequence_id]
        del self._by_source[incoming.source.sequence_id]
        handoff.link.post(
            wire.WatcherMessage(
                acknowledge=wire.Acknowledge(sequence_id=incoming.source.sequence_id, epoch=incoming.epoch)
            )
        )
        self._strip.land(incoming.sequence_id, incoming.next_token, handoff.transferred, now, times)

    def _fail(self, sequence_id: str, reason: str) -> None:
        self._strip.fail(sequence_id, reason)
        self._drop(sequence_id)
