"""What a prefill worker does beside computing prompts: it lends their KV until a decode worker has it.

Owns: the wiring of lender, its gRPC face and its ticks, for one incarnation. Refuses to know: routers' policies, decode
workers' memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.engine.vital import vital
from baton.engine.worker import WorkerCore
from baton.kvtransfer.connector import Connector
from baton.kvtransfer.handshake import Party
from baton.prefill_worker.lender import Lender
from baton.prefill_worker.service import HandoffService
from baton.proto import worker_pb2 as wire
from baton.proto.messages import FailureKind, HandoffSource, LegFailure


class PrefillDuty:
    """A `Duty`. `address`: what peers need to read from the connector's pool."""

    def __init__(self, core: WorkerCore, incarnation: str, connector: Connector, address: bytes) -> None:
        self._core = core
        settings, geometry = core.settings, core.runner.geometry
        self.side = Lender(
            settings.transfer.lease_s, geometry.block_size, connector, core.clock, self._release, self._expire
        )
        self.lending = HandoffService(
            Party(settings.worker_id, connector.name, geometry),
            incarnation,
            core.runner.description.num_blocks,
            address,
            self.side,
            settings.transfer,
            core.clock,
            core.failed,
        )
        self._ticker: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self.lending.close()

    async def meet(self, sources: Sequence[HandoffSource], probe_bytes: int, timeout_s: float) -> tuple[wire.Lane, ...]:
        """Reads from nobody."""
        return ()

    async def _tick(self) -> None:
        with vital(self._core.failed):
            while True:
                await asyncio.sleep(self._core.settings.transfer.heartbeat_s)
                self.side.tick()

    def _release(self, sequence_id: str) -> None:
        self._core.loop.call(lambda: self._core.release(sequence_id))

    def _expire(self, sequence_id: str, reason: str) -> None:
        failure = LegFailure(sequence_id, FailureKind.LEASE_LOST, reason)
        self._core.loop.call(lambda: self._core.fail(failure))
