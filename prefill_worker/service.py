"""The gRPC face of lending: `Handoff.Watch`, one stream a decode worker.

Owns: the handshake, heartbeats, and the verdict that a silent watcher is gone. Refuses to know: what a lease is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib
from collections.abc import AsyncIterator

import grpc

from baton.engine.clock import Clock
from baton.engine.desk import first_message
from baton.engine.vital import Failed, vital
from baton.kvtransfer.handshake import Party, mismatch
from baton.prefill_worker.lender import Lender, WatcherLink
from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.context import Context
from baton.proto.messages import KvGeometry
from baton.proto.settings import TransferSettings

log = logging.getLogger(__name__)


class HandoffService(worker_pb2_grpc.HandoffServicer):
    """Serves `Handoff.Watch` over one `Lender`."""

    def __init__(
        self,
        party: Party,
        incarnation: str,
        num_blocks: int,
        address: bytes,
        lender: Lender,
        settings: TransferSettings,
        clock: Clock,
        failed: Failed,
    ) -> None:
        self._hello = wire.LenderHello(
            worker_id=party.worker_id,
            incarnation=incarnation,
            geometry=party.geometry.to_wire(),
            connector=party.connector,
            num_blocks=num_blocks,
            address=address,
            address_crc32=zlib.crc32(address),
            lease_s=settings.lease_s,
        )
        self._party = party
        self._lender = lender
        self._settings = settings
        self._clock = clock
        self._failed = failed
        self._stream_numbers = itertools.count(1)
        self._links: set[WatcherLink] = set()
        self._closed = False

    def close(self) -> None:
        """Ends every stream, after what is queued for it, and opens no more."""
        self._closed = True
        for link in self._links:
            link.outbox.put_nowait(None)

    async def Watch(
        self, requests: AsyncIterator[wire.WatcherMessage], context: Context
    ) -> AsyncIterator[wire.LenderMessage]:
        first = await first_message(requests, context)
        if first is None or first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a watcher must be hello")
            return
        hello = wire.LenderHello()
        hello.CopyFrom(self._hello)
        watcher = Party(first.hello.worker_id, first.hello.connector, KvGeometry.from_wire(first.hello.geometry))
        hello.refused = mismatch(self._party, watcher)
        yield wire.LenderMessage(hello=hello)
        if hello.refused:
            log.error("%s is refused: %s", watcher.worker_id, hello.refused)
            return
        if self._closed:
            return
        name = f"{first.hello.worker_id}/{first.hello.incarnation}/{next(self._stream_numbers)}"
        link = WatcherLink(name, self._clock())
        self._links.add(link)
        self._lender.open_watcher(link)
        reader = asyncio.create_task(self._read(requests, link))
        try:
            while True:
                try:
                    async with asyncio.timeout(self._settings.heartbeat_s):
                        message = await link.outbox.get()
                except TimeoutError:
                    if self._clock() - link.heard_s > self._settings.peer_timeout_s:
                        log.warning("%s was silent for %.1f s", link.name, self._settings.peer_timeout_s)
                        return
                    message = wire.LenderMessage(heartbeat=wire.Heartbeat())
                if message is None:
                    return
                yield message
        finally:
            reader.cancel()
            self._links.discard(link)
            self._lender.close_watcher(link)

    async def _read(self, requests: AsyncIterator[wire.WatcherMessage], link: WatcherLink) -> None:
        try:
            async for message in requests:
                link.heard_s = now = self._clock()
                if now - link.renewed_s > self._settings.heartbeat_s / 2:
                    link.renewed_s = now
                    self._lender.renew(link)
                with vital(self._failed):
                    self._obey(message, link)
        finally:
            link.outbox.put_nowait(None)

    def _obey(self, message: wire.WatcherMessage, link: WatcherLink) -> None:
        match message.WhichOneof("message"):
            case "subscribe":
                self._lender.subscribe(link, message.subscribe.sequence_id)
            case "validate":
                self._lender.validate(link, message.validate)
            case "acknowledge":
                self._lender.acknowledge(message.acknowledge.sequence_id, message.acknowledge.epoch)
            case "heartbeat":
                if message.heartbeat.number:
                    link.outbox.put_nowait(wire.LenderMessage(heartbeat=message.heartbeat))
            case _:
                log.warning("%s sent an unknown message", link.name)
