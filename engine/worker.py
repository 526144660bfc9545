"""What every worker is, whatever its role: a scheduler, a runner, a step loop, a desk for routers, a gRPC server.

Owns: the wiring of these, the record of each leg (times, log-probabilities) and the worker's load report.
Refuses to know: how KV moves. The role's `Duty` is told what happens to sequences and does that part; `engine.roles`
decides when another takes its place.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import grpc
import torch

from baton.engine.clock import Clock
from baton.engine.description import ModelDescription
from baton.engine.desk import RouterDesk
from baton.engine.duty import Duty, TransferCounters
from baton.engine.leg import HandoffTimes, LegRecord
from baton.engine.loop import StepLoop, StepRunner
from baton.engine.metrics import WorkerMetrics
from baton.engine.step_log import open_step_log
from baton.engine.tracing import LegTracer, open_leg_tracer
from baton.engine.vital import Failed
from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.context import Context
from baton.proto.credentials import ClusterWire
from baton.proto.messages import (
    FailureKind,
    HandoffSource,
    KvGeometry,
    Leg,
    LegFailure,
    LegSummary,
    LoadReport,
    Request,
    Role,
    StageTimes,
    TokenBatch,
    WorkerCounters,
    WorkerDescription,
)
from baton.proto.settings import WorkerSettings
from baton.scheduler.account import summarize
from baton.scheduler.load import load_report
from baton.scheduler.plan import Emitted, Logprobs, Progressed, Step, StepResult
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig
from baton.scheduler.sequence import Sequence, State
from baton.telemetry import machine
from baton.telemetry.log_tail import LogService
from baton.telemetry.metrics import Endpoint
from baton.telemetry.tracing import FLUSH_S

# A cut cable shows within about a second; pings are allowed while no call is in progress.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
# Who connects and says nothing is hung up on. A router, or a decode worker, has one stream a connection.
_SERVER_OPTIONS = (
    *KEEPALIVE_OPTIONS,
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_allowed_incoming_connections", 4096),
)


def new_incarnation() -> str:
    """A name for one life of a worker, never used again: from its process's start, or from a change of its role."""
    return secrets.token_hex(8)


# The parts of a request that a worker runs, by its role. A prefill worker's sequences never grow, so none is ever set
# back while a decode worker waits for it: a whole request, of which routers send those with short outputs, has blocks
# for all of its output from the beginning. A decode worker takes a whole request only if it has the prompt's KV
# already. Their schedulers see to both.
_LEGS = {
    Role.PREFILL: frozenset({Leg.PREFILL, Leg.WHOLE}),
    Role.DECODE: frozenset({Leg.DECODE, Leg.WHOLE}),
    Role.COLOCATED: frozenset({Leg.WHOLE}),
}


class ModelRunner(StepRunner, Protocol):
    """A model in memory with its KV pool: `kv` is [block, layer, kv_head, K/V, token, head_dim]."""

    @property
    def kv(self) -> torch.Tensor: ...

    @property
    def geometry(self) -> KvGeometry: ...

    @property
    def description(self) -> ModelDescription: ...


DutyFactory = Callable[["WorkerCore", str], Duty]
"""Makes the duty of one incarnation, which it is told the name of."""


