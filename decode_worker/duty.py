"""What a decode worker does beside generating: it pulls KV from prefill workers. One that is co-located has the same
duty and nothing to pull.

Owns: the wiring of the receiver, for one incarnation. Refuses to know: who chose the worker and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from baton.decode_worker.receiver import Receiver
from baton.engine.leg import HandoffTimes
from baton.engine.worker import WorkerCore
from baton.kvtransfer.connector import Connector
from baton.proto import worker_pb2 as wire
from baton.proto.messages import FailureKind, HandoffSource, LegFailure


class DecodeDuty:
    """A `Duty`. `pull_ids`: names for pulls, which the connector has never heard before."""

    def __init__(self, core: WorkerCore, incarnation: str, connector: Connector, pull_ids: Iterator[int]) -> None:
        self._core = core
        self.side = Receiver(
            core.settings.worker_id,
            incarnation,
            core.runner.geometry,
            connector,
            core.settings.transfer,
            core.clock,
            self,
            core.failed,
            core.metrics,
            pull_ids,
            core.runner.description.kv_bytes_per_token * core.runner.description.block_size,
            core.tell_lanes,
            core.wire,
        )
        self.lending = None

    def open(self) -> None:
        self.side.open()

    async def close(self) -> None:
        await self.side.close()

    async def meet(self, sources: Sequence[HandoffSource], probe_bytes: int, timeout_s: float) -> tuple[wire.Lane, ...]:
        return await self.side.meet(sources, probe_bytes, timeout_s)

    # --- LandingStrip: from the event loop to the step loop ---------------------------------------------------------

    def announce(self, sequence_id: str) -> None:
        self._core.loop.call(lambda: self._core.scheduler.announce(sequence_id))

    def land(
        self, sequence_id: str, next_token: int, num_transferred_tokens: int, landed_s: float, times: HandoffTimes
    ) -> None:
        self._core.loop.call(lambda: self._core.land(sequence_id, next_token, num_transferred_tokens, landed_s, times))

    def fail(self, sequence_id: str, reason: str) -> None:
        failure = LegFailure(sequence_id, FailureKind.SOURCE_LOST, reason)
        self._core.loop.call(lambda: self._core.fail(failure))

    def settle(self, sequence_id: str) -> None:
        self._core.loop.call(lambda: self._core.scheduler.settle(sequence_id))

    def borrow(self, name: str, num_blocks: int, answer: Callable[[list[int]], object]) -> None:
        self._core.loop.call(lambda: answer(self._core.scheduler.set_aside(name, num_blocks)))
