"""The router's two servers: gRPC with its services, health and reflection, and HTTP; from open ports to drained.

Owns: what listens on the ports and what `grpc.health.v1` says. Refuses to know: requests, workers.

    bound, NOT_SERVING -> a request of its own went through: SERVING -> draining: NOT_SERVING -> stopped
"""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from baton.proto import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from baton.proto.credentials import FrontDoor
from baton.proto.settings import TlsSettings
from baton.router.allowance import Allowance
from baton.router.cluster import ClusterService, Workforce
from baton.router.config import RouterSettings
from baton.router.discovery import TargetsFile, reachable
from baton.router.gateway import Gateway
from baton.router.guard import Guard
from baton.router.http.app import create_app
from baton.router.http.metrics_route import metrics_routes
from baton.router.http.server import HttpServer
from baton.router.keys import Keyring, KeysFile
from baton.router.metrics import RouterMetrics
from baton.router.request_log import RequestLog
from baton.router.router import Router
from baton.router.service import InferenceService
from baton.router.tracing import RequestTracer
from baton.telemetry.tracing import FLUSH_S, open_sink

log = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name


# Who connects and does not go on to a call is hung up on, as is who has none for long; gRPC's own clients come back.
HANDSHAKE_MS = 10_000
IDLE_MS = 600_000
# Beyond these a connection waits, or is closed: they bound what strangers can make the router keep.
MAX_STREAMS_A_CONNECTION = 1024
MAX_CONNECTIONS = 4096


class PortTaken(Exception):
    """One of the router's ports cannot be bound."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where clients reach a router: host:port of each face. `own_*`: where they reach this replica and no other."""

    grpc: str
    http: str
    own_grpc: str = ""
    own_http: str = ""


class RouterServer:
    """Serves one `Router` on its configured ports."""

    def __init__(self, router: Router, workforce: Workforce) -> None:
        self._router = router
        self._workforce = workforce
        self.gateway = Gateway(router)
        observability = router.config.observability
        self._spans = open_sink(observability, "baton-router", router.incarnation)
        self._metrics = RouterMetrics(router, workforce)
        router.observers.add(self._metrics)
        router.observers.add(RequestLog())
        if self._spans is not None:
            router.observers.add(RequestTracer(self._spans, router.model_name, observability.trace_ratio))
        self._health = HealthServicer()
        self._keys: Keyring | None = None
        self._front = FrontDoor(TlsSettings())
        self._allowance = Allowance(router.config.router.max_requests_at_once, router.config.router.max_requests_per_s)
        self._targets_file: TargetsFile | None = None
        self._server: grpc.aio.Server | None = None
        self._http: HttpServer | None = None

    async def open(self, settings: RouterSettings, patience_s: float = 0.0) -> Addresses:
        """Binds and starts both; returns their addresses.

        Raises PortTaken if a port stays taken for `patience_s`, KeysError or CredentialsError for a file that cannot be
        used.
        """
        self._keys = KeysFile(Path(settings.api_keys_file)) if settings.api_keys_file else None
        self._front = FrontDoor(self._router.config.security.tls)
        grpc_addresses = await self._open_grpc(settings, patience_s)
        try:
            app = create_app(self._router, self.gateway, self._workforce, self._allowance, self._keys)
            app.include_router(metrics_routes(self._metrics))
            self._http = HttpServer(app, self._front.context(), settings.max_header_kib << 10)
            http_addresses = await self._http.open(
                settings.host, settings.http_port, patience_s, shared=settings.replicas > 1
            )
        except OSError as error:
            await self.close()
            raise PortTaken(f"{settings.host}:{settings.http_port} cannot be bound: {error.strerror}") from error
        file = self._router.config.observability.targets_file
        if file and self._router.replicas.is_keeper:
            targets = partial(self._metrics.targets, reachable(http_addresses[-1]))
            self._targets_file = TargetsFile(Path(file), targets, self._front.context() is not None)
            self._targets_file.open()
        return Addresses(grpc_addresses[0], http_addresses[0], grpc_addresses[-1], http_addresses[-1])

    async def _open_grpc(self, settings: RouterSettings, patience_s: float) -> list[str]:
        deadline = asyncio.get_running_loop().time() + patience_s
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        interceptors = (Guard(self._keys, self._allowance),)
        while True:
            server = grpc.aio.server(
                interceptors=interceptors,
                options=(
                    ("grpc.so_reuseport", int(settings.replicas > 1)),
                    ("grpc.max_receive_message_length", settings.max_message_mib << 20),
                    ("grpc.max_send_message_length", settings.max_message_mib << 20),
                    ("grpc.max_metadata_size", settings.max_header_kib << 10),
                    ("grpc.absolute_max_metadata_size", settings.max_header_kib << 10),
                    ("grpc.max_concurrent_streams", MAX_STREAMS_A_CONNECTION),
                    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
                    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                    ("grpc.max_connection_idle_ms", IDLE_MS),
                    ("grpc.keepalive_time_ms", 10_000),
                    ("grpc.keepalive_timeout_ms", 5_000),
                    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
                    ("grpc.http2.max_ping_strikes", 0),
                    ("grpc.keepalive_permit_without_calls", 1),
                ),
            )
            try:
                ports = [self._front.add_port(server, f"{host}:{settings.port}")]
                if settings.replicas > 1:
                    ports.append(self._front.add_port(server, f"{host}:0"))
                break
            except RuntimeError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise PortTaken(f"{host}:{settings.port} cannot be bound: is another process using it?") from error
                await asyncio.sleep(0.1)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(self.gateway, self._keys), server)
        cluster_pb2_grpc.add_ClusterServicer_to_server(ClusterService(self._router, self._workforce), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (INFERENCE, CLUSTER, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()
        self._server = server
        return [f"{host}:{port}" for port in ports]

    async def mark_ready(self) -> None:
        """A request has gone through: health says SERVING from now on, unless draining has begun."""
        # What the start has made stays: a collection that walks through it holds every stream up for 0.1 s.
        gc.collect()
        gc.freeze()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, timeout_s: float) -> bool:
        """Says NOT_SERVING for good and refuses new requests; returns whether those in progress ended in time."""
        await self._health.enter_graceful_shutdown()
        return await self._router.drain(timeout_s)

    async def close(self, grace_s: float = 0.5) -> None:
        self._router.closing.set()
        if self._targets_file is not None:
            await self._targets_file.close()
        if self._http is not None:
            await self._http.close(grace_s)
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close, FLUSH_S)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", INFERENCE, CLUSTER):
            await self._health.set(name, status)
