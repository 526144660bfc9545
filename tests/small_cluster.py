"""A whole cluster in one process and one event loop: real router, real workers, real gRPC, no Ray.

For tests of the request's life with a model of the test's choice. Processes that can be killed are `tests/cluster`'s.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc

from baton.decode_worker.duty import DecodeDuty
from baton.engine.roles import Worker
from baton.engine.worker import ModelRunner
from baton.kvtransfer.connector import KvPool
from baton.kvtransfer.sharded import open_sharded
from baton.prefill_worker.duty import PrefillDuty
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto.credentials import ClientTls
from baton.proto.messages import Role, RoleChange, RoleKept, WorkerDescription
from baton.proto.settings import (
    ObservabilitySettings,
    SchedulerSettings,
    SecuritySettings,
    TransferSettings,
    WorkerSettings,
)
from baton.router.cluster import Departure, WorkerState, WorkforceError
from baton.router.config import ClusterConfig, RouterSettings, defaults
from baton.router.link import WorkerLink
from baton.router.roles import allowed_drain_s, departure_refusal, refusal
from baton.router.router import Router
from baton.router.server import RouterServer
from baton.router.tokenizer import Tokenizer


@dataclass
class Seat:
    """A worker and the router's link to it; the `Member` that the status shows."""

    worker: Worker
    runner: ModelRunner
    link: WorkerLink
    state: WorkerState = WorkerState.READY
    restarts: int = 0
    note: str = ""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def description(self):
        return self.link.description

    @property
    def worker_id(self) -> str:
        return self.link.worker_id

    @property
    def pool(self) -> str:
        return self.worker.core.settings.pool

    @property
    def role(self) -> Role:
        return self.description.role


