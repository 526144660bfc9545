"""The hand-off between virtual workers: the live protocol's own state machines, with messages and reads that take time.

Owns: the ways that messages and bytes take, one lane a pair of workers, and who talks to whom.
Refuses to know: what a lease or a read in progress is (`kvtransfer.lease`, `kvtransfer.incoming`, which run here as
they do live), blocks beyond their ids, and what happens to a sequence afterwards.

    step loop:   accepted -> progressed* -> exported                              (lender: prefill worker)
                    | open      | publish      | publish final
                    v           v              v
    lease table --notice--> incoming: announce, want -> lane -> finished: validate -> complete: land, acknowledge
                                                                                  (receiver: decode worker)

Modelled, not run: the streams between workers, as messages that take half of a hand-off round trip each and are never
lost; heartbeats, as leases of watchers that live being renewed at every tick; reads, as work that the reads of a pair
share evenly. Left out, as there is nothing for them to find: checksums, geometry, stalls of a worker's own loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Protocol

from baton.capacity.cost import CostModel
from baton.capacity.virtual_loop import VirtualLoop
from baton.kvtransfer.incoming import Incoming, Question, WantedPull
from baton.kvtransfer.lease import LeaseTable, LeaseTaken, UnknownLease
from baton.kvtransfer.runs import count_runs
from baton.proto.messages import ChunkNotice, Leg
from baton.proto.value import value
from baton.scheduler.sequence import Sequence, State


class Worker(Protocol):
    """What both sides ask of the step loop that they belong to; done between steps, in the order of the calls."""

    def release(self, sequence_id: str) -> None: ...

    def expire(self, sequence_id: str, reason: str) -> None: ...

    def announce(self, sequence_id: str) -> None: ...

    def land(self, sequence_id: str, next_token: int, landed: Landed) -> None: ...

    def lose_source(self, sequence_id: str, reason: str) -> None: ...

    def settle(self, sequence_id: str) -> None: ...


@value
class Landed:
    """A hand-off that is complete. `wait_s`: from the end of the prompt's computation to the last read's start;
    `transfer_s`: from there to validated KV."""

    at_s: float
    num_tokens: int
    wait_s: float
    transfer_s: float


@dataclass(slots=True)
class MovedBytes:
    """What the receivers of a pool have read, and in how much time of reads."""

    num_bytes: int = 0
    seconds: float = 0.0


class Lane:
    """The way from one worker's pool to another's; reads in progress share it evenly.

    Each read needs so many seconds of the lane alone. `served` are the seconds that every read in progress has got
    since the first, so a read ends when that reaches what it was at its start and its own need.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._reads: list[tuple[float, int, Callable[[], None]]] = []
        self._served_s = 0.0
        self._seen_s = 0.0
        self._number = 0
        self._alarms = 0

    def read(self, alone_s: float, done: Callable[[], None]) -> None:
        self._serve()
        self._number += 1
        heappush(self._reads, (self._served_s + alone_s, self._number, done))
        self._set_alarm()

    def _serve(self) -> None:
        now = self._loop.time()
        if self._reads:
            self._served_s += (now - self._seen_s) / len(self._reads)
        self._seen_s = now

    def _set_alarm(self) -> None:
        self._alarms += 1
        left_s = max(self._reads[0][0] - self._served_s, 0.0) * len(self._reads)
        self._loop.at(self._loop.time() + left_s, partial(self._ring, self._alarms))

    def _ring(self, alarm: int) -> None:
        """The read that was to end now has ended, unless others have come or gone meanwhile."""
        if alarm != self._alarms:
            return
        self._serve()
        until_s, _, done = heappop(self._reads)
        self._served_s = max(self._served_s, until_s)
        if self._reads:
            self._set_alarm()
        else:
            self._served_s = 0.0
        done()


