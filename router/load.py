"""The router's live estimate of each worker: its last load report, and what this router sent since.

Owns: the count of legs in flight and their tokens, from placement to the end of the leg.
Refuses to know: streams, the clock (`now` is an argument), and what is decided from the figures.

    leg:  book()/dispatched() --sent(number)--> on the wire --report(last_submit >= number)--> in the worker's figures
                                                                    ... ended() or remove_worker(), on every way out

Invariant: legs in flight = legs dispatched - legs ended, in total and as the sum over workers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from baton.proto.messages import FailureKind, Leg, LoadReport, Role, WorkerDescription
from baton.router.placement import Placement, PlacementQuery, WorkerView


class Choice(NamedTuple):
    """A leg given to a worker. `reason`: the policy's, without the figures that it weighed."""

    leg: Leg
    worker_id: str
    reason: str


@dataclass(slots=True)
class LoadCounts:
    """Counts since the book was opened. `retries`: attempts that follow on a failure of each kind."""

    dispatched: int = 0
    ended: int = 0
    reports: int = 0
    reports_ignored: int = 0
    ends_ignored: int = 0
    choices: Counter[Choice] = field(default_factory=Counter)
    retries: Counter[FailureKind] = field(default_factory=Counter)


@dataclass(slots=True)
class _Leg:
    number: int | None
    prefill_tokens: int
    kv_tokens: int


@dataclass(slots=True)
class _Worker:
    """One incarnation of a worker. `unseen`: its legs that the last report does not include. `standing`: what follows
    from all this for placement, until some of it changes."""

    description: WorkerDescription
    draining: bool = False
    report: LoadReport | None = None
    reported_at: float = 0.0
    legs: dict[str, _Leg] = field(default_factory=dict)
    unseen: dict[str, _Leg] = field(default_factory=dict)
    kv_tokens: int = 0
    standing: WorkerView | None = None

    @property
    def takes_nothing(self) -> bool:
        return self.draining or (self.report is not None and self.report.draining)


