"""One worker on a virtual clock: the real scheduler, and a cost model where the model would be.

Owns: the order of things inside a turn of the step loop (as `engine.loop` and `engine.desk`), the account of each leg,
what the worker tells the router when, and its figures over the run.
Refuses to know: what is decided (the scheduler's and the router's business) and how KV moves (`virtual_handoff`).

    link --submit, abort--> inbox --+
                                    v                  step_s(work) later
          +--> commands -> plan -> revoke, reserve ......................... commit -> report --+
          +------------------------------ (idle: wait for a command) <--------------------------+

Tokens come one by one, and nobody looks at them while nothing else happens to a sequence (`scheduler.stride`), unless
there is a listener, who sees every chunk. The router hears of a leg's first and, when it ends in whatever way, of the
others in one batch: nothing between is decided by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from baton.capacity.cores import Cores, Work
from baton.capacity.cost import CostModel
from baton.capacity.outcome import Histogram
from baton.capacity.prompts import OUTPUT_TOKEN, extend_names
from baton.capacity.token_gaps import Reader, TokenGaps
from baton.capacity.virtual_handoff import Exchange, Landed, Lender, MovedBytes, Receiver
from baton.capacity.virtual_loop import VirtualLoop
from baton.capacity.virtual_reports import PatientBook, ReportNote
from baton.proto.messages import (
    FailureKind,
    FinishReason,
    Leg,
    LegFailure,
    LegSummary,
    Request,
    Role,
    TokenBatch,
    WorkerDescription,
)
from baton.router.core import RouterCore
from baton.router.legs import Mailbox
from baton.scheduler.account import summarize
from baton.scheduler.plan import Emitted, Logprobs, Progressed, Step, StepResult
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig
from baton.scheduler.sequence import Sequence, State

STEP_MEMORY = 0.2
"""The weight of the last step in the mean that a worker reports, as live."""

_NO_LOGPROBS: dict[int, Logprobs] = {}
_NOBODY_REFUSED: dict[int, str] = {}
_NO_TOKENS = StepResult([], _NO_LOGPROBS, _NOBODY_REFUSED)

StepListener = Callable[[str, Step, float], None]
"""Hears of every plan that decides anything: the worker's name, the step, the time."""


@dataclass(slots=True)
class Figures:
    """What the workers of a pool have done; times are summed over workers."""

    busy_s: float = 0.0
    up_s: float = 0.0
    used_block_s: float = 0.0
    """Share of blocks held, integrated over time."""
    queued_token_s: float = 0.0
    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    tokens_recomputed: int = 0
    preemptions: int = 0
    moved: MovedBytes = field(default_factory=MovedBytes)


class VirtualLink:
    """The router's end of a connection to a worker; a `LegLink`. `cost.routing` says how long each way takes."""

    def __init__(self, description: WorkerDescription, worker: VirtualWorker, routing_s: float) -> None:
        self._description = description
        self._worker = worker
        self._loop = worker.loop
        self._routing_s = routing_s
        self._mailboxes: dict[str, Mailbox] = {}
        self._last_number = 0
        self._lost = ""
        self.rested: Callable[[], None] = lambda: None

    @property
    def description(self) -> WorkerDescription:
        return self._description

    @property
    def num_legs(self) -> int:
        return len(self._mailboxes)

    def submit(self, request: Request, mailbox: Mailbox) -> int:
        if self._lost:
            mailbox(LegFailure(request.sequence_id, FailureKind.WORKER_LOST, self._lost))
            return self._last_number
        self._last_number += 1
        self._mailboxes[request.sequence_id] = mailbox
        number, arrives_s = self._last_number, self._loop.time() + self._routing_s
        self._loop.at(arrives_s, lambda: self._worker.receive(request, number, arrives_s))
        return number

    def abort(self, sequence_id: str) -> None:
        if self._mailboxes.pop(sequence_id, None) is not None and not self._lost:
            self._worker.stop_counting(sequence_id)
            self._loop.at(self._loop.time() + self._routing_s, partial(self._worker.receive_abort, sequence_id))
        self._note_rest()

    def forget(self, sequence_id: str) -> None:
        self._mailboxes.pop(sequence_id, None)
        self._note_rest()

    def deliver(self, batches: list[TokenBatch], failures: list[LegFailure]) -> None:
        for batch in batches:
            ended = batch.finish_reason is not None
            take = self._mailboxes.pop if ended else self._mailboxes.get
            mailbox = take(batch.sequence_id, None)
            if mailbox is not None:
                mailbox(batch)
        for failure in failures:
            mailbox = self._mailboxes.pop(failure.sequence_id, None)
            if mailbox is not None:
                mailbox(failure)
        self._note_rest()

    def lose(self, reason: str) -> None:
        """The stream has ended: every leg fails."""
        if self._lost:
            return
        self._lost = reason
        mailboxes, self._mailboxes = self._mailboxes, {}
        worker_id = self._description.worker_id
        for sequence_id, mailbox in mailboxes.items():
            mailbox(LegFailure(sequence_id, FailureKind.WORKER_LOST, f"{worker_id} was lost: {reason}"))
        self._note_rest()

    def _note_rest(self) -> None:
        if not self._mailboxes:
            self.rested()