class Exchange:
    """Knows both sides of every pair, by incarnation, and carries messages between them."""

    def __init__(self, loop: VirtualLoop, cost: CostModel, block_bytes: int) -> None:
        self.loop = loop
        self._cost = cost
        self._block_bytes = block_bytes
        self._message_s = cost.transfer.control_s / 2
        self._lenders: dict[str, Lender] = {}
        self._receivers: dict[str, Receiver] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}

    def add_lender(self, lender: Lender) -> None:
        self._lenders[lender.name] = lender

    def add_receiver(self, receiver: Receiver) -> None:
        self._receivers[receiver.name] = receiver

    def remove(self, name: str) -> None:
        """A worker is gone: whoever has a hand-off with it hears that its stream has ended."""
        if self._lenders.pop(name, None) is not None:
            for receiver in self._receivers.values():
                self.send(partial(receiver.lost, name))
        if self._receivers.pop(name, None) is not None:
            for lender in self._lenders.values():
                self.send(partial(lender.close_watcher, name))
        self._lanes = {pair: lane for pair, lane in self._lanes.items() if name not in pair}

    def lender(self, name: str) -> Lender | None:
        return self._lenders.get(name)

    def receiver(self, name: str) -> Receiver | None:
        return self._receivers.get(name)

    def receivers(self) -> list[str]:
        return list(self._receivers)

    def send(self, message: Callable[[], None]) -> None:
        self.loop.at(self.loop.time() + self._message_s, message)

    def read(self, source: str, sink: str, wanted: WantedPull, done: Callable[[float, int], None]) -> None:
        """Calls back, with the time and the bytes, when the read has settled."""
        lane = self._lanes.get((source, sink))
        if lane is None:
            lane = self._lanes[source, sink] = Lane(self.loop)
        num_bytes = len(wanted.source_blocks) * self._block_bytes
        runs = count_runs(wanted.source_blocks, wanted.destination_blocks) if self._cost.transfer.run_s else 1
        began_s = self.loop.time()
        lane.read(self._cost.transfer_s(num_bytes, runs), lambda: done(self.loop.time() - began_s, num_bytes))


@dataclass(frozen=True, slots=True)
class _Early:
    watcher: str
    deadline_s: float