class LoadBook:
    """Who has how much to do, as far as this router can know. `credit_steps`: prompt tokens that a worker may hold
    uncomputed, in multiples of its `max_num_batched_tokens`.

    Of `replicas` routers each has a book. A report counts what all of them have sent, so what it leaves of a worker's
    credit is divided among them until the next one:

        |<------------------------ credit ----------------------->|
        |  reported, from any replica  |  share  |  share  | share |    own unseen legs are taken off the own share

    A replica that has sent nothing since the report may send one leg that fits into all of what is left, or else a
    prompt above a share would wait for an idle worker. So between two reports a worker may get, beyond its credit, at
    most one prompt from each replica but the first; and a replica that is alone busy can still use the whole credit, a
    share a report.
    """

    def __init__(self, credit_steps: float = 2.0, replicas: int = 1) -> None:
        self.counts = LoadCounts()
        self._credit_steps = credit_steps
        self._replicas = replicas
        self._workers: dict[str, _Worker] = {}
        self._worker_of: dict[str, str] = {}
        self._serving_roles: frozenset[Role] | None = None

    def add_worker(self, description: WorkerDescription) -> None:
        """Starts the account of one incarnation. The account of an earlier one must have been closed."""
        if description.worker_id in self._workers:
            raise ValueError(f"worker {description.worker_id} is in the book already: remove it first")
        self._workers[description.worker_id] = _Worker(description)
        self._serving_roles = None

    def remove_worker(self, worker_id: str) -> list[str]:
        """Closes the account; the legs that were on it have ended and are returned. An unknown worker had none."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        legs = list(worker.legs)
        for leg_id in legs:
            self.ended(leg_id)
        del self._workers[worker_id]
        self._serving_roles = None
        return legs

    def report(self, report: LoadReport, now: float) -> bool:
        """Takes in a report; False, and counted, if it is of another incarnation or not newer than the last."""
        worker = self._workers.get(report.worker_id)
        if (
            worker is None
            or worker.description.incarnation != report.incarnation
            or (worker.report is not None and report.sequence_number <= worker.report.sequence_number)
        ):
            self.counts.reports_ignored += 1
            return False
        self.counts.reports += 1
        if report.draining != (worker.report is not None and worker.report.draining):
            self._serving_roles = None
        worker.standing = None
        worker.report = report
        worker.reported_at = now - report.age_s
        if worker.unseen:
            worker.unseen = {
                leg_id: leg
                for leg_id, leg in worker.unseen.items()
                if leg.number is None or leg.number > report.last_submit
            }
        return True

    def book(self, query: PlacementQuery, placement: Placement) -> None:
        """Counts every leg of a placement, named by `query.leg_id`, from the moment of the decision."""
        reason = placement.reason.partition(":")[0]
        for leg, worker_id in placement.legs():
            self.counts.choices[Choice(leg, worker_id, reason)] += 1
            prefill_tokens = 0 if leg is Leg.DECODE else placement.uncached_tokens
            kv_tokens = query.num_tokens if leg is Leg.PREFILL else query.expected_tokens
            self.dispatched(worker_id, query.leg_id(leg), None, prefill_tokens, kv_tokens - placement.shared_tokens)

    def withdraw(self, query: PlacementQuery, placement: Placement) -> None:
        """Ends every leg of a placement that nobody will use."""
        for leg, _ in placement.legs():
            self.ended(query.leg_id(leg))

    def dispatched(self, worker_id: str, leg_id: str, number: int | None, prefill_tokens: int, kv_tokens: int) -> None:
        """Counts a leg. `number` is that of its Submit on the worker's stream, None until `sent` tells it."""
        if leg_id in self._worker_of:
            raise ValueError(f"leg {leg_id} is in flight already, on {self._worker_of[leg_id]}")
        worker = self._workers[worker_id]
        block_size = worker.description.block_size
        leg = _Leg(number, prefill_tokens, -(-kv_tokens // block_size) * block_size)
        worker.standing = None
        worker.legs[leg_id] = worker.unseen[leg_id] = leg
        worker.kv_tokens += leg.kv_tokens
        self._worker_of[leg_id] = worker_id
        self.counts.dispatched += 1

    def sent(self, leg_id: str, number: int) -> None:
        """Tells the number of the Submit that carried a leg. A leg that has ended meanwhile is ignored."""
        leg = self._leg(leg_id)
        if leg is not None:
            leg.number = number

    def prefilled(self, leg_id: str) -> None:
        """The leg's prompt is computed. An unknown leg is ignored."""
        leg = self._leg(leg_id)
        if leg is not None:
            leg.prefill_tokens = 0
            self._workers[self._worker_of[leg_id]].standing = None

    def ended(self, leg_id: str) -> bool:
        """Releases a leg, on whatever way it ended. False, and counted, if it has ended before."""
        worker_id = self._worker_of.pop(leg_id, None)
        if worker_id is None:
            self.counts.ends_ignored += 1
            return False
        worker = self._workers[worker_id]
        worker.standing = None
        worker.kv_tokens -= worker.legs.pop(leg_id).kv_tokens
        worker.unseen.pop(leg_id, None)
        self.counts.ended += 1
        return True

    def set_draining(self, worker_id: str, draining: bool) -> None:
        """Takes a worker out of placement, or back in. An unknown worker is ignored."""
        if worker_id in self._workers:
            self._workers[worker_id].draining = draining
            self._workers[worker_id].standing = None
            self._serving_roles = None

    def views(self, now: float, role: Role | None = None) -> list[WorkerView]:
        """One view a worker, in the order in which they were added."""
        return [
            replace(self._standing(worker), age_s=_age_s(worker, now))
            for worker in self._workers.values()
            if role is None or worker.description.role is role
        ]

    def view(self, worker_id: str, now: float) -> WorkerView:
        worker = self._workers[worker_id]
        return replace(self._standing(worker), age_s=_age_s(worker, now))

    def standings(self) -> dict[str, WorkerView]:
        """All views by worker, without the ages of reports: what placement decides by. Only what has changed since the
        last call is worked out anew."""
        return {worker_id: worker.standing or self._standing(worker) for worker_id, worker in self._workers.items()}

    def standing(self, worker_id: str) -> WorkerView:
        """One of `standings`."""
        return self._standing(self._workers[worker_id])

    def serving_roles(self) -> frozenset[Role]:
        """Roles of which at least one worker is there and not draining; the same object until that changes."""
        if self._serving_roles is None:
            self._serving_roles = frozenset(
                worker.description.role for worker in self._workers.values() if not worker.takes_nothing
            )
        return self._serving_roles

    def last_report(self, worker_id: str) -> LoadReport | None:
        worker = self._workers.get(worker_id)
        return worker.report if worker is not None else None

    @property
    def in_flight(self) -> int:
        return len(self._worker_of)

    def check(self) -> None:
        """Asserts the invariants: for tests, and for a router that wants to know."""
        assert self.in_flight == self.counts.dispatched - self.counts.ended
        assert self.in_flight == sum(len(worker.legs) for worker in self._workers.values())
        for worker_id, worker in self._workers.items():
            assert all(self._worker_of[leg_id] == worker_id for leg_id in worker.legs)
            assert worker.unseen.keys() <= worker.legs.keys()
            assert worker.kv_tokens == sum(leg.kv_tokens for leg in worker.legs.values())
            assert worker.standing in (None, self._view(worker)), "a view that is kept does not follow from the account"
        serving = {worker.description.role for worker in self._workers.values() if not worker.takes_nothing}
        assert self.serving_roles() == serving

    def _leg(self, leg_id: str) -> _Leg | None:
        worker_id = self._worker_of.get(leg_id)
        return self._workers[worker_id].legs[leg_id] if worker_id is not None else None

    def _standing(self, worker: _Worker) -> WorkerView:
        if worker.standing is None:
            worker.standing = self._view(worker)
        return worker.standing

    def _view(self, worker: _Worker) -> WorkerView:
        description, report = worker.description, worker.report
        total_kv_tokens = description.num_blocks * description.block_size
        unseen = len(worker.unseen)
        unseen_tokens = used_kv_tokens = 0
        for leg in worker.unseen.values():
            unseen_tokens += leg.prefill_tokens
            used_kv_tokens += leg.kv_tokens
        reported_tokens = reported = 0
        if report is not None:
            reported_tokens = report.queued_tokens
            reported = report.running + report.waiting + report.receiving
            used_kv_tokens += (report.total_blocks - report.free_blocks) * description.block_size
        # A decode worker knows of a leg before it reserves blocks for it, so its report alone can promise too much.
        running = max(reported + unseen, len(worker.legs))
        used_kv_tokens = max(used_kv_tokens, self._promised_kv_tokens(worker, running))
        max_sequences = description.max_num_seqs
        if description.role is Role.PREFILL:
            max_sequences = int(self._credit_steps * max_sequences) or 1
        max_tokens = int(self._credit_steps * description.max_num_batched_tokens)
        return WorkerView(
            worker_id=description.worker_id,
            incarnation=description.incarnation,
            role=description.role,
            host=description.address.rpartition(":")[0],
            block_size=description.block_size,
            max_num_batched_tokens=description.max_num_batched_tokens,
            max_num_seqs=description.max_num_seqs,
            total_kv_tokens=total_kv_tokens,
            queued_tokens=reported_tokens + unseen_tokens,
            running=running,
            free_kv_tokens=max(0, total_kv_tokens - used_kv_tokens),
            credit_tokens=self._share(max_tokens - reported_tokens, unseen_tokens, unseen),
            credit_sequences=self._share(max_sequences - (running - unseen), unseen, unseen),
            in_flight=len(worker.legs),
            step_s=report.step_s if report is not None else 0.0,
            draining=worker.takes_nothing,
        )

    def _share(self, left: int, used: int, unseen: int) -> int:
        """This replica's part of what the last report leaves, less what it has used since; see the class."""
        share = -(-left // self._replicas) if unseen else left
        return max(0, share - used)

    def _promised_kv_tokens(self, worker: _Worker, running: int) -> int:
        """What the legs on a worker will hold: this router's as it knows them, the others' as if they were alike."""
        own = len(worker.legs)
        if self._replicas == 1 or not own or running <= own:
            return worker.kv_tokens
        return worker.kv_tokens * running // own


def _age_s(worker: _Worker, now: float) -> float | None:
    return now - worker.reported_at if worker.report is not None else None
