"""What one replica of the router knows of the others, and what it asks of them.

Owns: the list of replicas as the keeper tells it, and the server on which they reach this one.
Refuses to know: how a replica learns of workers (`follower`), what the keeper tells (`keeper`), requests.

    clients --- one port, shared ---> replica 0, the keeper: makes, restarts, scales the workers; roster, routers
                                 '--> replica 1 --Follow--> keeper        '--> replica 2 --Follow--> keeper
    any of them --AbortHere--> each other one;  keeper --DrainHere--> each follower

A router of one replica is alone: it has no such server, and nobody to ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, replica_pb2_grpc
from baton.proto import inference_pb2 as inference
from baton.proto import replica_pb2 as wire
from baton.proto.context import Context
from baton.proto.credentials import PLAIN, ClusterWire

log = logging.getLogger(__name__)

ABORT_S = 2.0
"""A replica that does not answer for so long has nothing to abort, or soon loses it with its clients."""
DRAIN_SLACK_S = 2.0

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_allowed_incoming_connections", 4096),
)


class Replicas:
    """Replica `number` of `count`. Belongs to one event loop."""

    def __init__(self, number: int = 0, count: int = 1, wire_to_others: ClusterWire = PLAIN) -> None:
        self.number = number
        self._wire = wire_to_others
        self.count = count
        self.grpc_address = self.http_address = self.peer_address = ""
        self._others: list[cluster.RouterStatus] = []

    @property
    def is_keeper(self) -> bool:
        return self.number == 0

    @property
    def others(self) -> Sequence[cluster.RouterStatus]:
        """Those that are there, by number, as they were when they last said so."""
        return self._others

    def learn(self, routers: Sequence[cluster.RouterStatus]) -> None:
        """Takes in the present list; this replica may be in it."""
        self._others = sorted(
            (status for status in routers if status.number != self.number), key=lambda status: status.number
        )

    async def abort(self, request_id: str, resumed_tokens: int | None = None) -> bool:
        """Ends a request wherever another replica has it; with `resumed_tokens`, only if it began with fewer of them.

        False if none has it.
        """
        asked = wire.AbortHereRequest(request_id=request_id, resumed_tokens=resumed_tokens)

        async def at(stub: Any) -> int:
            answer: inference.AbortResponse = await stub.AbortHere(asked, timeout=ABORT_S)
            return int(answer.found)

        return await self._sum(at) > 0

    async def drain(self, worker_id: str, timeout_s: float) -> int:
        """Has the others take a worker out of placement; returns how many of their legs had to move."""
        asked = cluster.DrainRequest(worker_id=worker_id, timeout_s=timeout_s)

        async def at(stub: Any) -> int:
            answer: cluster.DrainResponse = await stub.DrainHere(asked, timeout=timeout_s + DRAIN_SLACK_S)
            return answer.moved

        return await self._sum(at)

    async def _sum(self, ask: Callable[[Any], Awaitable[int]]) -> int:
        """The sum of the others' answers. One that is gone has answered nothing."""

        async def one(address: str) -> int:
            try:
                async with self._wire.channel(address, CHANNEL_OPTIONS) as channel:
                    return await ask(replica_pb2_grpc.ReplicaStub(channel))
            except grpc.aio.AioRpcError as error:
                log.warning("the replica at %s did not answer: %s", address, error.code().name)
                return 0

        return sum(await asyncio.gather(*(one(status.peer_address) for status in self._others)))


class ReplicaService(replica_pb2_grpc.ReplicaServicer):
    """What every replica does for the others. Each kind adds its part; what it has no part in is UNIMPLEMENTED."""

    def __init__(self, abort: Callable[[str, int | None], bool]) -> None:
        self._abort = abort

    async def AbortHere(self, request: wire.AbortHereRequest, context: Context) -> inference.AbortResponse:
        resumed = request.resumed_tokens if request.HasField("resumed_tokens") else None
        return inference.AbortResponse(found=self._abort(request.request_id, resumed))


class PeerServer:
    """The server on which the other replicas reach this one; it asks for no key, as workers' do not, but with
    `security.cluster_tls` for a certificate."""

    def __init__(self, service: ReplicaService, changes: cluster_pb2_grpc.ClusterServicer | None = None) -> None:
        """`changes`: the keeper's, to which followers pass operators' wishes on."""
        self._service = service
        self._changes = changes
        self._server: grpc.aio.Server | None = None

    async def open(self, host: str, wire_to_others: ClusterWire = PLAIN) -> str:
        """Starts it on a free port; returns host:port."""
        self._server = server = grpc.aio.server(options=_SERVER_OPTIONS)
        shown = f"[{host}]" if ":" in host else host
        port = wire_to_others.add_port(server, f"{shown}:0")
        replica_pb2_grpc.add_ReplicaServicer_to_server(self._service, server)
        if self._changes is not None:
            cluster_pb2_grpc.add_ClusterServicer_to_server(self._changes, server)
        await server.start()
        return f"{shown}:{port}"

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
