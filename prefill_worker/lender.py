"""The lending half of the hand-off: which blocks may be read, by whom, in which epoch.

Owns: the lease table and its lock, the watchers' outboxes, the rule that a lease is void before its blocks change.
Refuses to know: how bytes move, and what a sequence computes.

    step loop:   accepted -> progressed* -> exported -> (release) ended     (and reserved: begin)
                     |           | publish     | publish final
                     v           v             v
    lease table (lock) --ChunkNotice--> watcher's outbox --> decode worker
                     ^ subscribe, validate, acknowledge, heartbeat
    event loop:  Handoff.Watch streams; tick() expires leases and fences this side after a stall
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.engine.clock import Clock
from baton.engine.duty import TransferCounters
from baton.kvtransfer.connector import Connector
from baton.kvtransfer.lease import LeaseTable, LeaseTaken, UnknownLease
from baton.proto import worker_pb2 as wire
from baton.proto.messages import ChunkNotice, Leg
from baton.scheduler.sequence import Sequence, State

log = logging.getLogger(__name__)


class WatcherLink:
    """One decode worker's stream: its outbox, when it was last heard and when its leases were last renewed.

    Belongs to the event loop.
    """

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.event_loop = asyncio.get_running_loop()
        self.outbox: asyncio.Queue[wire.LenderMessage | None] = asyncio.Queue()
        self.heard_s = now
        self.renewed_s = now

    def post(self, message: wire.LenderMessage) -> None:
        """Queues a message; from any thread, in order."""
        self.event_loop.call_soon_threadsafe(self.outbox.put_nowait, message)


@dataclass(frozen=True, slots=True)
class _EarlySubscription:
    """A watcher that asked for a sequence before the router's Submit for it came in, and how long that may take."""

    watcher: str
    deadline_s: float