class Lender:
    """The lending half, as `prefill_worker.lender`: which blocks may be read, by whom, in which epoch."""

    def __init__(
        self, name: str, exchange: Exchange, worker: Worker, block_size: int, lease_s: float, tick_s: float
    ) -> None:
        self.name = name
        self._exchange = exchange
        self._loop = exchange.loop
        self._worker = worker
        self._lease_s = lease_s
        self._tick_s = tick_s
        self._ticking = False
        self._table = LeaseTable(lease_s, block_size)
        self._early: dict[str, _Early] = {}

    def accepted(self, sequence: Sequence) -> None:
        if sequence.leg is not Leg.PREFILL:
            return
        now = self._loop.time()
        self._table.open(sequence.sequence_id, now)
        early = self._early.pop(sequence.sequence_id, None)
        if early is not None and self._exchange.receiver(early.watcher) is not None:
            self._table.subscribe(sequence.sequence_id, early.watcher, now)
        self._keep_ticking()

    def preempted(self, sequence: Sequence) -> None:
        revoked = self._table.revoke(sequence.sequence_id)
        if revoked is not None:
            self._send_revoked(revoked[0], sequence.sequence_id, revoked[1], "")

    def reserved(self, sequence: Sequence) -> None:
        told = self._table.begin(sequence.sequence_id, self._loop.time())
        if told is not None:
            self._send_notice(*told)

    def progressed(self, sequence: Sequence, num_tokens: int) -> None:
        self._publish(sequence, num_tokens, final=False, next_token=0)

    def exported(self, sequence: Sequence, next_token: int) -> None:
        self._publish(sequence, sequence.num_computed_tokens, final=True, next_token=next_token)

    def ended(self, sequence: Sequence) -> None:
        closed = self._table.close(sequence.sequence_id)
        if closed is not None and sequence.state is not State.FINISHED:
            self._send_revoked(closed[0], sequence.sequence_id, closed[1], "the leg has ended")

    def subscribe(self, watcher: str, sequence_id: str) -> None:
        now = self._loop.time()
        outcome = self._table.subscribe(sequence_id, watcher, now)
        if isinstance(outcome, UnknownLease):
            self._early[sequence_id] = _Early(watcher, now + self._lease_s)
            self._keep_ticking()
        elif isinstance(outcome, LeaseTaken):
            self._send_revoked(watcher, sequence_id, 0, f"{outcome.watcher} has it")
        elif outcome is not None:
            self._send_notice(watcher, outcome)

    def validate(self, watcher: str, sequence_id: str, question: Question) -> None:
        lent = self._table.valid(sequence_id, question.epoch)
        receiver = self._exchange.receiver(watcher)
        if receiver is not None:
            self._exchange.send(partial(receiver.validated, sequence_id, question.token, lent))

    def acknowledge(self, sequence_id: str, epoch: int) -> None:
        if self._table.acknowledge(sequence_id, epoch):
            self._worker.release(sequence_id)

    def close_watcher(self, watcher: str) -> None:
        for sequence_id in self._table.drop_watcher(watcher):
            self._worker.expire(sequence_id, f"{watcher} is gone")

    def _publish(self, sequence: Sequence, num_tokens: int, final: bool, next_token: int) -> None:
        now = self._loop.time()
        told = self._table.publish(sequence.sequence_id, num_tokens, sequence.block_ids, final, next_token, now)
        if told is not None:
            self._send_notice(*told)

    def _send_notice(self, watcher: str, notice: ChunkNotice) -> None:
        receiver = self._exchange.receiver(watcher)
        if receiver is not None:
            self._exchange.send(partial(receiver.noticed, notice))

    def _send_revoked(self, watcher: str, sequence_id: str, epoch: int, gone: str) -> None:
        receiver = self._exchange.receiver(watcher)
        if receiver is not None:
            self._exchange.send(partial(receiver.revoked, sequence_id, epoch, gone))

    def _keep_ticking(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._loop.at(self._loop.time() + self._tick_s, self._tick)

    def _tick(self) -> None:
        """Expires leases, those of watchers that live excepted; rests when there is nothing to expire."""
        now = self._loop.time()
        self._ticking = False
        if self._exchange.lender(self.name) is not self:
            return
        if self._table.num_lent:
            for watcher in self._exchange.receivers():
                self._table.renew(watcher, now)
            reason = f"not fetched within {self._lease_s:.1f} s"
            for sequence_id, watcher in self._table.expire(now):
                self._send_revoked(watcher, sequence_id, 0, reason)
                self._worker.expire(sequence_id, reason)
        for sequence_id in [name for name, early in self._early.items() if early.deadline_s <= now]:
            early = self._early.pop(sequence_id)
            self._send_revoked(early.watcher, sequence_id, 0, "no such sequence")
        if len(self._table) or self._early:
            self._keep_ticking()


@dataclass(slots=True)
class _Handoff:
    """One hand-off in progress: its state machine and its moments."""

    incoming: Incoming
    final_s: float | None = None
    last_read_s: float | None = None
    transferred: int = 0
    dropped: bool = False


class Receiver:
    """The receiving half, as `decode_worker.receiver`: every KV range that this worker is reading."""

    def __init__(self, name: str, exchange: Exchange, worker: Worker, block_size: int, moved: MovedBytes) -> None:
        self.name = name
        self._exchange = exchange
        self._loop = exchange.loop
        self._worker = worker
        self._block_size = block_size
        self._moved = moved
        self._handoffs: dict[str, _Handoff] = {}
        self._by_source: dict[str, _Handoff] = {}

    def accepted(self, sequence: Sequence) -> None:
        source = sequence.request.source
        assert source is not None
        num_tokens = len(sequence.request.token_ids)
        handoff = _Handoff(Incoming(sequence.sequence_id, source, num_tokens, self._block_size))
        self._handoffs[sequence.sequence_id] = self._by_source[source.sequence_id] = handoff
        lender = self._exchange.lender(source.incarnation)
        if lender is None:
            self._exchange.send(partial(self.lost, source.incarnation))
        else:
            self._exchange.send(partial(lender.subscribe, self.name, source.sequence_id))

    def reserved(self, sequence: Sequence) -> None:
        handoff = self._handoffs.get(sequence.sequence_id)
        if handoff is None:
            self._worker.settle(sequence.sequence_id)
            return
        handoff.incoming.reserve(tuple(sequence.block_ids), sequence.num_computed_tokens)
        self._advance(handoff)

    def ended(self, sequence: Sequence) -> None:
        if sequence.leg is Leg.DECODE:
            self._drop(sequence.sequence_id)

    def noticed(self, notice: ChunkNotice) -> None:
        handoff = self._by_source.get(notice.sequence_id)
        if handoff is None:
            return
        incoming = handoff.incoming
        first = not incoming.announced
        incoming.notice(notice)
        if incoming.next_token is not None:
            handoff.final_s = self._loop.time() - notice.age_s
        if first and incoming.announced:
            self._worker.announce(incoming.sequence_id)
        self._advance(handoff)

    def validated(self, source_sequence_id: str, token: int, lent: bool) -> None:
        handoff = self._by_source.get(source_sequence_id)
        if handoff is None:
            return
        before = handoff.incoming.validated
        if handoff.incoming.answer(token, lent):
            handoff.transferred += handoff.incoming.validated - before
        self._advance(handoff)

    def revoked(self, source_sequence_id: str, epoch: int, gone: str) -> None:
        handoff = self._by_source.get(source_sequence_id)
        if handoff is None:
            return
        if gone:
            self._fail(handoff.incoming.sequence_id, f"the source gave the lease up: {gone}")
        else:
            handoff.incoming.revoke(epoch)
            self._advance(handoff)

    def lost(self, source: str) -> None:
        for handoff in [each for each in self._handoffs.values() if each.incoming.source.incarnation == source]:
            self._fail(handoff.incoming.sequence_id, f"{handoff.incoming.source.worker_id} was lost")

    def _advance(self, handoff: _Handoff) -> None:
        incoming = handoff.incoming
        if incoming.complete:
            self._land(handoff)
            return
        wanted = incoming.want()
        if wanted is None:
            return
        handoff.last_read_s = self._loop.time()
        self._exchange.read(incoming.source.incarnation, self.name, wanted, partial(self._read_settled, handoff))

    def _read_settled(self, handoff: _Handoff, seconds: float, num_bytes: int) -> None:
        incoming, source = handoff.incoming, handoff.incoming.source
        self._moved.num_bytes += num_bytes
        self._moved.seconds += seconds
        question = incoming.finished()
        incoming.settled()
        if handoff.dropped:
            self._worker.settle(incoming.sequence_id)
            return
        lender = self._exchange.lender(source.incarnation)
        if question is not None and lender is not None:
            self._exchange.send(partial(lender.validate, self.name, source.sequence_id, question))
        self._advance(handoff)

    def _land(self, handoff: _Handoff) -> None:
        incoming, now = handoff.incoming, self._loop.time()
        assert incoming.next_token is not None
        final_s = handoff.final_s if handoff.final_s is not None else now
        start_s = max(final_s, handoff.last_read_s) if handoff.last_read_s is not None else final_s
        self._forget(handoff)
        lender = self._exchange.lender(incoming.source.incarnation)
        if lender is not None:
            self._exchange.send(partial(lender.acknowledge, incoming.source.sequence_id, incoming.epoch))
        landed = Landed(now, handoff.transferred, start_s - final_s, now - start_s)
        self._worker.land(incoming.sequence_id, incoming.next_token, landed)

    def _fail(self, sequence_id: str, reason: str) -> None:
        self._worker.lose_source(sequence_id, reason)
        self._drop(sequence_id)

    def _drop(self, sequence_id: str) -> None:
        """The leg has ended. Its blocks are its worker's again when its read, if there is one, has settled."""
        handoff = self._handoffs.get(sequence_id)
        if handoff is None:
            return
        self._forget(handoff)
        handoff.dropped = True
        if not handoff.incoming.pulling:
            self._worker.settle(sequence_id)

    def _forget(self, handoff: _Handoff) -> None:
        del self._handoffs[handoff.incoming.sequence_id]
        del self._by_source[handoff.incoming.source.sequence_id]
