"""What a source has lent to whom: epochs, published ranges, watchers and the time at which a lease runs out.

Owns: the table of leases, each call a pure step of it. Refuses to know: clocks, locks, wires, pools: `now` comes in as
an argument, notices go out as values, and the caller serialises the calls.

             open             publish ...           publish(final)
      (none) -----> COMPUTING ----------> COMPUTING -------------> LENT --- acknowledge ---> (none)
                       ^                      |                     |
                       +--- revoke: epoch+1, nothing published -----+
             at any moment: close, drop_watcher ---> (none)      LENT: expire ---> (none)

A watcher may subscribe in either state, before or after the first publish: it gets all that was published so far in one
notice, and from then on what is new. `begin` gives it a notice of no tokens: time to find blocks for those that come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.proto.messages import ChunkNotice


@dataclass(frozen=True, slots=True)
class UnknownLease:
    """The answer to a subscriber that asks for a sequence that was never lent here, or is no more."""

    sequence_id: str


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """The answer to a subscriber that asks for a sequence that another watcher already watches."""

    sequence_id: str
    watcher: str


@dataclass(slots=True)
class LeaseCounters:
    """Counts since the table was made. `opened` is the sum of the four ways out and of the leases that are live."""

    opened: int = 0
    acknowledged: int = 0
    expired: int = 0
    dropped: int = 0
    closed: int = 0
    revoked: int = 0
    acknowledgements_ignored: int = 0
    publishes_ignored: int = 0
    subscribers_refused: int = 0


@dataclass(slots=True)
class _Lease:
    sequence_id: str
    epoch: int = 1
    watcher: str = ""
    begun: bool = False
    num_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    final: bool = False
    next_token: int = 0
    renewed_at: float = 0.0
    final_at: float = 0.0


@dataclass(slots=True)
class LeaseTable:
    """The leases of one incarnation of a source. Not thread-safe.

    A notice's checksum is left 0: the caller knows the pool and puts it in before it sends the notice.
    """

    lease_s: float
    block_size: int
    counters: LeaseCounters = field(default_factory=LeaseCounters)
    _leases: dict[str, _Lease] = field(default_factory=dict)

    def open(self, sequence_id: str, now: float) -> None:
        """The source has accepted a sequence. Raises ValueError if it is open already."""
        if sequence_id in self._leases:
            raise ValueError(f"sequence {sequence_id} has a lease already, in epoch {self._leases[sequence_id].epoch}")
        self._leases[sequence_id] = _Lease(sequence_id, renewed_at=now)
        self.counters.opened += 1

    def subscribe(self, sequence_id: str, watcher: str, now: float) -> ChunkNotice | UnknownLease | LeaseTaken | None:
        """Makes `watcher` the one that is told of the sequence; returns all that the current epoch has published.

        None if it has not begun. The same watcher may subscribe again and gets the whole again.
        """
        lease = self._leases.get(sequence_id)
        if lease is None:
            self.counters.subscribers_refused += 1
            return UnknownLease(sequence_id)
        if lease.watcher and lease.watcher != watcher:
            self.counters.subscribers_refused += 1
            return LeaseTaken(sequence_id, lease.watcher)
        lease.watcher = watcher
        lease.renewed_at = max(lease.renewed_at, now)
        return self._notice(lease, first_block=0, now=now) if lease.begun or lease.num_tokens else None

    def begin(self, sequence_id: str, now: float) -> tuple[str, ChunkNotice] | None:
        """The sequence has its blocks, and its computation begins: KV will follow in this epoch.

        Returns the watcher and a notice of what is published, of no token as a rule; None if nobody watches yet, which
        loses nothing, or if there is no lease, as that of a watcher that has just gone.
        """
        lease = self._leases.get(sequence_id)
        if lease is None:
            return None
        lease.begun = True
        return (lease.watcher, self._notice(lease, first_block=0, now=now)) if lease.watcher else None

    def publish(
        self, sequence_id: str, num_tokens: int, block_ids: Sequence[int], final: bool, next_token: int, now: float
    ) -> tuple[str, ChunkNotice] | None:
        """Tokens [0, num_tokens) have KV in `block_ids`, the sequence's whole list so far.

        Returns the watcher and the notice of what is new to it; None if nothing is new or nobody watches yet, which
        loses nothing: a later subscriber gets the whole. Before the final one only whole blocks are told.

            block_ids        | 0 | 1 | 2 | 3 | 4 | 5 |       block 5 is partly filled
            told before      [-------)
            told now                 [-----------)           final: [---------------)

        A sequence without a lease (its watcher has just gone) is counted and ignored. Raises ValueError if the range
        shrinks, grows after the final publish, changes blocks that were told, or is longer than its blocks.
        """
        lease = self._leases.get(sequence_id)
        if lease is None:
            self.counters.publishes_ignored += 1
            return None
        told = lease.block_ids
        told_tokens = num_tokens if final else num_tokens // self.block_size * self.block_size
        num_blocks = -(-told_tokens // self.block_size)
        if lease.final or told_tokens < lease.num_tokens or (final and num_tokens < 1):
            raise ValueError(
                f"sequence {sequence_id} epoch {lease.epoch}: {num_tokens} tokens (final: {final}) published after "
                f"{lease.num_tokens} (final: {lease.final})"
            )
        if num_blocks > len(block_ids) or tuple(block_ids[: len(told)]) != told:
            raise ValueError(
                f"sequence {sequence_id} epoch {lease.epoch}: {told_tokens} tokens need {num_blocks} blocks of "
                f"{self.block_size}, {len(block_ids)} given; {len(told)} were told before and must be their beginning"
            )
        if told_tokens == lease.num_tokens and not final:
            return None
        lease.num_tokens = told_tokens
        lease.block_ids = tuple(block_ids[:num_blocks])
        lease.final = final
        lease.next_token = next_token if final else 0
        if final:
            lease.renewed_at = max(lease.renewed_at, now)
            lease.final_at = now
        return (lease.watcher, self._notice(lease, first_block=len(told), now=now)) if lease.watcher else None

    def revoke(self, sequence_id: str) -> tuple[str, int] | None:
        """The sequence's blocks may be written again: a new epoch begins, with nothing published.

        Returns the watcher to tell and the epoch that is void, None if nobody watches. Unknown sequences are ignored.
        """
        lease = self._leases.get(sequence_id)
        if lease is None:
            return None
        voided = lease.epoch
        self._leases[sequence_id] = _Lease(
            sequence_id, epoch=voided + 1, watcher=lease.watcher, renewed_at=lease.renewed_at
        )
        self.counters.revoked += 1
        return (lease.watcher, voided) if lease.watcher else None

    def valid(self, sequence_id: str, epoch: int) -> bool:
        """Whether what was published in this epoch is still lent."""
        lease = self._leases.get(sequence_id)
        return lease is not None and lease.epoch == epoch

    def acknowledge(self, sequence_id: str, epoch: int) -> bool:
        """The watcher has all it needs: the lease ends. False, counted, if late, repeated, early or of an old epoch."""
        lease = self._leases.get(sequence_id)
        if lease is None or lease.epoch != epoch or not lease.final:
            self.counters.acknowledgements_ignored += 1
            return False
        del self._leases[sequence_id]
        self.counters.acknowledged += 1
        return True

    def close(self, sequence_id: str) -> tuple[str, int] | None:
        """The sequence was aborted: its lease ends. Returns as `revoke` does; no later epoch will come."""
        lease = self._leases.pop(sequence_id, None)
        if lease is None:
            return None
        self.counters.closed += 1
        return (lease.watcher, lease.epoch) if lease.watcher else None

    def drop_watcher(self, watcher: str) -> list[str]:
        """The watcher's stream has ended: all its leases end. Returns their sequences, oldest first."""
        gone = [lease.sequence_id for lease in self._leases.values() if watcher and lease.watcher == watcher]
        for sequence_id in gone:
            del self._leases[sequence_id]
        self.counters.dropped += len(gone)
        return gone

    def renew(self, watcher: str, now: float) -> None:
        """A heartbeat of the watcher: its leases last `lease_s` from now."""
        for lease in self._leases.values():
            if watcher and lease.watcher == watcher:
                lease.renewed_at = max(lease.renewed_at, now)

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Ends the leases whose whole prompt is lent and that nobody renewed for `lease_s`.

        Returns the sequence and the watcher of each, the watcher empty if there was none.

        Without a watcher the time runs from the final publish. A sequence that is still computed does not expire.
        """
        gone = [lease for lease in self._leases.values() if lease.final and self._deadline(lease) <= now]
        for lease in gone:
            del self._leases[lease.sequence_id]
        self.counters.expired += len(gone)
        return [(lease.sequence_id, lease.watcher) for lease in gone]

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to do if nothing else happens."""
        return min((self._deadline(lease) for lease in self._leases.values() if lease.final), default=None)

    def watcher(self, sequence_id: str) -> str:
        """Who watches the sequence; empty if nobody does."""
        lease = self._leases.get(sequence_id)
        return lease.watcher if lease else ""

    @property
    def num_lent(self) -> int:
        """Leases whose whole prompt is published."""
        return sum(lease.final for lease in self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    def check(self) -> None:
        """Raises AssertionError if the table contradicts itself."""
        counts = self.counters
        ended = counts.acknowledged + counts.expired + counts.dropped + counts.closed
        assert counts.opened == ended + len(self._leases), f"{counts} with {len(self._leases)} live leases"
        for sequence_id, lease in self._leases.items():
            assert lease.sequence_id == sequence_id, lease
            assert lease.epoch >= 1, lease
            assert len(lease.block_ids) == -(-lease.num_tokens // self.block_size), lease
            assert lease.final or lease.num_tokens % self.block_size == 0, lease
            assert lease.final or lease.next_token == 0, lease

    def _deadline(self, lease: _Lease) -> float:
        return lease.renewed_at + self.lease_s

    def _notice(self, lease: _Lease, first_block: int, now: float) -> ChunkNotice:
        return ChunkNotice(
            sequence_id=lease.sequence_id,
            epoch=lease.epoch,
            num_tokens=lease.num_tokens,
            first_block=first_block,
            block_ids=lease.block_ids[first_block:],
            final=lease.final,
            next_token=lease.next_token,
            age_s=now - lease.final_at if lease.final else 0.0,
        )
