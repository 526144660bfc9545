"""The source's side of pairs: answers what readers ask for with the blocks of the pool.

Owns: the port that readers connect to and one thread a reader. Refuses to know: leases, pulls, the reader's pool.

    listener:   accept --> a thread of its own
    a reader:   Hello --> refused? --> lane opens --> Request --> refused? --> gather, Sending, send --> next Request

A reader that hangs holds its own thread and slots, for the lane's time limit at most, and nothing else.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

from baton.kvtransfer.address import geometry_digest
from baton.kvtransfer.channel import Channel, ChannelLost, Hello, Refused, Request, Sending, Wake, Welcome
from baton.kvtransfer.connector import ConnectorError, KvPool
from baton.kvtransfer.lane import NUM_SLOTS, SOURCE, Lane, Moving, choose_lane, gpu_of, open_lane
from baton.proto.settings import TransferSettings

_MAX_READERS = 256
_BACKLOG = 128
_NO_ACCEPT_S = 0.1


@dataclass(slots=True, eq=False)
class _Reader:
    channel: Channel
    opening: bool = False


class Sender:
    """Serves the pool from its constructor's end to `close`. `name` is what readers must ask for."""

    def __init__(self, pool: KvPool, name: str, host: str, settings: TransferSettings) -> None:
        self._pool = pool
        self._name = name
        self._settings = settings
        self._lock = threading.Lock()
        self._readers: dict[threading.Thread, _Reader] = {}
        self._closed = False
        self._wake = Wake()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._port = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConnectorError(f"no port can be opened on {host}: {error}") from error
        self._listener = threading.Thread(target=self._listen, name="kv-listen", daemon=True)
        self._listener.start()

    @property
    def port(self) -> int:
        number: int = self._port.getsockname()[1]
        return number

    def close(self, deadline: float) -> None:
        """Hangs up on all readers and waits for their threads until the deadline."""
        with self._lock:
            self._closed = True
            readers = list(self._readers)
            for reader in self._readers.values():
                if not reader.opening:  # one whose lane opens is left to open it first: neither end can break off
                    reader.channel.hang_up()
        self._wake.ring()
        for thread in (self._listener, *readers):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._port, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closed:
            poll.poll()
            if not self._closed:
                self._accept()
        self._port.close()
        self._wake.close()

    def _accept(self) -> None:
        self._port.settimeout(_NO_ACCEPT_S)
        try:
            connection, _ = self._port.accept()
            channel = Channel(connection)
        except OSError:  # gone again, or no file descriptor left: not a reason to stop listening
            time.sleep(_NO_ACCEPT_S)
            return
        with self._lock:
            self._readers = {thread: reader for thread, reader in self._readers.items() if thread.is_alive()}
            if self._closed or len(self._readers) >= _MAX_READERS:
                channel.close()
                return
            reader = _Reader(channel)
            thread = threading.Thread(target=self._serve, args=(reader,), name="kv-send", daemon=True)
            self._readers[thread] = reader
            thread.start()

    def _serve(self, reader: _Reader) -> None:
        channel = reader.channel
        lane: Lane | None = None
        try:
            kind = self._welcome(channel)
            limit_s, interface = self._settings.peer_timeout_s, self._settings.network_device
            self._mark(reader, opening=True)
            channel.send(Welcome(kind))
            lane = open_lane(kind, channel, SOURCE, self._pool, limit_s, interface)
            self._mark(reader, opening=False)
            self._answer(channel, lane)
        except ConnectorError:
            pass  # the reader knows: it was told, or sees the connection end, and reports it
        finally:
            with self._lock:
                channel.close()
            if lane is not None:
                lane.close()

    def _welcome(self, channel: Channel) -> str:
        """Returns the lane on which the reader is to be served."""
        hello = channel.receive(self._settings.peer_timeout_s)
        if not isinstance(hello, Hello):
            raise ChannelLost("no Hello")
        if refusal := self._refusal(hello):
            channel.send(Refused(refusal))
            raise ConnectorError(refusal)
        return choose_lane(gpu_of(self._pool), hello.gpu)

    def _mark(self, reader: _Reader, *, opening: bool) -> None:
        """Raises ConnectorError if the sender is closed."""
        with self._lock:
            if self._closed:
                raise ConnectorError("the connector is closed")
            reader.opening = opening

    def _refusal(self, hello: Hello) -> str:
        geometry = geometry_digest(self._pool.geometry)
        if hello.name != self._name:
            return f"this is {self._name}, not {hello.name}"
        if hello.geometry != geometry:
            return f"geometry {geometry.hex()} at the source, {hello.geometry.hex()} asked for"
        if hello.block_bytes != self._pool.block_bytes or hello.num_blocks != self._pool.num_blocks:
            return (
                f"{self._pool.num_blocks} blocks of {self._pool.block_bytes} bytes at the source, "
                f"{hello.num_blocks} of {hello.block_bytes} asked for"
            )
        return ""

    def _answer(self, channel: Channel, lane: Lane) -> None:
        moving: deque[Moving] = deque()
        number = 0
        while True:
            request = channel.receive(self._settings.peer_timeout_s if moving else None)
            if request is None:  # quiet: what was sent must have been taken by now, or the reader hangs
                lane.wait(moving.popleft())
                continue
            if not isinstance(request, Request) or request.number != number:
                raise ChannelLost(f"{request}, Request {number} expected")
            if refusal := self._unfit(request, lane):
                channel.send(Refused(refusal))
                raise ConnectorError(refusal)
            if len(moving) == NUM_SLOTS:
                lane.wait(moving.popleft())
            slot = lane.slots[number % NUM_SLOTS]
            slot.gather(self._pool, request.blocks)
            channel.send(Sending(number))
            moving.append(lane.send(slot, len(request.blocks)))
            number += 1

    def _unfit(self, request: Request, lane: Lane) -> str:
        most = lane.slots[0].blocks.shape[0]
        if not 1 <= len(request.blocks) <= most:
            return f"{len(request.blocks)} blocks asked for at once, 1 to {most} can be"
        if max(request.blocks) >= self._pool.num_blocks:
            return f"block {max(request.blocks)} of a pool of {self._pool.num_blocks}"
        return ""
