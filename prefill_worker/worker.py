"""A prefill worker: computes prompts, samples the first token, lends the KV until a decode worker has it.

Owns: the wiring of scheduler, runner, connector and lender. Refuses to know: routers' policies, decode workers' memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from baton.engine.metrics import WorkerMetrics
from baton.engine.vital import Failed, vital
from baton.engine.worker import ModelRunner, WorkerCore, new_incarnation
from baton.kvtransfer.connector import KvPool
from baton.kvtransfer.sharded import open_sharded
from baton.prefill_worker.lender import Lender
from baton.prefill_worker.service import HandoffService
from baton.proto import worker_pb2_grpc
from baton.proto.messages import FailureKind, LegFailure, WorkerDescription
from baton.proto.settings import WorkerSettings


class PrefillWorker:
    """Complete when the constructor returns; `start` opens its port.

    `failed` is told of a bug, in the step loop or beside it, after which the worker must not go on.

    `lines` lead to the connectors of the worker's other ranks, if it has any.

    Raises ConnectorError from the constructor if the transport is not there.
    """

    def __init__(
        self, settings: WorkerSettings, runner: ModelRunner, failed: Failed, lines: Sequence[Connection] = ()
    ) -> None:
        self._settings = settings
        self._failed = failed
        self._connector = open_sharded(settings.transfer, lines, failed)
        address = self._connector.attach(KvPool(runner.kv, runner.geometry))
        self._lender = Lender(
            settings.transfer.lease_s,
            runner.geometry.block_size,
            self._connector,
            time.monotonic,
            self._release,
            self._expire,
        )
        incarnation, name = new_incarnation(), self._connector.name
        metrics = WorkerMetrics(settings, runner.description, incarnation, name)
        self.core = WorkerCore(settings, runner, self._lender, incarnation, name, time.monotonic, failed, metrics)
        self._service = HandoffService(
            settings.worker_id,
            self.core.incarnation,
            runner.geometry,
            address,
            self._lender,
            settings.transfer,
            time.monotonic,
            failed,
        )
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> WorkerDescription:
        """Opens the port and begins to serve, on the running event loop."""
        self._ticker = asyncio.create_task(self._tick())
        return await self.core.start(
            [lambda server: worker_pb2_grpc.add_HandoffServicer_to_server(self._service, server)]
        )

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await self.core.stop()
        await asyncio.to_thread(self._connector.close)

    async def _tick(self) -> None:
        with vital(self._failed):
            while True:
                await asyncio.sleep(self._settings.transfer.heartbeat_s)
                self._lender.tick()

    def _release(self, sequence_id: str) -> None:
        self.core.loop.call(lambda: self.core.release(sequence_id))

    def _expire(self, sequence_id: str, reason: str) -> None:
        failure = LegFailure(sequence_id, FailureKind.LEASE_LOST, reason)
        self.core.loop.call(lambda: self.core.fail(failure))
