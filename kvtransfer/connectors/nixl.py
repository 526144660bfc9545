"""Reads KV blocks from peers' pools by NIXL, on a thread of its own.

Owns: the IO thread, the only one that touches the agent, and the peers and reads that it keeps.
Refuses to know: sequences and leases; what NIXL itself does and costs is in `nixl_agent`.

    caller:     pull --> [queue] -------------------------------------------------------> poll
    IO thread:           refused? --> FAILED, SETTLED
                         cut into posts of at most 16 MiB --> posted --> all done, checksum --> FINISHED, SETTLED
                                                                 |
                         peer lost, silent or forgotten: FAILED; its posts are polled to their end, then SETTLED

A post cannot be taken back, so a failed pull stays unsettled while one of its posts is under way, and a peer is
unlinked only when none of its posts is. A stopped peer can hold pulls unsettled until it goes on or dies.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from baton.kvtransfer.address import PoolAddress
from baton.kvtransfer.connector import ConnectorError, KvPool, Pull, PullEvent
from baton.kvtransfer.exports import Exports, verify_checksum
from baton.kvtransfer.layout import HeadCut, ascending
from baton.kvtransfer.nixl_agent import Indices, Link, NixlAgent
from baton.kvtransfer.outcomes import Outcomes
from baton.proto.settings import TransferSettings

_POST_BYTES = (
    16 << 20
)  # a post on one host copies within the call: a few milliseconds each, then commands are looked at
_POSTS_PER_PEER = 4
_POLL_S = 0.0003
_SLOW_POLL_S = 0.005
_SLOW_AFTER_S = 0.1
_IDLE_S = 1.0
_START_WAIT_S = 30.0
_CLOSE_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Attach:
    pool: KvPool
    address: Future[bytes]


@dataclass(frozen=True, slots=True)
class _Forget:
    peer: str


@dataclass(frozen=True, slots=True)
class _Close:
    pass


class NixlConnector:
    """See `Connector`. Raises TransportUnavailable if NIXL cannot run here."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._exports = Exports(settings.checksums)
        self._outcomes = Outcomes()
        self._commands: queue.SimpleQueue[Pull | _Attach | _Forget | _Close] = queue.SimpleQueue()
        self._pool: KvPool | None = None
        self._closed = False
        started: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kv-nixl", daemon=True)
        self._thread.start()
        self._means = started.result(_START_WAIT_S)

    @property
    def name(self) -> str:
        return "nixl"

    def attach(self, pool: KvPool) -> bytes:
        if self._pool is not None or self._closed:
            raise ConnectorError("a connector is attached to one pool, once")
        address: Future[bytes] = Future()
        self._commands.put(_Attach(pool, address))
        encoded = address.result(_START_WAIT_S)
        self._pool = pool
        return encoded

    def export(self, export_id: str, block_ids: tuple[int, ...]) -> int:
        if self._pool is None:
            raise ConnectorError("no pool is attached")
        return self._exports.add(self._pool, export_id, block_ids)

    def pull(self, pull: Pull) -> None:
        self._outcomes.opened(pull.pull_id)
        if self._closed:
            self._outcomes.failed(pull.pull_id, "the connector is closed", quiet=True)
        else:
            self._commands.put(pull)

    def poll(self) -> list[PullEvent]:
        """Raises ConnectorError if the IO thread has ended by a bug: nothing would ever be told again."""
        events = self._outcomes.drain()
        if not events and not self._closed and not self._thread.is_alive():
            raise ConnectorError(f"the IO thread has ended with {self._outcomes.num_open} pulls open")
        return events

    def transport(self, peer: str) -> str:
        return f"nixl, {self._means}"

    def forget(self, peer: str) -> None:
        self._commands.put(_Forget(peer))

    def release(self, export_id: str) -> None:
        self._exports.release(export_id)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._commands.put(_Close())
        self._thread.join(2 * _CLOSE_WAIT_S)

    def _run(self, started: Future[str]) -> None:
        try:
            agent = NixlAgent(f"kv-{uuid.uuid4().hex}", self._settings)
        except ConnectorError as error:
            started.set_exception(error)
            return
        started.set_result(agent.means)
        reads = _Reads(agent, self._outcomes, self._settings.peer_timeout_s)
        wait_s = 0.0
        while True:
            command = self._next_command(wait_s)
            if isinstance(command, _Close):
                break
            if command is not None:
                _obey(command, reads)
            wait_s = reads.advance(time.monotonic())
        reads.close(time.monotonic() + _CLOSE_WAIT_S)

    def _next_command(self, wait_s: float) -> Pull | _Attach | _Forget | _Close | None:
        try:
            return self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
        except queue.Empty:
            return None


