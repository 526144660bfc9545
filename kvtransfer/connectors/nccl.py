"""Reads KV blocks from peers' pools by messages of torch.distributed: NCCL between two GPUs, gloo otherwise.

Owns: the peers that are read from, a thread for each, and the reads that each has under way. Refuses to know: sequences
and leases; how a peer answers is in `sender`, how bytes move in `lane`.

    caller:      pull --> [the peer's reads] ------------------------------------------------> poll
    its thread:           connect, open a lane --> ask for as many pieces as there are slots --> received in a slot
                                                                                                     |
                          FAILED, SETTLED at once <-- peer lost, silent, forgotten         scattered, checksum: FINISHED

Bytes reach a pool only by this process's own copy out of a slot, so a pull that has failed settles as soon as no such
copy is under way, whatever the peer and the wire still do. `poll` looks for silent peers: no thread that hangs in a
library delays what it tells. A peer that was lost is connected anew by the next pull.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

from baton.kvtransfer.address import PoolAddress
from baton.kvtransfer.channel import Channel, ChannelLost, Hello, Refused, Request, Sending, Wake, Welcome
from baton.kvtransfer.connector import (
    AddressRefused,
    ConnectorError,
    KvPool,
    Pull,
    PullEvent,
    TransportUnavailable,
)
from baton.kvtransfer.exports import Exports, verify_checksum
from baton.kvtransfer.lane import READER, Lane, Moving, Slot, gpu_of, open_lane, opening_s, require_gloo
from baton.kvtransfer.layout import coalesce
from baton.kvtransfer.outcomes import Outcomes
from baton.kvtransfer.sender import Sender
from baton.proto.settings import TransferSettings

_MAX_THREADS = 256
_CONNECT_WAIT_S = 3.0
_CLOSE_WAIT_S = 5.0
_PORT = struct.Struct("<H")
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # reserved for documentation


class NcclConnector:
    """See `Connector`. Raises TransportUnavailable if it cannot run here."""

    def __init__(self, settings: TransferSettings) -> None:
        require_gloo()
        self._settings = settings
        self._host = _host_of(settings.network_device)
        self._name = f"kv-{uuid.uuid4().hex}"
        self._exports = Exports(settings.checksums)
        self._outcomes = Outcomes()
        self._pool: KvPool | None = None
        self._sender: Sender | None = None
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._ending: list[_Peer] = []
        self._closed = False

    @property
    def name(self) -> str:
        return "nccl"

    def attach(self, pool: KvPool) -> bytes:
        if self._pool is not None or self._closed:
            raise ConnectorError("a connector is attached to one pool, once")
        self._sender = Sender(pool, self._name, self._host, self._settings)
        self._pool = pool
        metadata = _PORT.pack(self._sender.port) + self._host.encode()
        return PoolAddress.of(pool, self.name, self._name, metadata).encode()

    def export(self, export_id: str, block_ids: tuple[int, ...]) -> int:
        if self._pool is None:
            raise ConnectorError("no pool is attached")
        return self._exports.add(self._pool, export_id, block_ids)

    def pull(self, pull: Pull) -> None:
        self._outcomes.opened(pull.pull_id)
        try:
            with self._lock:
                self._begin(pull)
        except (ConnectorError, ValueError) as error:
            self._outcomes.failed(pull.pull_id, f"peer {pull.peer}: {error}", quiet=True)

    def poll(self) -> list[PullEvent]:
        now = time.monotonic()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.give_up_if_gone(now)
        return self._outcomes.drain()

    def transport(self, peer: str) -> str:
        with self._lock:
            known = self._peers.get(peer)
        return f"nccl, {known.lane}" if known is not None and known.lane else ""

    def forget(self, peer: str) -> None:
        with self._lock:
            if known := self._peers.pop(peer, None):
                self._end(known, "given up")

    def release(self, export_id: str) -> None:
        self._exports.release(export_id)

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSE_WAIT_S
        with self._lock:
            self._closed = True
            while self._peers:
                self._end(self._peers.popitem()[1], "the connector is closed")
            ending = list(self._ending)
        if self._sender is not None:
            self._sender.close(deadline)
        for peer in ending:
            peer.join(deadline)

    def _begin(self, pull: Pull) -> None:
        if self._closed:
            raise ConnectorError("the connector is closed")
        if self._pool is None:
            raise ConnectorError("no pool is attached")
        place = PoolAddress.decode(pull.address)
        if not place.require_match(self._pool, self.name, pull.heads).is_whole:
            raise ConnectorError(
                "this connector reads whole blocks: pools of unequal tensor_parallel need nixl or local"
            )
        place.require_blocks(pull.source_blocks)
        self._pool.require_blocks(pull.destination_blocks)
        read = _Read.of(pull)
        peer = self._peers.get(pull.peer)
        if peer is not None and not peer.lost and peer.address != pull.address:
            raise ConnectorError("another address than before: an incarnation has one")
        if not read.destination:
            self._outcomes.finished(pull.pull_id, 0)
        elif peer is None or not peer.begin(read):
            self._meet(place, read)

    def _meet(self, place: PoolAddress, read: _Read) -> None:
        """Begins the read with a new peer, in place of a lost one if there is one."""
        assert self._pool is not None
        for name in [name for name, peer in self._peers.items() if peer.lost]:
            self._end(self._peers.pop(name), "")
        self._ending = [peer for peer in self._ending if peer.alive]
        if len(self._ending) + len(self._peers) >= _MAX_THREADS:
            raise ConnectorError(f"{len(self._peers)} connections are open and {len(self._ending)} still end")
        self._peers[read.pull.peer] = _Peer(place, read, self._pool, self._outcomes, self._settings)

    def _end(self, peer: _Peer, reason: str) -> None:
        peer.give_up(reason)
        self._ending.append(peer)


@dataclass(slots=True, eq=False)
class _Read:
    """A pull on its way, blocks in ascending order of destination. Their first `num_asked` are under way or there."""

    pull: Pull
    source: list[int]
    destination: list[int]
    num_asked: int = 0
    num_landed: int = 0
    failed: bool = False

    @classmethod
    def of(cls, pull: Pull) -> _Read:
        """Raises ValueError if the two lists of blocks do not fit."""
        runs = coalesce(pull.source_blocks, pull.destination_blocks)
        source = [block for run in runs for block in range(run.source, run.source + run.length)]
        destination = [block for run in runs for block in range(run.destination, run.destination + run.length)]
        return cls(pull, source, destination)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks that one message carries, and the slot that it arrives in."""

    number: int
    read: _Read
    source: list[int]
    destination: list[int]
    slot: Slot


