"""A cluster on a virtual clock: the live router's and the live scheduler's code, and a cost model in place of time.

Owns: a run from its first arrival to the last request's end, the workers in it, and the account of both.
Refuses to know: what is decided, which `router.core` (placement, dispatch, journeys) and `scheduler` do here as they do
live; how long things take (`capacity.cost`); what the outcome is worth (`capacity.sweep`).

    arrivals --> Journey x n --> Dispatcher, LoadBook, policy --> VirtualLink --> VirtualWorker: Scheduler, CostModel
                    |                     ^                            ^                |
      sink <-- RequestOutcome             '------- load reports -------+---- tokens ----'

What a simulated request lacks of a live one: text, tokenizing, and the front door's checks that need no worker. Its
output ends by its length, which is its `max_tokens`. A client's time counts from the arrival to the moment when the
token is with the client; `cost.routing` tells how long the ways take.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import lru_cache, partial
from random import Random

from baton.capacity.cluster import ClusterSetup, PoolSetup
from baton.capacity.cores import Cores
from baton.capacity.cost import CostModel
from baton.capacity.events import ClusterEvent, PoolResizes, RoleChanges, WorkerDrains, WorkerFails
from baton.capacity.outcome import (
    End,
    Histogram,
    PoolOutcome,
    RequestOutcome,
    RoleChange,
    RunOutcome,
    Stages,
)
from baton.capacity.prompts import Prompts, block_names
from baton.capacity.token_gaps import Reader
from baton.capacity.virtual_handoff import Exchange
from baton.capacity.virtual_loop import VirtualLoop
from baton.capacity.virtual_reports import PatientBook
from baton.capacity.virtual_worker import Figures, StepListener, VirtualLink, VirtualWorker
from baton.capacity.workload import Arrival
from baton.proto.messages import Role, Sampling, TokenBatch, WorkerDescription
from baton.proto.settings import TransferSettings
from baton.router.core import RouterCore
from baton.router.journey import Ended, Errand, Failed, Journey, Tokens, Trouble
from baton.scheduler.scheduler import SchedulerConfig

_ENDS = {
    Trouble.INVALID: End.REFUSED,
    Trouble.OVERLOADED: End.REFUSED,
    Trouble.DEADLINE: End.DEADLINE,
}

_OBJECTS_BETWEEN_COLLECTIONS = 100_000


class SetupError(ValueError):
    """A cluster, an arrival or an event that cannot be; the message names the field, its value and its bound."""


def simulate(
    setup: ClusterSetup,
    cost: CostModel,
    arrivals: Iterable[Arrival],
    seed: int,
    events: Sequence[ClusterEvent] = (),
    sink: Callable[[RequestOutcome], None] = lambda outcome: None,
    listener: StepListener | None = None,
) -> RunOutcome:
    """Runs all arrivals, which must be in order of time, to their ends. The same arguments give the same outcome.

    `sink` hears of each request when it ends; nothing of it is kept. `listener` hears of every step that is planned. An
    event after the last request's end does not happen. Raises SetupError.
    """
    _check(setup)
    with _rare_collections():
        cluster = _Cluster(setup, cost, seed, listener)
        return _Run(cluster, iter(arrivals), events, sink).run()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Looks for garbage in cycles once in so many new objects. A request that ends leaves none behind, and each look
    walks all that the pools and the prefix index hold."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def pool_names(setup: ClusterSetup) -> list[str]:
    """The name of each pool: its role's, numbered from the second of a role on. Workers are `<name>-0` and so on."""
    names: list[str] = []
    for pool in setup.pools:
        number = sum(name.partition("/")[0] == pool.role.value for name in names)
        names.append(f"{pool.role.value}/{number + 1}" if number else pool.role.value)
    return names


def _check(setup: ClusterSetup) -> None:
    sizes = {role: sum(pool.size for pool in setup.pools if pool.role is role) for role in Role}
    for name, pool in zip(pool_names(setup), setup.pools, strict=True):
        for field, value in (("size", pool.size), ("num_blocks", pool.num_blocks)):
            least = 0 if field == "size" else 1
            if value < least:
                raise SetupError(f"{setup.label}: pool {name}: {field} is {value}, must be at least {least}")
    for field, value in (("max_model_len", setup.max_model_len), ("block_size", setup.block_size)):
        if value < 1:
            raise SetupError(f"{setup.label}: {field} is {value}, must be at least 1")
    if setup.shared_cores is not None and not 0 < setup.shared_cores < math.inf:
        raise SetupError(f"{setup.label}: shared_cores is {setup.shared_cores}, must be above 0 and finite")
    if not any(sizes.values()):
        raise SetupError(f"{setup.label}: no pool has a worker")
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if sizes[role] and not sizes[other]:
            raise SetupError(
                f"{setup.label}: {sizes[role]} {role.value} workers and no {other.value} worker: they work in pairs"
            )