class _LegRecord:
    """What one leg has to report when it ends. `num_told`: output tokens that the router knows of. `reader`: None once
    nobody reads them."""

    __slots__ = ("first_token_s", "handoff_transfer_s", "handoff_wait_s", "num_told", "reader", "sequence")

    def __init__(self, sequence: Sequence, reader: Reader | None) -> None:
        self.sequence = sequence
        self.reader = reader
        self.first_token_s: float | None = None
        self.handoff_wait_s = 0.0
        self.handoff_transfer_s = 0.0
        self.num_told = sequence.num_output_tokens


class VirtualWorker:
    """One incarnation of one worker. `link` is the router's end of it.

    `readers` finds who reads a leg's tokens by the first part of its name, the request's.
    """

    def __init__(
        self,
        description: WorkerDescription,
        config: SchedulerConfig,
        cost: CostModel,
        loop: VirtualLoop,
        exchange: Exchange,
        itl: Histogram,
        readers: Mapping[str, Reader],
        figures: Figures,
        random: Random,
        router: RouterCore[VirtualLink],
        book: PatientBook,
        lease_s: float,
        heartbeat_s: float,
        idle_report_s: float,
        listener: StepListener | None = None,
        cores: Cores | None = None,
    ) -> None:
        self.loop = loop
        self.description = description
        self.link = VirtualLink(description, self, cost.routing.routing_s)
        if listener is None:
            config = replace(config, foretold_token=OUTPUT_TOKEN)
        self.scheduler = Scheduler(config, extend_names)
        self._cost = cost
        self._scatters = bool(cost.jitter.decode or cost.jitter.prefill)
        self._exchange = exchange
        self._gaps = TokenGaps(itl)
        self._readers = readers
        self._figures = figures
        self._random = random
        self._router = router
        self._book = book
        self._idle_report_s = idle_report_s
        self._listener = listener
        self._cores = cores
        self._computing: Work | None = None
        self._lender: Lender | None = None
        self._receiver: Receiver | None = None
        name, block_size = description.incarnation, config.block_size
        if config.role is Role.PREFILL:
            self._lender = Lender(name, exchange, self, block_size, lease_s, heartbeat_s)
            exchange.add_lender(self._lender)
        elif config.role is Role.DECODE:
            self._receiver = Receiver(name, exchange, self, block_size, figures.moved)
            exchange.add_receiver(self._receiver)
        self._legs: dict[str, _LegRecord] = {}
        self._inbox: list[Callable[[], None]] = []
        self._busy = False
        self._turn_is_due = False
        self._gone = False
        self._batches: list[TokenBatch] = []
        self._failures: list[LegFailure] = []
        self._last_submit = 0
        self._num_reports = 0
        self._next_idle_report_s = loop.time()
        self._idle_report_is_due = False
        self._news = True
        self._step_s = 0.0
        self._started_s = self._seen_s = loop.time()
        self._used = 0.0
        self._queued = 0

    def open(self) -> None:
        """Tells the router at once how much there is to take."""
        self._router.reported(self._note(self.loop.time()).report())

    # --- from the router --------------------------------------------------------------------------------------------

    def receive(self, request: Request, number: int, arrived_s: float) -> None:
        self._call(lambda: self._submit(request, number, arrived_s))

    def receive_abort(self, sequence_id: str) -> None:
        self._call(partial(self._abort, sequence_id))

    def stop_counting(self, sequence_id: str) -> None:
        """Its reader is gone: what it has got by now is all that it gets."""
        record = self._legs.get(sequence_id)
        if record is not None and record.reader is not None:
            self.scheduler.write_up(record.sequence)
            self._gaps.leave(record.sequence)
            record.reader.num_unsent = record.sequence.num_output_tokens - record.num_told
            record.reader = None

    def close(self) -> list[TokenBatch]:
        """Ends at once, a step in progress included; returns what it had said by then and the router has not heard."""
        if self._gone:
            return []
        batches = self._batches
        for record in self._legs.values():
            self.scheduler.write_up(record.sequence)
            self._gaps.leave(record.sequence)
            batches.extend(self._rest_of(record))
        self._gone = True
        if self._cores is not None and self._computing is not None:
            self._cores.drop(self._computing)
        self._exchange.remove(self.description.incarnation)
        self._account()
        counters, figures = self.scheduler.counters, self._figures
        figures.up_s += self.loop.time() - self._started_s
        figures.steps += counters.steps
        figures.prompt_tokens_computed += counters.prompt_tokens_computed
        figures.tokens_generated += counters.tokens_generated
        figures.tokens_recomputed += counters.tokens_recomputed
        figures.preemptions += counters.preemptions_recompute
        return batches

    # --- from the hand-off (virtual_handoff.Worker) -----------------------------------------------------------------

    def release(self, sequence_id: str) -> None:
        self._call(partial(self._release, sequence_id))

    def expire(self, sequence_id: str, reason: str) -> None:
        self._call(partial(self._fail, LegFailure(sequence_id, FailureKind.LEASE_LOST, reason)))

    def announce(self, sequence_id: str) -> None:
        self._call(partial(self.scheduler.announce, sequence_id))

    def land(self, sequence_id: str, next_token: int, landed: Landed) -> None:
        self._call(lambda: self._land(sequence_id, next_token, landed))

    def lose_source(self, sequence_id: str, reason: str) -> None:
        self._call(partial(self._fail, LegFailure(sequence_id, FailureKind.SOURCE_LOST, reason)))

    def settle(self, sequence_id: str) -> None:
        self._call(partial(self.scheduler.settle, sequence_id))

    # --- the step loop ----------------------------------------------------------------------------------------------

    def _call(self, command: Callable[[], object]) -> None:
        """Runs a command between two steps, in order; those of one moment together before the next plan."""
        if self._gone:
            return
        if self._busy:
            self._inbox.append(command)  # type: ignore[arg-type]
            return
        command()
        self._news = True
        if not self._turn_is_due:
            self._turn_is_due = True
            self.loop.at(self.loop.time(), self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        if self._busy or self._gone:
            return
        now = self.loop.time()
        if not self.scheduler.has_work():
            self._account()
            self._idle(now)
            return
        while True:
            step = self.scheduler.plan(now)
            for sequence in step.skipped:
                self._gaps.leave(sequence)
            for sequence in step.preempted:
                self._gaps.leave(sequence)
                if self._lender is not None:
                    self._lender.preempted(sequence)
            side = self._lender or self._receiver
            if side is not None:
                for sequence in step.reserved:
                    side.reserved(sequence)
            nothing = not (step.num_tokens or step.preempted or step.reserved)
            if self._listener is not None and not nothing:
                self._listener(self.description.worker_id, step, now)
            if step.num_tokens or nothing:
                break
        self._account()
        if not step.num_tokens:
            self._idle(now)
            return
        work = step.work()
        seconds = self._cost.step_s(*work) + self._cost.routing.token_cpu_s * work.decode_sequences
        if self._scatters:
            seconds *= self._cost.jitter.at(self._random.random(), work.prefill_tokens)
        self._busy = True
        if self._cores is not None:
            self._computing = self._cores.step(seconds, partial(self._end_shared_step, self._cores, step, now))
            return
        self._note_length(seconds)
        self.loop.at(now + seconds, partial(self._end_step, step))

    def _note_length(self, seconds: float) -> None:
        self._figures.busy_s += seconds
        self._step_s += STEP_MEMORY * (seconds - self._step_s)

    def _end_shared_step(self, cores: Cores, step: Step, began_s: float) -> None:
        """How long it took is known now only. What it has to say takes cores from the next step."""
        self._computing = None
        self._note_length(self.loop.time() - began_s)
        num_before = self.scheduler.counters.tokens_generated
        self._end_step(step)
        num_tokens = self.scheduler.counters.tokens_generated - num_before
        cores.spend(cores.cost.step_cpu_s + num_tokens * cores.cost.token_cpu_s)

    def _end_step(self, step: Step) -> None:
        if self._gone:
            return
        now, result = self.loop.time(), _NO_TOKENS
        if step.chunks:
            result = StepResult([OUTPUT_TOKEN] * len(step.chunks), _NO_LOGPROBS, _NOBODY_REFUSED)
        events = self.scheduler.commit(step, result, now)
        self._busy = False
        self._news = True
        if events:
            self._hear(events, now)
        else:
            self._gaps.step(now)
        self._flush(now)
        if self._inbox:
            commands, self._inbox = self._inbox, []
            for command in commands:
                command()
        self._turn()

    def _hear(self, events: list[Emitted | Progressed], now: float) -> None:
        """All who had a token at the last step have one again, but for those who have left meanwhile."""
        gaps = self._gaps
        in_stride: list[Emitted] = []
        others: list[Emitted] = []
        for event in events:
            if isinstance(event, Emitted):
                (in_stride if event.sequence in gaps else others).append(event)
            elif self._lender is not None and event.sequence.state is State.RUNNING:
                self._lender.progressed(event.sequence, event.num_tokens)
        gaps.step(now)
        for event in in_stride:
            if event.finish is not None:
                self._finished(event.sequence, event.finish, now)
        for event in others:
            self._spoke(event.sequence, event.finish, now)

    def _spoke(self, sequence: Sequence, finish: FinishReason | None, now: float) -> None:
        """A leg's first token, or its first after a pause."""
        record = self._legs[sequence.sequence_id]
        if record.reader is not None:
            self._gaps.enter(sequence, record.reader)
        if finish is not None:
            if record.first_token_s is None:
                record.first_token_s = now
            self._finished(sequence, finish, now)
            return
        if record.first_token_s is not None:
            return
        record.first_token_s = now
        first_index = sequence.num_output_tokens - 1
        record.num_told = first_index + 1
        summary = self._summary(record, now)
        token_ids = (sequence.token_ids[-1],)
        self._batches.append(TokenBatch(sequence.sequence_id, first_index, token_ids, summary=summary))
        if sequence.state is State.EXPORTED:
            self._gaps.leave(sequence)
            assert self._lender is not None
            self._lender.exported(sequence, token_ids[0])

    def _finished(self, sequence: Sequence, finish: FinishReason, now: float) -> None:
        self._gaps.leave(sequence)
        record = self._legs.pop(sequence.sequence_id)
        first_index = record.num_told
        self._batches.append(
            TokenBatch(
                sequence.sequence_id,
                first_index,
                tuple(sequence.token_ids[sequence.num_prompt_tokens + first_index :]),
                finish_reason=finish,
                summary=self._summary(record, now),
            )
        )
        self._side_ended(sequence)

    def _rest_of(self, record: _LegRecord) -> list[TokenBatch]:
        """What a leg has said and the router has not heard."""
        sequence, first_index = record.sequence, record.num_told
        token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + first_index :])
        return [TokenBatch(sequence.sequence_id, first_index, token_ids)] if token_ids else []

    def _summary(self, record: _LegRecord, now: float) -> LegSummary:
        assert record.first_token_s is not None
        return summarize(
            record.sequence, record.first_token_s, record.handoff_wait_s, record.handoff_transfer_s, "virtual", now
        )

    # --- commands ---------------------------------------------------------------------------------------------------

    def _submit(self, request: Request, number: int, arrived_s: float) -> None:
        self._last_submit = number
        outcome = self.scheduler.add(request, arrived_s)
        if isinstance(outcome, Refusal):
            self._failures.append(LegFailure(request.sequence_id, outcome.kind, outcome.message))
            return
        # Without a reader its request is over; the abort is on its way.
        reader = self._readers.get(request.sequence_id.partition(".")[0])
        if reader is not None:
            reader.num_unsent = 0
        self._legs[request.sequence_id] = _LegRecord(outcome, reader)
        if self._lender is not None:
            self._lender.accepted(outcome)
        elif request.leg is Leg.DECODE:
            assert self._receiver is not None
            self._receiver.accepted(outcome)

    def _abort(self, sequence_id: str) -> None:
        record = self._legs.pop(sequence_id, None)
        sequence = self.scheduler.abort(sequence_id, self.loop.time())
        if sequence is not None:
            if record is not None:
                self._gaps.leave(sequence)
            self._side_ended(sequence)

    def _fail(self, failure: LegFailure) -> None:
        """Ends a leg that cannot go on, and tells its router."""
        record = self._legs.get(failure.sequence_id)
        if record is not None:
            self._batches.extend(self._rest_of(record))
            self._failures.append(failure)
        self._abort(failure.sequence_id)

    def _release(self, sequence_id: str) -> None:
        if self.scheduler.release(sequence_id, self.loop.time()):
            del self._legs[sequence_id]

    def _land(self, sequence_id: str, next_token: int, landed: Landed) -> None:
        sequence = self.scheduler.get(sequence_id)
        if sequence is None or not self.scheduler.land(sequence_id, next_token, landed.num_tokens, landed.at_s):
            self.scheduler.settle(sequence_id)
            return
        record = self._legs[sequence_id]
        record.handoff_wait_s, record.handoff_transfer_s = landed.wait_s, landed.transfer_s
        if sequence.finish_reason is not None:
            record.first_token_s = landed.at_s
            self._finished(sequence, sequence.finish_reason, landed.at_s)

    def _side_ended(self, sequence: Sequence) -> None:
        if self._lender is not None:
            self._lender.ended(sequence)
        elif self._receiver is not None:
            self._receiver.ended(sequence)

    # --- reports ----------------------------------------------------------------------------------------------------

    def _idle(self, now: float) -> None:
        """Nothing to compute: a report is due at times, and at once if there is something to say."""
        if self._batches or self._failures or now >= self._next_idle_report_s:
            self._report_idle()
        elif self._news and not self._idle_report_is_due:
            self._idle_report_is_due = True
            self.loop.at(self._next_idle_report_s, self._report_idle_when_due)

    def _report_idle_when_due(self) -> None:
        self._idle_report_is_due = False
        if not self._busy and not self._gone and self._news:
            self._report_idle()

    def _report_idle(self) -> None:
        now = self.loop.time()
        self._next_idle_report_s = now + self._idle_report_s
        self._flush(now)

    def _flush(self, now: float) -> None:
        """Sends the router what there is to say, and the load."""
        batches, failures = self._batches, self._failures
        if batches or failures:
            self._batches, self._failures = [], []
        self._news = False
        note = self._note(now + self._cost.routing.report_delay_s)
        if batches or failures or self._router.dispatcher.num_requests:
            self.loop.at(note.arrives_s, partial(self._arrive, batches, failures, note))
        else:
            self._book.leave(note)

    def _note(self, arrives_s: float) -> ReportNote:
        self._num_reports += 1
        load = self.scheduler.load()
        return ReportNote(arrives_s, self.description, self._num_reports, load, self._step_s, self._last_submit)

    def _arrive(self, batches: list[TokenBatch], failures: list[LegFailure], note: ReportNote) -> None:
        if batches or failures:
            self.link.deliver(batches, failures)
        if self._router.dispatcher.num_requests:
            self._router.reported(note.report())
        else:
            self._book.lay_down(note)

    def _account(self) -> None:
        """Integrates what it held since the last look."""
        now, pool = self.loop.time(), self.scheduler.pool
        since_s, self._seen_s = now - self._seen_s, now
        self._figures.used_block_s += self._used * since_s
        self._figures.queued_token_s += self._queued * since_s
        self._used = 1 - pool.num_available / pool.num_blocks
        self._queued = self.scheduler.queued_tokens