@dataclass(slots=True)
class _Arrival:
    piece: _Piece
    moving: Moving | None


class _Peer:
    """One peer and the thread that reads from it, from its first read until it is lost.

    What other threads see is under the lock, which is never held while something is copied or waited for.
    """

    def __init__(
        self, place: PoolAddress, first: _Read, pool: KvPool, outcomes: Outcomes, settings: TransferSettings
    ) -> None:
        self.address = first.pull.address
        self.lane = ""  # its kind, once that is agreed
        self._name = first.pull.peer
        self._place = place
        self._host, self._port = _decode_metadata(place.metadata)
        self._pool = pool
        self._outcomes = outcomes
        self._settings = settings
        self._lock = threading.Lock()
        self._lost = ""
        self._reads = deque([first])
        self._writing: _Read | None = None
        self._channel: Channel | None = None
        self._opening = False
        self._limit_s = settings.peer_timeout_s
        self._progressed_at = time.monotonic()
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name="kv-read", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str:
        """Why the peer was given up; empty while it is not."""
        return self._lost

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def begin(self, read: _Read) -> bool:
        """Takes a read in. False if the peer is lost."""
        with self._lock:
            if self._lost:
                return False
            if not self._reads:
                self._progressed_at = time.monotonic()
            self._reads.append(read)
        self._wake.ring()
        return True

    def give_up_if_gone(self, now: float) -> None:
        """Gives the peer up if it keeps a read waiting, or has hung up while a library holds the thread."""
        if self._reads and now - self._progressed_at > self._limit_s:
            self.give_up(f"silent for {now - self._progressed_at:.1f} s")
        if self._opening:
            with self._lock:
                gone = self._channel is not None and self._channel.hung_up
            if gone:
                self.give_up("lost: it has hung up while the lane opened")

    def give_up(self, reason: str) -> None:
        """Fails every read, and ends the thread as soon as no library holds it. Only the first reason counts.

        A lane that opens is left to open first: its other end would wait for this one, in a call that nothing ends.
        """
        with self._lock:
            if self._lost:
                return
            self._lost = reason or "given up"
            for read in self._reads:
                read.failed = True
                self._fail(read, self._lost, quiet=read is not self._writing)
            self._reads.clear()
            if self._channel is not None and not self._opening:
                self._channel.hang_up()
            self._wake.ring()

    def _run(self) -> None:
        lane: Lane | None = None
        try:
            channel = self._connect()
            lane = self._open(channel)
            self._read(channel, lane)
        except ConnectorError as error:
            self.give_up(f"lost: {error}")
        finally:
            self.give_up("lost: its thread has ended by a bug")  # if nothing else has been said before
            with self._lock:
                if self._channel is not None:
                    self._channel.close()
                self._channel = None
                self._wake.close()
            if lane is not None:
                lane.close()

    def _connect(self) -> Channel:
        channel = Channel.connect(self._host, self._port, min(_CONNECT_WAIT_S, self._settings.peer_timeout_s))
        with self._lock:
            self._channel = channel
            if self._lost:
                raise ConnectorError(self._lost)
        return channel

    def _open(self, channel: Channel) -> Lane:
        place, limit_s = self._place, self._settings.peer_timeout_s
        channel.send(Hello(place.name, place.geometry, place.block_bytes, place.num_blocks, gpu_of(self._pool)))
        answer = channel.receive(limit_s)
        if isinstance(answer, Refused):
            raise ConnectorError(f"refused: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ChannelLost(f"{answer} to Hello")
        self.lane = answer.lane
        self._progressed(opening_s(answer.lane, limit_s), opening=True)
        lane = open_lane(answer.lane, channel, READER, self._pool, limit_s, self._settings.network_device)
        try:
            self._progressed(limit_s, opening=False)
        except ConnectorError:
            lane.close()
            raise
        return lane

    def _read(self, channel: Channel, lane: Lane) -> None:
        """Returns never: ends by the ConnectorError that says how."""
        asked: deque[_Arrival] = deque()
        coming: deque[_Arrival] = deque()
        pieces = self._pieces(lane)
        while True:
            while len(asked) + len(coming) < len(lane.slots) and (piece := next(pieces)) is not None:
                moving = lane.receive(piece.slot, len(piece.source)) if lane.receives_ahead else None
                asked.append(_Arrival(piece, moving))
                channel.send(Request(piece.number, tuple(piece.source)))
            message = channel.receive(0.0 if coming else None, self._wake)
            if isinstance(message, Refused):
                raise ConnectorError(f"refused: {message.reason}")
            if isinstance(message, Sending) and asked and message.number == asked[0].piece.number:
                coming.append(asked.popleft())
                if not lane.receives_ahead:
                    piece = coming[-1].piece
                    coming[-1].moving = lane.receive(piece.slot, len(piece.source))
            elif message is not None:
                raise ChannelLost(f"{message} while {len(asked)} pieces are asked for")
            elif coming:
                arrival = coming.popleft()
                assert arrival.moving is not None
                lane.wait(arrival.moving)  # only now: until the peer sends, nothing but the channel can end a wait
                self._land(arrival.piece)

    def _pieces(self, lane: Lane) -> Iterator[_Piece | None]:
        """The pieces to ask for, in order; None when there is none for now. Slots are used and are free in turn."""
        number = 0
        most = lane.slots[0].blocks.shape[0]
        while True:
            with self._lock:
                read = next((read for read in self._reads if read.num_asked < len(read.source)), None)
                first = read.num_asked if read else 0
                if read:
                    read.num_asked = min(first + most, len(read.source))
            if read is None:
                yield None
                continue
            part = slice(first, read.num_asked)
            yield _Piece(number, read, read.source[part], read.destination[part], lane.slots[number % len(lane.slots)])
            number += 1

    def _land(self, piece: _Piece) -> None:
        """Copies what has arrived into the pool, unless it has been given up."""
        read = piece.read
        with self._lock:
            self._require_kept()
            self._writing = read
        try:
            piece.slot.scatter(self._pool, piece.destination)
        finally:
            with self._lock:
                self._writing = None
                if read.failed:
                    self._fail(read, "", quiet=True)
        with self._lock:
            self._require_kept()
            self._progressed_at = time.monotonic()
            read.num_landed += len(piece.destination)
            if read.num_landed < len(read.destination):
                return
        reason = ""
        checksums: tuple[int, ...] = ()
        try:
            checksums = verify_checksum(self._pool, read.pull)
        except ConnectorError as error:
            reason = str(error)
        with self._lock:
            self._require_kept()
            self._reads.remove(read)
            if reason:
                self._fail(read, reason, quiet=True)
            else:
                num_bytes = len(read.destination) * self._pool.block_bytes
                self._outcomes.finished(read.pull.pull_id, num_bytes, checksums)

    def _require_kept(self) -> None:
        if self._lost:
            raise ConnectorError(self._lost)

    def _progressed(self, limit_s: float, *, opening: bool) -> None:
        with self._lock:
            self._require_kept()
            self._progressed_at = time.monotonic()
            self._limit_s = limit_s
            self._opening = opening

    def _fail(self, read: _Read, reason: str, *, quiet: bool) -> None:
        self._outcomes.failed(read.pull.pull_id, f"peer {self._name}: {reason}", quiet=quiet)


def _decode_metadata(metadata: bytes) -> tuple[str, int]:
    """Raises AddressRefused. Only numbers are connected to: a look-up of a name has no deadline."""
    try:
        (port,) = _PORT.unpack_from(metadata)
        host = str(ipaddress.ip_address(metadata[_PORT.size :].decode("ascii")))
    except (struct.error, ValueError) as error:
        raise AddressRefused(f"its {len(metadata)} bytes of metadata are no port and host: {error}") from error
    return host, port


def _host_of(interface: str) -> str:
    """The address that peers are told: the interface's, or the one from which this machine reaches others."""
    if interface:
        found = {
            entry.family: entry.address
            for entry in reversed(psutil.net_if_addrs().get(interface, []))
            if "%" not in entry.address  # valid on one link only
        }
        if host := found.get(socket.AF_INET) or found.get(socket.AF_INET6):
            return host
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise TransportUnavailable(f"network_device {interface!r} is no interface with an address; there are: {known}")
    for family, anywhere in _ELSEWHERE.items():
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"