def _obey(command: Pull | _Attach | _Forget, reads: _Reads) -> None:
    match command:
        case Pull():
            reads.begin(command, time.monotonic())
        case _Forget(peer):
            reads.forget(peer)
        case _Attach(pool, address):
            try:
                address.set_result(reads.attach(pool))
            except ConnectorError as error:
                address.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one post reads: blocks, or equal parts of blocks, of so many bytes each."""

    source: Indices
    destination: Indices
    piece_bytes: int


@dataclass(slots=True, eq=False)
class _Read:
    """A pull on its way: pieces not yet posted, and the number of posts under way."""

    pull: Pull
    pieces: deque[_Piece]
    num_bytes: int
    num_posts: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Post:
    handle: int
    read: _Read


@dataclass(slots=True)
class _Peer:
    """A linked peer. `lost` is why it was given up; it is then unlinked as soon as no post is under way."""

    incarnation: str
    address: bytes
    place: PoolAddress
    link: Link
    progressed_at: float
    reads: list[_Read] = field(default_factory=list)
    posts: list[_Post] = field(default_factory=list)
    cuts: dict[range | None, HeadCut] = field(default_factory=dict)
    lost: str = ""


class _Reads:
    """Peers and reads, stepped by the IO thread: `begin`, `forget`, `advance`, and `close` at the end."""

    def __init__(self, agent: NixlAgent, outcomes: Outcomes, peer_timeout_s: float) -> None:
        self._agent = agent
        self._outcomes = outcomes
        self._peer_timeout_s = peer_timeout_s
        self._pool: KvPool | None = None
        self._peers: dict[str, _Peer] = {}

    def attach(self, pool: KvPool) -> bytes:
        address = self._agent.register(pool).encode()
        self._pool = pool
        return address

    def begin(self, pull: Pull, now: float) -> None:
        """Takes a pull in, or fails it at once."""
        try:
            peer = self._peer_of(pull, now)
            pieces = self._cut(pull, peer)
        except (ConnectorError, ValueError) as error:
            self._fail(pull, str(error), quiet=True)
            return
        if not peer.posts:
            peer.progressed_at = now
        num_bytes = sum(len(piece.destination) * piece.piece_bytes for piece in pieces)
        read = _Read(pull, pieces, num_bytes)
        peer.reads.append(read)
        self._end_if_over(peer, read)

    def forget(self, peer_name: str) -> None:
        if peer := self._peers.get(peer_name):
            self._give_up(peer, "given up")

    def advance(self, now: float) -> float:
        """Looks at every post, then posts at most one piece a peer; returns how long to wait before the next time."""
        moved = False
        for peer in list(self._peers.values()):
            moved |= self._look(peer, now)
            if peer.lost:
                self._unlink_if_quiet(peer)
            elif self._silent_s(peer, now) > self._peer_timeout_s:
                self._fail_reads(peer, f"silent for {self._silent_s(peer, now):.1f} s")
            else:
                moved |= self._post_one(peer, now)
        if moved:
            return 0.0
        busy = [peer for peer in self._peers.values() if peer.posts]
        if not busy:
            return _IDLE_S
        return _POLL_S if min(now - peer.progressed_at for peer in busy) < _SLOW_AFTER_S else _SLOW_POLL_S

    def close(self, deadline: float) -> None:
        """Fails what is open, waits until it is quiet or the deadline has passed, then ends the agent: all is quiet."""
        for peer in self._peers.values():
            self._give_up(peer, "the connector is closed")
        while any(peer.posts for peer in self._peers.values()) and time.monotonic() < deadline:
            time.sleep(self.advance(time.monotonic()))
        handles = [post.handle for peer in self._peers.values() for post in peer.posts]
        self._agent.shutdown([peer.link for peer in self._peers.values()], handles)
        for peer in self._peers.values():
            for read in peer.reads:
                self._fail(read.pull, peer.lost, quiet=True)

    def _peer_of(self, pull: Pull, now: float) -> _Peer:
        if self._pool is None:
            raise ConnectorError("no pool is attached")
        peer = self._peers.get(pull.peer)
        if peer is None:
            place = PoolAddress.decode(pull.address)
            place.require_match(self._pool, "nixl", pull.heads)
            if others := [other.incarnation for other in self._peers.values() if other.place.name == place.name]:
                raise ConnectorError(f"its address is that of peer {others[0]}")
            peer = _Peer(pull.peer, pull.address, place, self._agent.link(place), now)
            self._peers[pull.peer] = peer
        if peer.address != pull.address:
            raise ConnectorError("another address than before: an incarnation has one")
        if peer.lost:
            raise ConnectorError(peer.lost)
        if self._silent_s(peer, now) > self._peer_timeout_s:
            raise ConnectorError(f"silent for {self._silent_s(peer, now):.1f} s")
        return peer

    def _cut(self, pull: Pull, peer: _Peer) -> deque[_Piece]:
        """The pull as pieces in ascending order of destination, so that consecutive blocks become one descriptor."""
        pool = self._pool
        assert pool is not None
        cut = peer.cuts.get(pull.heads)
        if cut is None:
            cut = peer.cuts[pull.heads] = peer.place.require_match(pool, "nixl", pull.heads)
        peer.place.require_blocks(pull.source_blocks)
        pool.require_blocks(pull.destination_blocks)
        source, destination = ascending(pull.source_blocks, pull.destination_blocks)
        piece_bytes = pool.block_bytes
        if not cut.is_whole:
            num_layers = pool.geometry.num_layers
            source = cut.source_pieces(source, num_layers)
            destination = cut.destination_pieces(destination, num_layers)
            piece_bytes = pool.block_bytes // num_layers * cut.unit // cut.destination_heads
        if not len(source):
            return deque()
        count = min(-(-len(source) * piece_bytes // _POST_BYTES), len(source))
        sources, destinations = (np.array_split(each.astype(np.int32), count) for each in (source, destination))
        return deque(_Piece(*both, piece_bytes) for both in zip(sources, destinations, strict=True))

    def _look(self, peer: _Peer, now: float) -> bool:
        """Takes out the posts that have ended; says whether any has."""
        under_way: list[_Post] = []
        ended: list[_Read] = []
        for post in peer.posts:
            try:
                over = self._agent.finished(post.handle, peer.link)
            except ConnectorError as error:
                over = True
                peer.lost = peer.lost or f"lost: {error}"
            if over:
                post.read.num_posts -= 1
                ended.append(post.read)
            else:
                under_way.append(post)
        peer.posts = under_way
        if ended:
            peer.progressed_at = now
        if peer.lost:
            self._give_up(peer, peer.lost)
        for read in ended:
            self._end_if_over(peer, read)
        return bool(ended)

    def _post_one(self, peer: _Peer, now: float) -> bool:
        read = next((read for read in peer.reads if read.pieces), None)
        if read is None or len(peer.posts) >= _POSTS_PER_PEER:
            return False
        if not peer.posts:
            peer.progressed_at = now
        piece = read.pieces.popleft()
        try:
            handle = self._agent.read(peer.link, piece.source, piece.destination, piece.piece_bytes)
        except ConnectorError as error:
            self._give_up(peer, f"lost: {error}")
            return True
        if handle is not None:
            read.num_posts += 1
            peer.posts.append(_Post(handle, read))
        self._end_if_over(peer, read)
        return True

    def _end_if_over(self, peer: _Peer, read: _Read) -> None:
        if read.pieces or read.num_posts or read not in peer.reads:
            return
        assert self._pool is not None
        peer.reads.remove(read)
        if read.failed:
            self._fail(read.pull, "", quiet=True)
            return
        try:
            checksums = verify_checksum(self._pool, read.pull)
        except ConnectorError as error:
            self._fail(read.pull, str(error), quiet=True)
        else:
            self._outcomes.finished(read.pull.pull_id, read.num_bytes, checksums)

    def _give_up(self, peer: _Peer, reason: str) -> None:
        peer.lost = peer.lost or reason
        self._fail_reads(peer, peer.lost)

    def _fail_reads(self, peer: _Peer, reason: str) -> None:
        """Fails every read of the peer; those without a post under way settle."""
        for read in list(peer.reads):
            read.pieces.clear()
            if not read.failed:
                read.failed = True
                self._fail(read.pull, reason, quiet=False)
            self._end_if_over(peer, read)

    def _fail(self, pull: Pull, reason: str, *, quiet: bool) -> None:
        self._outcomes.failed(pull.pull_id, f"peer {pull.peer}: {reason}", quiet=quiet)

    def _unlink_if_quiet(self, peer: _Peer) -> None:
        if not peer.posts:
            self._agent.unlink(peer.link)
            del self._peers[peer.incarnation]

    def _silent_s(self, peer: _Peer, now: float) -> float:
        return now - peer.progressed_at if peer.posts else 0.0