class WorkerCore:
    """The part that lasts, whatever the role; a `LegHandler` for the desk and a `StepListener` for the loop.

    `make_duty` makes that of `settings.role`. `failed` is told of a bug in the step loop or beside it: the process
    cannot go on.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        runner: ModelRunner,
        make_duty: DutyFactory,
        connector_name: str,
        clock: Clock,
        failed: Failed,
    ) -> None:
        self.settings = settings
        self.runner = runner
        self.incarnation = new_incarnation()
        self.clock = clock
        self.failed = failed
        self.wire = ClusterWire(settings.cluster_tls)
        self.metrics = WorkerMetrics(settings, runner.description, self.incarnation, connector_name)
        self._connector_name = connector_name
        self._endpoint = Endpoint(self.metrics) if settings.observability.worker_metrics else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                role=settings.role,
                num_blocks=runner.description.num_blocks,
                max_model_len=runner.description.max_model_len,
                block_size=runner.description.block_size,
                settings=settings.scheduler,
                plans_ahead=_plans_ahead(settings),
            )
        )
        self._step_log = open_step_log(settings, runner.description, self.incarnation)
        self.loop = StepLoop(self.scheduler, runner, self, clock, failed, settings.idle_report_s, self._step_log)
        self.desk = RouterDesk(self.describe, self, clock, failed)
        self._legs: dict[str, LegRecord] = {}
        self._tracer = open_leg_tracer(settings, self.incarnation, connector_name)
        self._report_number = 0
        self._next_idle_report_s = 0.0
        self._server: grpc.aio.Server | None = None
        self._beat: asyncio.Task[None] | None = None
        self._address = ""
        self._metrics_address = ""
        self._tell_rest: Callable[[], object] | None = None
        self._moved_before = TransferCounters()  # by former duties
        self.duty = make_duty(self, self.incarnation)
        self._side = self.duty.side

    # --- event loop -----------------------------------------------------------------------------------------------

    async def start(self) -> WorkerDescription:
        """Opens the gRPC port, for routers and for those who read KV here, and starts the step loop."""
        # Two workers of a machine may look for a port of the same range: neither may join the other's.
        server = grpc.aio.server(options=(*_SERVER_OPTIONS, ("grpc.so_reuseport", 0)))
        worker_pb2_grpc.add_WorkerServicer_to_server(self.desk, server)
        worker_pb2_grpc.add_HandoffServicer_to_server(LendingDoor(self), server)
        worker_pb2_grpc.add_LogsServicer_to_server(LogService(), server)
        worker_pb2_grpc.add_ExaminationServicer_to_server(Examination(self), server)
        host = self.settings.host
        shown = f"[{host}]" if ":" in host else host
        port = _bind(server, self.wire, shown, self.settings.ports)
        await server.start()
        self._server, self._address = server, f"{shown}:{port}"
        if self._endpoint is not None:
            self._metrics_address = self._endpoint.open(host, self.settings.ports)
        self.desk.open(self.loop)
        self._beat = asyncio.create_task(self.desk.beat(self.settings.idle_report_s))
        self.duty.open()
        self.loop.start()
        return self.describe()

    async def stop(self, grace_s: float = 0.1) -> None:
        """Closes the port and ends the step loop; the streams of routers end."""
        await self.duty.close()
        if self._beat is not None:
            self._beat.cancel()
        self.desk.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        await asyncio.to_thread(self.loop.stop)
        if self._tracer is not None:
            for sequence_id, record in list(self._legs.items()):
                sequence = self.scheduler.get(sequence_id)
                if sequence is not None:
                    self._trace(sequence, record, self.clock(), "stopped")
            await asyncio.to_thread(self._tracer.close, FLUSH_S)
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)

    def tell_lanes(self, lanes: tuple[wire.Lane, ...]) -> None:
        """The ways by which KV comes here, when one has changed."""
        self.desk.lanes = lanes
        self.metrics.connected(lanes)

    def describe(self) -> WorkerDescription:
        model, settings = self.runner.description, self.settings
        return WorkerDescription(
            worker_id=settings.worker_id,
            incarnation=self.incarnation,
            address=self._address,
            role=settings.role,
            model=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            block_size=model.block_size,
            num_blocks=model.num_blocks,
            max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
            max_num_seqs=settings.scheduler.max_num_seqs,
            dtype=model.dtype,
            connector=self._connector_name,
            version=self.runner.geometry.version,
            kv_bytes_per_token=model.kv_bytes_per_token,
            pid=os.getpid(),
            metrics_address=self._metrics_address,
        )

    # --- step loop: what routers ask --------------------------------------------------------------------------------

    def submit(self, request: Request, arrived_s: float) -> LegFailure | None:
        wrong = self._wrong(request)
        outcome = Refusal(FailureKind.REFUSED, wrong) if wrong else self.scheduler.add(request, arrived_s)
        if isinstance(outcome, Refusal):
            return LegFailure(request.sequence_id, outcome.kind, outcome.message)
        self._legs[request.sequence_id] = LegRecord()
        self._side.accepted(outcome)
        return None

    def _wrong(self, request: Request) -> str:
        """What would break a step or a hand-off later on; empty if nothing would."""
        model, sampling = self.runner.description, request.sampling
        if request.leg not in _LEGS[self.settings.role]:
            return f"a {request.leg.name} leg on a {self.settings.role.value} worker"
        if request.leg is Leg.DECODE and request.source is None:
            return "a decode leg without a source"
        low, high = min(request.token_ids, default=0), max(request.token_ids, default=0)
        if low < 0 or high >= model.vocab_size:
            return f"token ids from {low} to {high} of a vocabulary of {model.vocab_size}"
        if sampling.grammar and (sampling.min_tokens or not sampling.stop_token_ids):
            return "a grammar for an output that may not end with it"
        if not all(0 <= (count or 0) <= model.vocab_size for count in (sampling.logprobs, sampling.prompt_logprobs)):
            return f"log-probabilities of {sampling.logprobs} and {sampling.prompt_logprobs} tokens each"
        return ""

    def abort(self, sequence_id: str) -> None:
        self._give_up(sequence_id, None)

    def fail(self, failure: LegFailure) -> None:
        """Ends a leg that cannot go on, and tells its router."""
        self._give_up(failure.sequence_id, failure)
        self.desk.fail(failure)

    def _give_up(self, sequence_id: str, failure: LegFailure | None) -> None:
        now = self.clock()
        sequence, record = self.scheduler.abort(sequence_id, now), self._legs.pop(sequence_id, None)
        if sequence is None:
            return
        if record is not None:
            outcome = "aborted" if failure is None else failure.kind.name.lower()
            self._trace(sequence, record, now, outcome, failure.message if failure is not None else None)
        self._side.ended(sequence)

    def _trace(self, sequence: Sequence, record: LegRecord, now: float, outcome: str, error: str | None = None) -> None:
        if self._tracer is not None and sequence.request.traceparent:
            self._tracer.ended(sequence, record, now, outcome, error)

    def land(
        self, sequence_id: str, next_token: int, num_transferred_tokens: int, landed_s: float, times: HandoffTimes
    ) -> None:
        """A decode leg's KV is complete in its blocks, and nothing reads into them any more."""
        sequence = self.scheduler.get(sequence_id)
        if sequence is None or not self.scheduler.land(sequence_id, next_token, num_transferred_tokens, landed_s):
            # It was aborted meanwhile. All of its reads have ended, so nothing else will settle its blocks.
            self.scheduler.settle(sequence_id)
            return
        self._legs[sequence_id].handoff = times
        self.metrics.staged("handoff_wait", times.wait_s)
        self.metrics.staged("handoff_transfer", times.transfer_s)
        if self._step_log is not None:
            self._step_log.landed(landed_s, times)
        if sequence.finish_reason is not None:
            self._emit(Emitted(sequence, next_token, sequence.finish_reason), None, landed_s)

    def release(self, sequence_id: str) -> None:
        """Ends a prefill leg whose KV has been fetched; its blocks stay in the prefix cache."""
        now, sequence = self.clock(), self.scheduler.get(sequence_id)
        if sequence is not None and self.scheduler.release(sequence_id, now):
            self._trace(sequence, self._legs.pop(sequence_id), now, "handed over")
            self.desk.forget(sequence_id)

    def load(self) -> LoadReport:
        self._report_number += 1
        load, counters = self.scheduler.load(), self.scheduler.counters
        moved = self._moved_before + self._side.counters()
        report = load_report(
            self.settings.worker_id,
            self.incarnation,
            self.settings.role,
            self._report_number,
            load,
            self.loop.step_s,
            self.desk.takes_nothing,
            WorkerCounters(
                prompt_tokens_computed=counters.prompt_tokens_computed,
                prompt_tokens_cached=counters.prompt_tokens_cached,
                prompt_tokens_transferred=moved.prompt_tokens_transferred,
                tokens_recomputed=counters.tokens_recomputed,
                tokens_generated=counters.tokens_generated,
                preemptions_recompute=counters.preemptions_recompute,
                steps=counters.steps,
                budget_tokens_used=counters.budget_tokens_used,
                budget_tokens_offered=counters.budget_tokens_offered,
                chunks_pulled=moved.chunks_pulled,
                chunks_pulled_early=moved.chunks_pulled_early,
                bytes_pulled=moved.bytes_pulled,
                pulls_failed=moved.pulls_failed,
                validations_refused=moved.validations_refused,
                leases_expired=moved.leases_expired,
                unknown_completions=moved.unknown_completions,
                requests_finished=counters.requests_finished,
                requests_aborted=counters.requests_aborted,
                prefix_queries=counters.prefix_queries,
                prefix_hits=counters.prefix_hits,
            ),
        )
        self.metrics.reported(report)
        return report

    # --- step loop: a change of role ------------------------------------------------------------------------------

    def when_at_rest(self, tell: Callable[[], object]) -> None:
        """Has `tell` called, once, when no sequence is here and nobody may write to a block of the pool."""
        self._tell_rest = tell

    def fail_all(self, kind: FailureKind, message: str) -> int:
        """Ends every leg and tells its router why; returns how many there were."""
        sequence_ids = list(self._legs)
        for sequence_id in sequence_ids:
            self.fail(LegFailure(sequence_id, kind, message))
        return len(sequence_ids)

    def assume(self, role: Role, incarnation: str, duty: Duty) -> LegTracer | None:
        """Begins another incarnation, in another role, of a worker at rest. Returns the former's tracer, to be closed.

        The blocks keep their content and their names: KV is the same, whatever the role of the worker that has it.
        """
        self.scheduler.set_role(role)
        self._moved_before += self._side.counters()
        self.settings = replace(self.settings, role=role)
        self.incarnation, self.duty, self._side = incarnation, duty, duty.side
        self.metrics.became(self.settings, incarnation)
        if self._step_log is not None:
            self._step_log.close()
            self._step_log = self.loop.log = open_step_log(self.settings, self.runner.description, incarnation)
        former, self._tracer = self._tracer, open_leg_tracer(self.settings, incarnation, self._connector_name)
        self.desk.dismiss()
        return former

    # --- step loop: what became of a step -------------------------------------------------------------------------

    def preempted(self, sequence: Sequence) -> None:
        self._side.preempted(sequence)

    def reserved(self, sequence: Sequence) -> None:
        self._side.reserved(sequence)

    def idle(self, now: float) -> None:
        if now >= self._next_idle_report_s or self.desk.has_news:
            self._next_idle_report_s = now + self.settings.idle_report_s
            self.desk.flush(now)
        if self._tell_rest is not None and self.scheduler.is_empty:
            self._tell_rest()
            self._tell_rest = None

    def committed(self, step: Step, result: StepResult, events: list[Emitted | Progressed], now: float) -> None:
        self.metrics.stepped(step.num_tokens, self.loop.last_step_s)
        logprobs: dict[str, Logprobs] = {}
        for index, entry in result.logprobs.items():
            sequence = step.chunks[index].sequence
            logprobs[sequence.sequence_id] = entry
            if entry.prompt and sequence.sequence_id in self._legs:
                # From the chunk's start on: a preempted sequence computes its prompt again.
                self._legs[sequence.sequence_id].prompt_logprobs[step.chunks[index].start :] = entry.prompt
        refused = {step.chunks[index].sequence.sequence_id: reason for index, reason in result.refused.items()}
        for event in events:
            if isinstance(event, Emitted) and event.sequence.sequence_id in refused:
                self._refuse(event.sequence, refused[event.sequence.sequence_id], now)
            elif isinstance(event, Emitted):
                self._emit(event, logprobs.get(event.sequence.sequence_id), now)
            elif event.sequence.state is State.RUNNING:
                self._side.progressed(event.sequence, event.num_tokens)
        self.desk.flush(now)

    def _refuse(self, sequence: Sequence, reason: str, now: float) -> None:
        """Nothing may follow its output. The scheduler has ended it; its router hears why, instead of a token."""
        self._trace(sequence, self._legs.pop(sequence.sequence_id), now, "refused", reason)
        self._side.ended(sequence)
        self.desk.fail(LegFailure(sequence.sequence_id, FailureKind.REFUSED, reason))

    def _emit(self, event: Emitted, logprobs: Logprobs | None, now: float) -> None:
        sequence = event.sequence
        record = self._legs[sequence.sequence_id]
        first = record.first_token_s is None
        if first:
            record.first_token_s = now
        ended = sequence.state is not State.RUNNING
        summary = self._summary(sequence, record, now) if first or ended else None
        if summary is not None:
            self._tell_stages(sequence.request.leg, summary.times, first, ended)
        batch = TokenBatch(
            sequence_id=sequence.sequence_id,
            first_index=sequence.num_output_tokens - 1,
            token_ids=(event.token_id,),
            logprobs=(logprobs.sampled,) if logprobs is not None and logprobs.sampled is not None else (),
            prompt_logprobs=tuple(record.prompt_logprobs) if first else (),
            finish_reason=event.finish,
            summary=summary,
        )
        if sequence.state is State.EXPORTED:
            # The router keeps its hold on the leg: an abort must still reach the lent blocks.
            self._side.exported(sequence, event.token_id)
            self.desk.emit(batch, ended=False)
            return
        self.desk.emit(batch, ended=ended)
        if ended:
            del self._legs[sequence.sequence_id]
            self._trace(sequence, record, now, event.finish.name.lower() if event.finish is not None else "")
            self._side.ended(sequence)

    def _tell_stages(self, leg: Leg, times: StageTimes, first: bool, ended: bool) -> None:
        """Counts a stage when it is over: a leg whose router has found a stop string is aborted and tells no more."""
        if first and leg is Leg.DECODE:
            self.metrics.staged("decode_admission", times.decode_admission)
        elif first:
            self.metrics.staged("prefill_queue", times.prefill_queue)
            self.metrics.staged("prefill_compute", times.prefill_compute)
        if ended and leg is not Leg.PREFILL:
            self.metrics.staged("decode", times.decode)

    def _summary(self, sequence: Sequence, record: LegRecord, now: float) -> LegSummary:
        assert record.first_token_s is not None
        handoff = record.handoff
        return summarize(sequence, record.first_token_s, handoff.wait_s, handoff.transfer_s, self._connector_name, now)