class _Seat:
    """One worker's place, and who sits there: nobody after a failure. A draining one is not taken again.

    `unheard`: what the router has yet to hear of the last one. `changing`: one drain or change of role at a time.
    """

    def __init__(self, worker_id: str, pool: str, setup: PoolSetup) -> None:
        self.worker_id = worker_id
        self.pool = pool
        self.setup = setup
        self.role = setup.role
        self.incarnations = 0
        self.worker: VirtualWorker | None = None
        self.draining = False
        self.leaving = False
        self.changing = asyncio.Lock()
        self.unheard: Callable[[], None] | None = None


class _Cluster:
    """Router and workers."""

    def __init__(self, setup: ClusterSetup, cost: CostModel, seed: int, listener: StepListener | None) -> None:
        self.setup = setup
        self.cost = cost
        self.loop = VirtualLoop()
        self.cores = Cores(self.loop, setup.shared_cores, cost) if setup.shared_cores is not None else None
        self.itl = Histogram()
        self.readers: dict[str, Reader] = {}
        self.role_changes: list[RoleChange] = []
        self._seed = seed
        self._listener = listener
        self._heartbeat_s = min(TransferSettings().heartbeat_s, setup.lease_s / 2)

        def names(token_ids: tuple[int, ...], errand: Errand) -> tuple[Hashable, ...]:
            return block_names(token_ids, setup.block_size)

        self._book = PatientBook(setup.router.credit_steps, self.loop)
        self.router: RouterCore[VirtualLink] = RouterCore(
            setup.router, self._book, names, self.loop.time, Random(f"{seed}/placement")
        )
        self._book.ring = self.router.dispatcher.wake
        self._exchange = Exchange(self.loop, cost, setup.block_size * setup.kv_bytes_per_token)
        self._figures: dict[tuple[str, Role], Figures] = {}
        self._pools = dict(zip(pool_names(setup), setup.pools, strict=True))
        self._seats: dict[str, _Seat] = {}
        self._num_seats: dict[str, int] = {}
        for name, pool in self._pools.items():
            self._figures[name, pool.role] = Figures()
            for _ in range(pool.size):
                self._open(self._new_seat(name))

    # --- workers ----------------------------------------------------------------------------------------------------

    def _new_seat(self, pool: str) -> _Seat:
        number = self._num_seats.get(pool, 0)
        self._num_seats[pool] = number + 1
        seat = _Seat(f"{pool}-{number}", pool, self._pools[pool])
        self._seats[seat.worker_id] = seat
        return seat

    def _open(self, seat: _Seat) -> None:
        """A worker begins to serve, with an empty cache. By now the router knows that the one before is gone."""
        self._hear(seat)
        setup, scheduler = self.setup, seat.setup.scheduler
        seat.incarnations += 1
        incarnation = f"{seat.worker_id}/{seat.incarnations}"
        description = WorkerDescription(
            worker_id=seat.worker_id,
            incarnation=incarnation,
            # Each on a machine of its own.
            address=f"{seat.worker_id}:1",
            role=seat.role,
            model="virtual",
            max_model_len=setup.max_model_len,
            vocab_size=0,
            block_size=setup.block_size,
            num_blocks=seat.setup.num_blocks,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            dtype="",
            connector="virtual",
            version="",
            kv_bytes_per_token=setup.kv_bytes_per_token,
            pid=0,
        )
        config = SchedulerConfig(seat.role, seat.setup.num_blocks, setup.max_model_len, setup.block_size, scheduler)
        seat.worker = VirtualWorker(
            description=description,
            config=config,
            cost=self.cost,
            loop=self.loop,
            exchange=self._exchange,
            itl=self.itl,
            readers=self.readers,
            figures=self._figures.setdefault((seat.pool, seat.role), Figures()),
            random=Random(f"{self._seed}/{incarnation}"),
            router=self.router,
            book=self._book,
            lease_s=setup.lease_s,
            heartbeat_s=self._heartbeat_s,
            idle_report_s=setup.idle_report_s,
            listener=self._listener,
            cores=self.cores,
        )
        self.router.connect(seat.worker.link)
        seat.worker.open()

    def befall(self, event: ClusterEvent) -> None:
        match event:
            case WorkerFails():
                self._fail(self._seats[event.worker_id], event)
            case WorkerDrains():
                self._start(self._go(self._seats[event.worker_id]))
            case RoleChanges():
                self._start(self._change_role(self._seats[event.worker_id], event))
            case PoolResizes():
                self._resize(event)

    def _start(self, change: Coroutine[object, object, object]) -> None:
        self.loop.create_task(change).add_done_callback(lambda task: None if task.cancelled() else task.result())

    def _fail(self, seat: _Seat, event: WorkerFails) -> None:
        if seat.worker is None:
            return
        worker, seat.worker = seat.worker, None
        seat.unheard = partial(self._lose, worker, worker.close(), "the process died")
        self.loop.at(self.loop.time() + self.cost.routing.report_delay_s, partial(self._hear, seat))
        if event.back_after_s is not None:
            self.loop.at(event.at_s + event.back_after_s, partial(self._come_back, seat))

    def _hear(self, seat: _Seat) -> None:
        unheard, seat.unheard = seat.unheard, None
        if unheard is not None:
            unheard()

    def _lose(self, worker: VirtualWorker, batches: list[TokenBatch], reason: str) -> None:
        """The router hears the last of a worker."""
        worker.link.deliver(batches, [])
        worker.link.lose(reason)
        self.router.disconnect(worker.link)

    def _come_back(self, seat: _Seat) -> None:
        if seat.worker is None and not seat.draining:
            self._open(seat)

    async def _go(self, seat: _Seat) -> None:
        async with seat.changing:
            await self._drain(seat)

    async def _drain(self, seat: _Seat) -> None:
        """As the live fleet does: nothing new, then what does not end in time moves. Nobody sits there afterwards."""
        seat.draining = True
        self.router.book.set_draining(seat.worker_id, True)
        worker = seat.worker
        if worker is None:
            return
        rested = self.loop.create_future()
        worker.link.rested = lambda: None if rested.done() else rested.set_result(None)
        if worker.link.num_legs:
            try:
                async with asyncio.timeout(self.setup.router.drain_timeout_s):
                    await rested
            except TimeoutError:
                pass
        if seat.worker is worker:
            seat.worker = None
            self._lose(worker, worker.close(), "closed by the router")

    async def _change_role(self, seat: _Seat, event: RoleChanges) -> None:
        async with seat.changing:
            before, asked_s = seat.role, self.loop.time()
            await self._drain(seat)
            drained_s = self.loop.time()
            await asyncio.sleep(event.change_s)
            if seat.leaving:
                return
            seat.role, seat.draining = event.role, False
            self._open(seat)
            now = self.loop.time()
            self.role_changes.append(
                RoleChange(seat.worker_id, before, event.role, asked_s, drained_s - asked_s, now - asked_s)
            )

    def _resize(self, event: PoolResizes) -> None:
        seats = [seat for seat in self._seats.values() if seat.pool == event.pool and not seat.leaving]
        for _ in range(event.size - len(seats)):
            self.loop.at(self.loop.time() + event.start_s, partial(self._come_back, self._new_seat(event.pool)))
        for seat in seats[event.size :]:
            seat.leaving = True
            self._start(self._go(seat))

    # --- what came of it --------------------------------------------------------------------------------------------

    def check_event(self, event: ClusterEvent) -> None:
        """Raises SetupError for one that names what is not there or says what cannot be."""
        name = type(event).__name__
        for field in ("at_s", "back_after_s", "change_s", "start_s"):
            value = getattr(event, field, None)
            if value is not None and not 0 <= value < math.inf:
                raise SetupError(f"{name}: {field} is {value}, must be at least 0 and finite")
        if isinstance(event, PoolResizes):
            if event.pool not in self._pools:
                raise SetupError(f"{name}: pool is {event.pool!r}, there are {', '.join(self._pools)}")
            if event.size < 0:
                raise SetupError(f"{name}: size is {event.size}, must be at least 0")
        elif event.worker_id not in self._seats:
            raise SetupError(f"{name}: worker_id is {event.worker_id!r}, there are {', '.join(self._seats)}")

    def pools(self) -> tuple[PoolOutcome, ...]:
        for seat in self._seats.values():
            if seat.worker is not None:
                seat.worker.close()
        return tuple(self._pool(name, role, figures) for (name, role), figures in self._figures.items())

    def _pool(self, name: str, role: Role, figures: Figures) -> PoolOutcome:
        up_s = figures.up_s or 1.0
        seats = [seat for seat in self._seats.values() if not seat.leaving]
        workers = sum(seat.pool == name and seat.role is role for seat in seats)
        return PoolOutcome(
            name=name if role is self._pools[name].role else f"{name} as {role.value}",
            role=role,
            workers=workers,
            busy_s=figures.busy_s,
            steps=figures.steps,
            prompt_tokens_computed=figures.prompt_tokens_computed,
            tokens_generated=figures.tokens_generated,
            tokens_recomputed=figures.tokens_recomputed,
            preemptions=figures.preemptions,
            kv_usage=figures.used_block_s / up_s,
            queued_tokens=figures.queued_token_s / up_s,
            handoff_bytes=figures.moved.num_bytes,
            handoff_s=figures.moved.seconds,
        )