class Lender:
    """See the module's drawing. `release` and `expire` run on the event loop and must hand over to the step loop."""

    def __init__(
        self,
        lease_s: float,
        block_size: int,
        connector: Connector,
        clock: Clock,
        release: Callable[[str], None],
        expire: Callable[[str, str], None],
    ) -> None:
        self._table = LeaseTable(lease_s, block_size)
        self._lock = threading.Lock()
        self._lease_s = lease_s
        self._connector = connector
        self._clock = clock
        self._release = release
        self._expire = expire
        self._watchers: dict[str, WatcherLink] = {}
        self._early: dict[str, _EarlySubscription] = {}
        self._last_tick_s = clock()
        self._num_expired = 0

    # --- step loop ------------------------------------------------------------------------------------------------

    def accepted(self, sequence: Sequence) -> None:
        if sequence.request.leg is not Leg.PREFILL:
            return
        now = self._clock()
        with self._lock:
            self._table.open(sequence.sequence_id, now)
            early = self._early.pop(sequence.sequence_id, None)
            if early is not None and early.watcher in self._watchers:
                self._table.subscribe(sequence.sequence_id, early.watcher, now)

    def preempted(self, sequence: Sequence) -> None:
        with self._lock:
            revoked = self._table.revoke(sequence.sequence_id)
            if revoked is not None:
                self._post_revoked(revoked[0], sequence.sequence_id, revoked[1], gone=False, reason="preempted")
        self._connector.release(sequence.sequence_id)

    def reserved(self, sequence: Sequence) -> None:
        """Its computation begins: whoever waits for its KV may look for blocks while it lasts."""
        with self._lock:
            told = self._table.begin(sequence.sequence_id, self._clock())
            if told is not None:
                self._post_notice(*told)

    def progressed(self, sequence: Sequence, num_tokens: int) -> None:
        self._publish(sequence, num_tokens, final=False, next_token=0)

    def exported(self, sequence: Sequence, next_token: int) -> None:
        self._publish(sequence, sequence.num_computed_tokens, final=True, next_token=next_token)

    def ended(self, sequence: Sequence) -> None:
        with self._lock:
            closed = self._table.close(sequence.sequence_id)
            # One that its first token has finished needs no decode leg: the router ends that, and it is no failure.
            if closed is not None and sequence.state is not State.FINISHED:
                self._post_revoked(closed[0], sequence.sequence_id, closed[1], gone=True, reason="the leg has ended")
        self._connector.release(sequence.sequence_id)

    def counters(self) -> TransferCounters:
        counters = self._table.counters
        return TransferCounters(
            leases_expired=self._num_expired,
            unknown_completions=counters.acknowledgements_ignored + counters.publishes_ignored,
        )

    def _publish(self, sequence: Sequence, num_tokens: int, final: bool, next_token: int) -> None:
        with self._lock:
            told = self._table.publish(
                sequence.sequence_id, num_tokens, sequence.block_ids, final, next_token, self._clock()
            )
            if told is not None:
                self._post_notice(*told)

    def _post_notice(self, watcher: str, notice: ChunkNotice) -> None:
        link = self._watchers.get(watcher)
        if link is not None:
            checksum = self._connector.export(notice.sequence_id, notice.block_ids) if notice.block_ids else 0
            link.post(wire.LenderMessage(notice=replace(notice, checksum=checksum).to_wire()))

    def _post_revoked(self, watcher: str, sequence_id: str, epoch: int, gone: bool, reason: str) -> None:
        link = self._watchers.get(watcher)
        if link is not None:
            revoked = wire.Revoked(sequence_id=sequence_id, epoch=epoch, gone=gone, reason=reason)
            link.post(wire.LenderMessage(revoked=revoked))

    # --- event loop -----------------------------------------------------------------------------------------------

    def open_watcher(self, link: WatcherLink) -> None:
        """Adds a decode worker's stream. Its name is its own: a later stream of that worker is another watcher."""
        with self._lock:
            self._watchers[link.name] = link

    def close_watcher(self, link: WatcherLink) -> None:
        """Its stream has ended: nobody will fetch what it was lent, so those legs fail."""
        with self._lock:
            del self._watchers[link.name]
            dropped = self._table.drop_watcher(link.name)
        for sequence_id in dropped:
            self._expire(sequence_id, f"{link.name} is gone")

    def subscribe(self, link: WatcherLink, sequence_id: str) -> None:
        """Answers with what has been published so far. An unknown sequence may still come: it is waited for a lease's
        time, then, as one that another watcher has, refused by Revoked(gone)."""
        now = self._clock()
        with self._lock:
            outcome = self._table.subscribe(sequence_id, link.name, now)
            if isinstance(outcome, UnknownLease):
                self._early[sequence_id] = _EarlySubscription(link.name, now + self._lease_s)
            elif isinstance(outcome, LeaseTaken):
                self._post_revoked(link.name, sequence_id, 0, gone=True, reason=f"{outcome.watcher} has it")
            elif outcome is not None:
                self._post_notice(link.name, outcome)

    def validate(self, link: WatcherLink, message: wire.Validate) -> None:
        """Answers whether the epoch still stood after the read that the watcher has finished."""
        with self._lock:
            lent = self._table.valid(message.sequence_id, message.epoch)
        answer = wire.Validated(sequence_id=message.sequence_id, token=message.token, lent=lent)
        link.outbox.put_nowait(wire.LenderMessage(validated=answer))

    def acknowledge(self, sequence_id: str, epoch: int) -> None:
        """The watcher has all of the KV: the blocks are released."""
        with self._lock:
            released = self._table.acknowledge(sequence_id, epoch)
        if released:
            self._connector.release(sequence_id)
            self._release(sequence_id)

    def renew(self, link: WatcherLink) -> None:
        with self._lock:
            self._table.renew(link.name, self._clock())

    def tick(self) -> None:
        """Expires leases; after a stall of more than half a lease gives up all that is lent in full."""
        now = self._clock()
        stall_s, self._last_tick_s = now - self._last_tick_s, now
        stalled = stall_s > self._lease_s / 2
        reason = f"the source stalled for {stall_s:.1f} s" if stalled else f"not fetched within {self._lease_s:.1f} s"
        with self._lock:
            expired = self._table.expire(float("inf") if stalled else now)
            for sequence_id, watcher in expired:
                self._post_revoked(watcher, sequence_id, 0, gone=True, reason=reason)
            for sequence_id in [name for name, early in self._early.items() if early.deadline_s <= now]:
                early = self._early.pop(sequence_id)
                self._post_revoked(early.watcher, sequence_id, 0, gone=True, reason="no such sequence")
        for sequence_id, _ in expired:
            self._num_expired += 1
            log.warning("lease of %s ended: %s", sequence_id, reason)
            self._expire(sequence_id, reason)