def make_worker(settings: WorkerSettings, runner: ModelRunner, failed: Callable[[BaseException], None]) -> Worker:
    """As `fleet.worker` does it, which loads Ray."""
    connector = open_sharded(settings.transfer, (), failed)
    lends = partial(PrefillDuty, connector=connector, address=connector.attach(KvPool(runner.kv, runner.geometry)))
    pulls = partial(DecodeDuty, connector=connector, pull_ids=itertools.count(1))
    duties = {Role.PREFILL: lends, Role.DECODE: pulls, Role.COLOCATED: pulls}
    return Worker(settings, runner, connector, duties, failed)


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
    short_output_tokens: int = 0  # most tests are about hand-offs, however short the output
    block_size: int = 16
    observability: ObservabilitySettings = field(default_factory=ObservabilitySettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    client_tls: ClientTls | None = None

    async def __aenter__(self) -> SmallCluster:
        self.failures: list[BaseException] = []
        config = defaults(prefill=self.prefill, decode=self.decode, colocated=self.colocated)
        pools = tuple(
            replace(pool, engine=replace(pool.engine, block_size=self.block_size), scheduler=self.scheduler)
            for pool in config.pools
        )
        settings = replace(self.router_settings, http_port=0, short_output_tokens=self.short_output_tokens)
        config = ClusterConfig("paper", pools, settings, self.transfer, self.observability, self.security)
        self.router = Router(config, Tokenizer(self.model_dir))
        self.seats: dict[str, Seat] = {}
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}
        for role, count in counts.items():
            for index in range(count):
                await self.add(role, f"{role.value}-{index}")
        self.server = RouterServer(self.router, self)
        addresses = await self.server.open(config.router)
        self.address, self.http_address = addresses.grpc, addresses.http
        replicas = self.router.replicas
        replicas.grpc_address, replicas.http_address = addresses.own_grpc, addresses.own_http
        self.channel = (
            grpc.aio.secure_channel(addresses.own_grpc, self.client_tls.channel_credentials())
            if self.client_tls is not None
            else grpc.aio.insecure_channel(addresses.own_grpc)
        )
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterStub(self.channel)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(self.describe(), *map(repr, self.failures), sep="\n")
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
            cluster_tls=self.security.cluster_tls,
        )
        runner = self.make_runner()
        worker = make_worker(settings, runner, self.failures.append)
        link = await self._connect(await worker.start())
        seat = self.seats[worker_id] = Seat(worker, runner, link)
        return seat

    async def _connect(self, description: WorkerDescription) -> WorkerLink:
        link = WorkerLink(description, self.router.incarnation, silence_s=5.0, wire_to_worker=self.router.wire)
        await link.open(self.router.reported, timeout_s=5.0)
        self.router.connect(link)
        link.lost.add_done_callback(lambda _: self.router.disconnect(link))
        return link

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

    async def dismiss(self, worker_id: str, timeout_s: float, force: bool) -> Departure:
        others = [seat.role for seat in self.members() if seat is not self.seats[worker_id]]
        why_not = departure_refusal([worker_id], others)
        if why_not and not force:
            raise WorkforceError(why_not)
        moved = await self.drain(worker_id, timeout_s)
        await self.remove(worker_id)
        return Departure((worker_id,), moved)

    async def vacate(self, host: str, timeout_s: float, force: bool) -> Departure:
        raise KeyError(host)

    async def set_role(self, worker_id: str, role: Role, timeout_s: float | None, force: bool) -> RoleChange:
        """As the fleet does it, but for the death of the worker on the way."""
        return await asyncio.shield(self._set_role(self.seats[worker_id], role, timeout_s, force))

    async def _set_role(self, seat: Seat, role: Role, timeout_s: float | None, force: bool) -> RoleChange:
        settings = self.router.config.router
        async with seat.changing:
            others = [other.role for other in self.members() if other is not seat and other.state is WorkerState.READY]
            why_not = refusal(seat.worker_id, role, others)
            if why_not and not force:
                raise WorkforceError(why_not)
            self.router.book.set_draining(seat.worker_id, True)
            seat.state = WorkerState.DRAINING
            wanted_s = settings.drain_timeout_s if timeout_s is None else timeout_s
            drain_s = allowed_drain_s(wanted_s, others, settings.no_worker_grace_s)
            try:
                change = await seat.worker.set_role(role, drain_s)
                if isinstance(change, RoleKept):
                    raise WorkforceError(change.reason)
                if change.description.incarnation != seat.description.incarnation:
                    async with asyncio.timeout(5.0):
                        await seat.link.lost
                    seat.link = await self._connect(change.description)
            finally:
                seat.state = WorkerState.READY
                self.router.book.set_draining(seat.worker_id, False)
                self.router.dispatcher.wake()
            return change

    async def scale(self, pool: str, size: int) -> None:
        if pool not in {seat.pool for seat in self.seats.values()}:
            raise KeyError(pool)
        raise WorkforceError(f"no machine had room for {size} workers")

    # --- what tests ask

    def promise_room(self) -> None:
        """Makes the router believe that every worker has room for any KV, as if the reports of full ones were late."""
        book = self.router.book
        book._view = lambda worker, view=book._view: replace(view(worker), free_kv_tokens=10**6)
        for worker in book._workers.values():
            worker.standing = None

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
            duty = seat.worker.core.duty
            if isinstance(duty, DecodeDuty):
                lines += [
                    f"  hand-off {name} from {handoff.link.worker_id}: {_held(handoff.incoming)}"
                    for name, handoff in duty.side._handoffs.items()
                ]
            elif isinstance(duty, PrefillDuty):
                lender = duty.side
                lines.append(f"  {lender._table}, early {lender._early}, watchers {list(lender._watchers)}")
        return "\n".join(lines)

    async def counters(self) -> dict[str, object]:
        """Each worker's counters, fresh."""
        return {seat.worker_id: (await self.on_loop(seat, seat.worker.core.load)).counters for seat in self.members()}

    async def status(self) -> cluster.ClusterStatus:
        return await self.cluster.GetStatus(cluster.GetStatusRequest())


def _held(thing: object) -> dict[str, object]:
    """An object's attributes, whether or not its class has slots."""
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(thing, name) for name in names} | getattr(thing, "__dict__", {})
