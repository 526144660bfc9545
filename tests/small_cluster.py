"""A whole cluster in one process and one event loop: real router, real workers, real gRPC, no Ray.

For tests of the request's life with a model of the test's choice. Processes that can be killed are `tests/cluster`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from baton.decode_worker.worker import DecodeWorker
from baton.engine.worker import ModelRunner
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto.messages import Role
from baton.proto.settings import ObservabilitySettings, SchedulerSettings, TransferSettings, WorkerSettings
from baton.router.cluster import WorkerState, WorkforceError
from baton.router.config import ClusterConfig, RouterSettings, defaults
from baton.router.link import WorkerLink
from baton.router.router import Router
from baton.router.server import RouterServer
from baton.router.tokenizer import Tokenizer


@dataclass
class Seat:
    """A worker and the router's link to it; the `Member` that the status shows."""

    worker: PrefillWorker | DecodeWorker
    runner: ModelRunner
    link: WorkerLink
    state: WorkerState = WorkerState.READY
    restarts: int = 0

    @property
    def description(self):
        return self.link.description

    @property
    def worker_id(self) -> str:
        return self.link.worker_id

    @property
    def pool(self) -> str:
        return self.description.role.value

    @property
    def role(self) -> Role:
        return self.description.role


@dataclass
class SmallCluster:
    """`async with SmallCluster(...) as cluster`: router at `cluster.address`, workers in `cluster.seats`."""

    model_dir: Path
    make_runner: Callable[[], ModelRunner]
    prefill: int = 1
    decode: int = 1
    colocated: int = 0
    transfer: TransferSettings = field(default_factory=lambda: TransferSettings(connector="local", checksums="always"))
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    router_settings: RouterSettings = field(default_factory=lambda: RouterSettings(port=0))
    block_size: int = 16
    observability: ObservabilitySettings = field(default_factory=ObservabilitySettings)

    async def __aenter__(self) -> SmallCluster:
        self.failures: list[BaseException] = []
        config = defaults(prefill=self.prefill, decode=self.decode, colocated=self.colocated)
        pools = tuple(
            replace(pool, engine=replace(pool.engine, block_size=self.block_size), scheduler=self.scheduler)
            for pool in config.pools
        )
        settings = replace(self.router_settings, http_port=0)
        config = ClusterConfig("paper", pools, settings, self.transfer, self.observability)
        self.router = Router(config, Tokenizer(self.model_dir))
        self.seats: dict[str, Seat] = {}
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}
        for role, count in counts.items():
            for index in range(count):
                await self.add(role, f"{role.value}-{index}")
        self.server = RouterServer(self.router, self)
        addresses = await self.server.open(config.router)
        self.address, self.http_address = addresses.grpc, addresses.http
        self.channel = grpc.aio.insecure_channel(self.address)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterStub(self.channel)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(self.describe())
        await self.channel.close()
        await self.server.close()
        for worker_id in list(self.seats):
            await self.remove(worker_id)
        self.router.dispatcher.close()
        assert not self.failures, self.failures

    async def add(self, role: Role, worker_id: str) -> Seat:
        settings = WorkerSettings(
            worker_id,
            role.value,
            role,
            scheduler=self.scheduler,
            transfer=self.transfer,
            observability=self.observability,
            idle_report_s=0.02,
            model_name=self.router.model_name,
        )
        runner = self.make_runner()
        make = PrefillWorker if role is Role.PREFILL else DecodeWorker
        worker = make(settings, runner, self.failures.append)
        link = WorkerLink(await worker.start(), self.router.incarnation, silence_s=5.0)
        await link.open(self.router.reported, timeout_s=5.0)
        self.router.connect(link)
        seat = self.seats[worker_id] = Seat(worker, runner, link)
        link.lost.add_done_callback(lambda _: self.router.disconnect(link))
        return seat

    async def remove(self, worker_id: str) -> None:
        seat = self.seats.pop(worker_id)
        await seat.link.close()
        self.router.disconnect(seat.link)
        await seat.worker.stop()

    # --- Workforce

    def members(self) -> list[Seat]:
        return list(self.seats.values())

    async def drain(self, worker_id: str, timeout_s: float) -> int:
        seat = self.seats[worker_id]
        self.router.book.set_draining(worker_id, True)
        return 0 if await seat.link.rest(timeout_s) else seat.link.num_legs

    async def scale(self, pool: str, size: int) -> None:
        if pool not in {seat.pool for seat in self.seats.values()}:
            raise KeyError(pool)
        raise WorkforceError(f"no machine had room for {size} workers")

    # --- what tests ask

    async def at_rest(self, timeout_s: float = 5.0) -> None:
        """Waits until no block of any pool is held, lent or quarantined; then every scheduler checks itself."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            loads = [await self.on_loop(seat, lambda s=seat: s.worker.core.scheduler.load()) for seat in self.members()]
            busy = [
                load
                for load in loads
                if load.held_blocks or load.lent_blocks or load.quarantined_blocks or load.running
            ]
            if not busy:
                break
            assert asyncio.get_running_loop().time() < deadline, f"still busy after {timeout_s} s: {busy}"
            await asyncio.sleep(0.01)
        for seat in self.members():
            await self.on_loop(seat, seat.worker.core.scheduler.check)
            assert not getattr(seat.runner, "errors", []), seat.runner.errors
        self.router.book.check()
        assert self.router.book.in_flight == 0

    async def on_loop(self, seat: Seat, function):
        """Runs a function on a worker's step loop and returns its result."""
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - handed to the test
                loop.call_soon_threadsafe(future.set_exception, error)
            else:
                loop.call_soon_threadsafe(future.set_result, result)

        seat.worker.core.loop.call(run)
        return await asyncio.wait_for(future, 5.0)

    def describe(self) -> str:
        """What every part holds at this moment, for the report of a failure."""
        lines = [f"router: {self.router.book.in_flight} legs in flight, links {sorted(self.router.links)}"]
        for name, seat in self.seats.items():
            scheduler = seat.worker.core.scheduler
            lines.append(f"{name}: {scheduler.load()}, link {seat.link.num_legs} legs, lost {seat.link.lost.done()}")
            lines += [
                f"  {sequence.sequence_id} {sequence.state.name} {sequence.num_computed_tokens} computed, "
                f"{len(sequence.block_ids)} blocks"
                for sequence in list(scheduler._sequences.values())
            ]
            if isinstance(seat.worker, DecodeWorker):
                lines += [
                    f"  hand-off {name} from {handoff.link.worker_id}: {vars(handoff.incoming)}"
                    for name, handoff in seat.worker._receiver._handoffs.items()
                ]
            elif isinstance(seat.worker, PrefillWorker):
                lender = seat.worker._lender
                lines.append(
                    f"  leases {lender._table}, early {lender._early}, watchers {list(lender._watchers)}"
                )
        return "\n".join(lines)

    async def counters(self) -> dict[str, object]:
        """Each worker's counters, fresh."""
        return {seat.worker_id: (await self.on_loop(seat, seat.worker.core.load)).counters for seat in self.members()}

    async def status(self) -> cluster.ClusterStatus:
        return await self.cluster.GetStatus(cluster.GetStatusRequest())
