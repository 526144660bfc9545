"""A fake router, the wire to it, and a client's patience that is short enough for a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from fake_router import FakeRouter, Wire

from baton.client.resume import Patience
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc

DEADLINE_S = 20.0


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    fake = FakeRouter()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(fake, server)
    fake.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(DEADLINE_S):
        yield fake
    await server.stop(0)


@pytest.fixture
async def wire(router: FakeRouter) -> AsyncIterator[Wire]:
    wire = Wire(router.port)
    await wire.mend()
    yield wire
    await wire.cut()


@pytest.fixture
def patience() -> Patience:
    return Patience(give_up_s=5.0, first_delay_s=0.01, longest_delay_s=0.05)