class LendingDoor(worker_pb2_grpc.HandoffServicer):
    """Shows those who want to read KV to whatever duty the worker has at the moment."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core

    async def Watch(
        self, requests: AsyncIterator[wire.WatcherMessage], context: Context
    ) -> AsyncIterator[wire.LenderMessage]:
        lending, settings = self._core.duty.lending, self._core.settings
        if lending is None:
            message = f"{settings.worker_id} is a {settings.role} worker ({self._core.incarnation}) and lends nothing"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
            return
        async with aclosing(lending.Watch(requests, context)) as messages:
            async for message in messages:
                yield message


def _bind(server: grpc.aio.Server, wire: ClusterWire, host: str, ports: Collection[int]) -> int:
    """Takes the first of these ports that is free, or any if there are none. Raises OSError."""
    for port in ports or (0,):
        try:
            return wire.add_port(server, f"{host}:{port}")
        except RuntimeError:
            continue
    raise OSError(f"{host} has no free port from {min(ports)} to {max(ports)}: router.worker_ports should have more")


class Examination(worker_pb2_grpc.ExaminationServicer):
    """Answers how things are on a worker, for `baton doctor`."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core

    async def Examine(self, request: wire.ExamineRequest, context: Context) -> wire.WorkerExamination:
        core = self._core
        lanes: tuple[wire.Lane, ...] = ()
        sources = [HandoffSource(it.worker_id, it.incarnation, it.address, "") for it in request.sources]
        if sources:
            lanes = await core.duty.meet(sources, request.probe_bytes, request.timeout_s)
        return wire.WorkerExamination(
            worker=core.describe().to_wire(),
            device=core.settings.engine.device,
            lanes=lanes,
            machine=machine.look(),
        )


def _plans_ahead(settings: WorkerSettings) -> bool:
    """A CPU computes a step where it is launched, so there is nothing to be done meanwhile."""
    wanted = settings.scheduler.async_scheduling
    return wanted == "on" or (wanted == "auto" and settings.engine.device == "cuda")
