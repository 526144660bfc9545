"""One stream to one incarnation of one prefill worker: the control side of every hand-off between the two.

Owns: the channel, the handshake, heartbeats both ways, the verdict that the peer is lost.
Refuses to know: what a notice means.

    CONNECTING --hello, accepted--> OPEN --stream ended, silence, refused--> LOST   (the next leg makes a new link)
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from typing import Protocol

import grpc

from baton.engine.vital import Failed, vital
from baton.engine.worker import KEEPALIVE_OPTIONS
from baton.kvtransfer.handshake import Party, mismatch
from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.credentials import PLAIN, ClusterWire
from baton.proto.messages import HandoffSource, KvGeometry
from baton.proto.settings import TransferSettings

log = logging.getLogger(__name__)

# A new link makes a connection of its own: it does not inherit the pauses that an older one's failures have earned.
CHANNEL_OPTIONS = (*KEEPALIVE_OPTIONS, ("grpc.use_local_subchannel_pool", 1))

# Of so many round trips the best is told: the others have waited for an event loop too. The first ones are measured one
# after the other when the peers meet, the later ones by heartbeats.
ROUND_TRIPS = 8
FIRST_ROUND_TRIPS = 4


class PeerListener(Protocol):
    """What a `PeerLink` tells its owner, on the event loop."""

    def opened(self, link: PeerLink) -> None:
        """The peer has answered as the incarnation that was expected."""
        ...

    def noticed(self, link: PeerLink, message: wire.ChunkNotice) -> None: ...

    def validated(self, link: PeerLink, message: wire.Validated) -> None: ...

    def revoked(self, link: PeerLink, message: wire.Revoked) -> None: ...

    def lost(self, link: PeerLink, reason: str) -> None:
        """The link is of no use any more; told exactly once, also when it never opened."""
        ...


class PeerLink:
    """See the module's drawing. Messages posted before the handshake is done are sent after it.

    `failed` hears of an exception that no peer can cause: a bug.
    """

    def __init__(
        self,
        source: HandoffSource,
        hello: wire.WatcherHello,
        geometry: KvGeometry,
        settings: TransferSettings,
        listener: PeerListener,
        failed: Failed,
        wire_to_peers: ClusterWire = PLAIN,
    ) -> None:
        self.worker_id = source.worker_id
        self.incarnation = source.incarnation
        self.grpc_address = source.address
        self.kv_address = b""
        self.num_blocks = 0  # of the peer's pool
        self.refused = False  # the two do not fit: to meet again changes nothing
        self.known = asyncio.Event()  # a round trip was measured, or the link is lost
        self.probed = False
        self._hello = hello
        self._geometry = geometry
        self._settings = settings
        self._listener = listener
        self._failed = failed
        self._wire = wire_to_peers
        self._outbox: asyncio.Queue[wire.WatcherMessage] = asyncio.Queue()
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._number = 0
        self._asked_s = 0.0
        self._closed = False
        self._task = asyncio.create_task(self._run())

    def post(self, message: wire.WatcherMessage) -> None:
        self._outbox.put_nowait(message)

    @property
    def round_trip_s(self) -> float:
        """The best of the last ones; 0 before the first."""
        return min(self._round_trips, default=0.0)

    async def close(self) -> None:
        """Ends the stream; `lost` is not told."""
        self._closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        reason = "an unexpected error"
        with vital(self._failed):
            try:
                async with self._wire.channel(self.grpc_address, CHANNEL_OPTIONS) as channel:
                    stream = worker_pb2_grpc.HandoffStub(channel).Watch(self._outgoing())
                    reason = await self._read(stream)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except TimeoutError:
                reason = f"silent for {self._settings.peer_timeout_s:.1f} s"
            finally:
                if not self._closed:
                    log.warning("hand-off link to %s (%s) lost: %s", self.worker_id, self.incarnation, reason)
                    self._listener.lost(self, reason)

    async def _outgoing(self) -> AsyncIterator[wire.WatcherMessage]:
        yield wire.WatcherMessage(hello=self._hello)
        while True:
            try:
                async with asyncio.timeout(self._settings.heartbeat_s):
                    message = await self._outbox.get()
            except TimeoutError:
                message = self._numbered()
            yield message

    def _numbered(self) -> wire.WatcherMessage:
        """A heartbeat that the peer says back."""
        self._number += 1
        self._asked_s = asyncio.get_running_loop().time()
        return wire.WatcherMessage(heartbeat=wire.Heartbeat(number=self._number))

    def _answered(self, number: int) -> None:
        if number != self._number:
            return
        self._round_trips.append(asyncio.get_running_loop().time() - self._asked_s)
        self.known.set()
        if number < FIRST_ROUND_TRIPS:
            self.post(self._numbered())

    async def _read(self, stream: AsyncIterable[wire.LenderMessage]) -> str:
        """Reads until the peer is lost; returns or raises why."""
        messages = aiter(stream)
        while True:
            async with asyncio.timeout(self._settings.peer_timeout_s):
                message = await anext(messages, None)
            if message is None:
                return "the stream ended"
            match message.WhichOneof("message"):
                case "hello":
                    if refusal := self._refusal(message.hello):
                        return refusal
                    self.kv_address, self.num_blocks = message.hello.address, message.hello.num_blocks
                    self._listener.opened(self)
                    self.post(self._numbered())
                case "notice":
                    self._listener.noticed(self, message.notice)
                case "validated":
                    self._listener.validated(self, message.validated)
                case "revoked":
                    self._listener.revoked(self, message.revoked)
                case "heartbeat":
                    self._answered(message.heartbeat.number)
                case _:
                    log.warning("%s sent an unknown message", self.worker_id)

    def _refusal(self, hello: wire.LenderHello) -> str:
        """Why this peer cannot be read from; empty if it can."""
        if hello.refused:
            self.refused = True
            return f"refused by {self.worker_id}: {hello.refused}"
        if hello.incarnation != self.incarnation:
            return f"incarnation {hello.incarnation} answers where {self.incarnation} was expected"
        if zlib.crc32(hello.address) != hello.address_crc32:
            return "its address arrived damaged"
        lender = Party(self.worker_id, hello.connector, KvGeometry.from_wire(hello.geometry))
        reader = Party(self._hello.worker_id, self._hello.connector, self._geometry)
        difference = mismatch(lender, reader)
        self.refused = bool(difference)
        return difference