class _Run:
    """One pass of arrivals through a cluster."""

    def __init__(
        self,
        cluster: _Cluster,
        arrivals: Iterator[Arrival],
        events: Sequence[ClusterEvent],
        sink: Callable[[RequestOutcome], None],
    ) -> None:
        self._cluster = cluster
        self._loop = cluster.loop
        self._arrivals = arrivals
        self._sink = sink
        self._prompts = Prompts(cluster.setup.block_size)
        self._num_arrived = 0
        self._num_running = 0
        self._exhausted = False
        self._last_end_s = 0.0
        routing = cluster.cost.routing
        self._last_mile_s = max(0.0, routing.delivery_s - routing.report_delay_s)
        for event in events:
            cluster.check_event(event)
            self._loop.at(event.at_s, partial(cluster.befall, event))

    def run(self) -> RunOutcome:
        try:
            self._expect_next()
            self._loop.run()
        finally:
            self._loop.close()
        duration_s = self._last_end_s
        cluster = self._cluster
        return RunOutcome(duration_s, cluster.pools(), cluster.itl, tuple(cluster.role_changes))

    def _expect_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._exhausted = True
            self._stop_at_the_end()
            return
        if not self._loop.time() <= arrival.time_s < math.inf:
            raise SetupError(
                f"arrival {self._num_arrived}: time_s is {arrival.time_s}, must be finite and at least that of the one "
                f"before, {self._loop.time()}"
            )
        if arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
            raise SetupError(
                f"arrival {self._num_arrived}: {arrival.prompt_tokens} prompt and {arrival.output_tokens} output "
                "tokens, each must be at least 1"
            )
        self._loop.at(arrival.time_s, partial(self._arrive, arrival))

    def _arrive(self, arrival: Arrival) -> None:
        number, self._num_arrived = self._num_arrived, self._num_arrived + 1
        self._num_running += 1
        cores = self._cluster.cores
        if cores is not None:
            cores.spend(cores.cost.request_cpu_s)
        task = self._loop.create_task(self._serve(number, arrival))
        task.add_done_callback(self._ended)
        self._expect_next()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        task.result()
        self._num_running -= 1
        self._last_end_s = self._loop.time()
        self._stop_at_the_end()

    def _stop_at_the_end(self) -> None:
        if self._exhausted and not self._num_running:
            self._loop.stop()

    async def _serve(self, number: int, arrival: Arrival) -> None:
        """One request, as the gateway sees it through."""
        cluster, now = self._cluster, self._loop.time()
        name, reader = str(number), Reader()
        cluster.readers[name] = reader
        errand = Errand(
            journey_id=name,
            prompt_token_ids=self._prompts.token_ids(arrival),
            sampling=_sampling(arrival.output_tokens),
            arrived_s=now,
            deadline_s=now + cluster.setup.router.request_timeout_s,
        )
        journey = cluster.router.journey(errand)
        first_s = math.nan
        last: Ended | Failed | None = None
        async with aclosing(journey.run()) as pieces:
            async for piece in pieces:
                if not isinstance(piece, Tokens):
                    last = piece
                elif piece.first_index == 0:
                    first_s = self._loop.time()
        del cluster.readers[name]
        assert last is not None
        self._sink(self._outcome(number, arrival, journey, reader, now, first_s, last))

    def _outcome(
        self,
        number: int,
        arrival: Arrival,
        journey: Journey,
        reader: Reader,
        arrived_s: float,
        first_s: float,
        last: Ended | Failed,
    ) -> RequestOutcome:
        ledger, routing = journey.ledger, self._cluster.cost.routing
        timeline = ledger.timeline(self._loop.time())
        output_tokens = len(journey.output) + reader.num_unsent
        ttft_s = e2e_s = math.nan
        if output_tokens and reader.last_token_s is not None:
            ttft_s = first_s + self._last_mile_s - arrived_s
            e2e_s = reader.last_token_s + max(routing.delivery_s, routing.report_delay_s) - arrived_s
        return RequestOutcome(
            number=number,
            arrived_s=arrived_s,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=output_tokens,
            end=End.FINISHED if isinstance(last, Ended) else _ENDS.get(last.trouble, End.FAILED),
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            worst_gap_s=reader.worst_gap_s,
            stages=Stages(
                timeline.router_wait,
                timeline.prefill_queue,
                timeline.prefill_compute,
                timeline.handoff_wait,
                timeline.handoff_transfer,
                timeline.decode_admission,
                timeline.decode + (self._last_mile_s if isinstance(last, Ended) else 0.0),
                timeline.retry,
            ),
            cached_tokens=ledger.cached_tokens,
            recomputed_tokens=ledger.recomputed_tokens,
            retries=ledger.retries,
            reason=last.message if isinstance(last, Failed) else "",
        )


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max_tokens)
