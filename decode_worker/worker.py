"""A decode worker: pulls KV from prefill workers and generates; also runs whole requests where it is co-located, and
those that need no prefill: further outputs of a prompt whose KV is here.

Owns: the wiring of scheduler, runner, connector and receiver. Refuses to know: who chose it and why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from baton.decode_worker.receiver import Receiver
from baton.engine.leg import HandoffTimes
from baton.engine.metrics import WorkerMetrics
from baton.engine.vital import Failed
from baton.engine.worker import ModelRunner, WorkerCore, new_incarnation
from baton.kvtransfer.connector import KvPool
from baton.kvtransfer.sharded import open_sharded
from baton.proto.messages import FailureKind, LegFailure, WorkerDescription
from baton.proto.settings import WorkerSettings


class DecodeWorker:
    """Complete when the constructor returns; `start` opens its port.

    `failed` is told of a bug, in the step loop or beside it, after which the worker must not go on.

    `lines` lead to the connectors of the worker's other ranks, if it has any.

    Raises ConnectorError from the constructor if the transport is not there.
    """

    def __init__(
        self, settings: WorkerSettings, runner: ModelRunner, failed: Failed, lines: Sequence[Connection] = ()
    ) -> None:
        self._connector = open_sharded(settings.transfer, lines, failed)
        self._connector.attach(KvPool(runner.kv, runner.geometry))
        incarnation, name = new_incarnation(), self._connector.name
        metrics = WorkerMetrics(settings, runner.description, incarnation, name)
        self._receiver = Receiver(
            settings.worker_id,
            incarnation,
            runner.geometry,
            self._connector,
            settings.transfer,
            time.monotonic,
            self,
            failed,
            metrics,
        )
        self.core = WorkerCore(settings, runner, self._receiver, incarnation, name, time.monotonic, failed, metrics)

    async def start(self) -> WorkerDescription:
        """Opens the port and begins to serve, on the running event loop."""
        self._receiver.open()
        return await self.core.start()

    async def stop(self) -> None:
        await self._receiver.close()
        await self.core.stop()
        await asyncio.to_thread(self._connector.close)

    # --- LandingStrip: from the event loop to the step loop ---------------------------------------------------------

    def announce(self, sequence_id: str) -> None:
        self.core.loop.call(lambda: self.core.scheduler.announce(sequence_id))

    def land(
        self, sequence_id: str, next_token: int, num_transferred_tokens: int, landed_s: float, times: HandoffTimes
    ) -> None:
        self.core.loop.call(lambda: self.core.land(sequence_id, next_token, num_transferred_tokens, landed_s, times))

    def fail(self, sequence_id: str, reason: str) -> None:
        failure = LegFailure(sequence_id, FailureKind.SOURCE_LOST, reason)
        self.core.loop.call(lambda: self.core.fail(failure))

    def settle(self, sequence_id: str) -> None:
        self.core.loop.call(lambda: self.core.scheduler.settle(sequence_id))
