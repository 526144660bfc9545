"""The queue in which requests wait until a worker has credit, so that the choice is late and fresh.

Owns: order (priority, then arrival), bounds, deadlines of the wait, and the moment at which a placement is booked.
Refuses to know: streams, retries, and how a worker is chosen (`router.policies`).

    push --> waiting --advance(now)--> Placement, booked in the LoadBook   (the head first, nobody overtakes it)
                |           '-------> DeadlinePassed | NoWorker
                '--remove--> gone

`DispatchQueue` decides and knows no event loop, so a simulator can drive it; `Dispatcher` awaits its decisions.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from baton.proto.messages import Role
from baton.router.config import RouterSettings
from baton.router.load import LoadBook
from baton.router.placement import (
    Candidate,
    Placement,
    PlacementPolicy,
    PlacementQuery,
    WorkerView,
    can_serve,
    fork_at,
    may_stay,
)
from baton.router.prefix_index import PrefixIndex
from baton.router.standstill import SINKS, SOURCES, Standstill, lacking

RATE_WINDOW_S = 10.0
MIN_TIMER_S = 0.001
MIN_RETRY_S, DEFAULT_RETRY_S, MAX_RETRY_S = 0.1, 1.0, 60.0


@dataclass(frozen=True, slots=True)
class QueueFull:
    """Refused at the door. `retry_after_s`: when there will be room at the present rate."""

    retry_after_s: float
    message: str


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No worker of a needed role has been there for longer than the grace period."""

    message: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline came while the request was waiting."""

    waited_s: float
    message: str


Outcome = Placement | NoWorker | DeadlinePassed


class Stage(StrEnum):
    """What a waiting request lacks: everything, or (late binding, its prompt is computed) a decode worker, or (a fork)
    credit at the worker that has the prompt's KV."""

    START = "start"
    DECODE = "decode"
    FORK = "fork"


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """One place in the queue; sorts by urgency, arrival, and the order of the pushes."""

    priority: int
    arrived_s: float
    number: int
    stage: Stage = field(compare=False)
    query: PlacementQuery = field(compare=False)
    pushed_s: float = field(compare=False)
    deadline: float | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class Decision:
    ticket: Ticket
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class _Left:
    """A request that left for a worker: what the rate is made of."""

    at: float
    num_tokens: int


class DispatchQueue:
    """Who waits, and who goes where next. Every method that needs the time takes `now`."""

    def __init__(
        self, load: LoadBook, index: PrefixIndex, policy: PlacementPolicy, settings: RouterSettings, now: float
    ) -> None:
        self._load = load
        self._index = index
        self._policy = policy
        self._settings = settings
        self._waiting: dict[Stage, list[Ticket]] = {stage: [] for stage in Stage}
        self._num_waiting = 0
        self._num_tokens = 0
        self._pushed = 0
        self._left: deque[_Left] = deque()
        # Since when nobody could serve a stage, however idle; None: somebody can. A draining worker takes nothing new.
        # Not for forks: each waits for a worker of its own, and not at all if that cannot serve it.
        self._unserved_since: dict[Stage, float | None] = {Stage.START: now, Stage.DECODE: now, Stage.FORK: None}
        self._roles_seen: frozenset[Role] | None = None
        self._standstills: dict[Stage, Standstill] = {}
        # Not later than the first deadline of those who wait; earlier after a removal, until the next look.
        self._next_deadline = math.inf

    def push(
        self, query: PlacementQuery, deadline: float | None, now: float, stage: Stage = Stage.START
    ) -> Ticket | QueueFull:
        """Puts a request in its place. The bounds are for newcomers: who was admitted once is not turned away."""
        if stage is Stage.START and query.attempt == 0:
            full = self._full(query, now)
            if full is not None:
                return full
        self._pushed += 1
        ticket = Ticket(query.priority, query.arrived_s, self._pushed, stage, query, now, deadline)
        insort(self._waiting[stage], ticket)
        self._num_waiting += 1
        self._num_tokens += _num_tokens(ticket)
        if deadline is not None:
            self._next_deadline = min(self._next_deadline, deadline)
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Takes a request out; False if it has left already."""
        waiting = self._waiting[ticket.stage]
        place = bisect_left(waiting, ticket)
        if place == len(waiting) or waiting[place].number != ticket.number:
            return False
        del waiting[place]
        self._num_waiting -= 1
        self._num_tokens -= _num_tokens(ticket)
        return True

    def advance(self, now: float) -> list[Decision]:
        """All that can be decided now. Placements are booked one by one, so that no credit is given twice.

        Forks go first, which bring next to no work, then those whose prompt is computed: their KV keeps a prefill
        worker's blocks until it is fetched.
        """
        self._observe(now)
        if not self._num_waiting:
            return []
        decisions = self._expire(now)
        if not self._num_waiting:
            return decisions
        views = self._load.standings()
        decisions += self._advance_forks(views, now)
        for stage in (Stage.DECODE, Stage.START):
            while self._waiting[stage]:
                ticket = self._waiting[stage][0]
                placement = self._place(ticket, views)
                if placement is None:
                    break
                self._take(ticket, placement, views, now)
                decisions.append(Decision(ticket, placement))
        return decisions

    def next_event(self) -> float | None:
        """The time at which waiting alone may decide something: a deadline, or the end of a grace period."""
        if not self._num_waiting:
            return None
        at = self._next_deadline
        for stage, waiting in self._waiting.items():
            since = self._unserved_since[stage]
            if waiting and since is not None:
                at = min(at, since + self._settings.no_worker_grace_s)
        return at if at < math.inf else None

    @property
    def num_requests(self) -> int:
        return self._num_waiting

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of those who wait for a start."""
        return self._num_tokens

    def _full(self, query: PlacementQuery, now: float) -> QueueFull | None:
        """The token bound lets anything into an empty queue: what it can never take is refused elsewhere."""
        num_requests = len(self._waiting[Stage.START])
        max_requests, max_tokens = self._settings.max_queued_requests, self._settings.max_queued_tokens
        if num_requests >= max_requests:
            message = f"{num_requests} requests are waiting, the most allowed is {max_requests}"
        elif num_requests and self._num_tokens + query.num_tokens > max_tokens:
            message = (
                f"{self._num_tokens} prompt tokens are waiting, {query.num_tokens} more would exceed the {max_tokens} "
                "allowed"
            )
        else:
            return None
        return QueueFull(self._retry_after(self._num_tokens + query.num_tokens - max_tokens, now), message)

    def _retry_after(self, excess_tokens: int, now: float) -> float:
        """Time until one request and the excess tokens have left, at the rate of the last seconds."""
        self._forget_old(now)
        if not self._left:
            return DEFAULT_RETRY_S
        elapsed_s = max(now - self._left[0].at, MIN_RETRY_S)
        num_tokens = max(1, sum(left.num_tokens for left in self._left))
        wait_s = max(elapsed_s / len(self._left), excess_tokens * elapsed_s / num_tokens)
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)

    def _forget_old(self, now: float) -> None:
        while self._left and self._left[0].at < now - RATE_WINDOW_S:
            self._left.popleft()

    def _advance_forks(self, views: dict[str, WorkerView], now: float) -> list[Decision]:
        """As `advance` does, for those who wait for one worker each: nobody overtakes another at the same one."""
        decisions = []
        full: set[str] = set()
        for ticket in list(self._waiting[Stage.FORK]):
            query = ticket.query
            view = views.get(query.at)
            if view is None or view.draining:
                self.remove(ticket)
                decisions.append(Decision(ticket, NoWorker(f"{query.at} takes nothing any more")))
                continue
            placement = fork_at(query, self._candidate(query, view)) if query.at not in full else None
            if placement is None:
                full.add(query.at)
                continue
            self._take(ticket, placement, views, now)
            decisions.append(Decision(ticket, placement))
        return decisions

    def _take(self, ticket: Ticket, placement: Placement, views: dict[str, WorkerView], now: float) -> None:
        self.remove(ticket)
        self._load.book(ticket.query, placement)
        for leg in placement.legs():
            self._index.record(leg.worker_id, ticket.query.prefix_hashes)
            if self._num_waiting:
                views[leg.worker_id] = self._load.standing(leg.worker_id)
        if ticket.stage is Stage.START:
            self._left.append(_Left(now, ticket.query.num_tokens))
            self._forget_old(now)

    def _observe(self, now: float) -> None:
        roles = self._load.serving_roles()
        if roles is self._roles_seen:
            return
        self._roles_seen = roles
        served = {
            Stage.START: can_serve(roles),
            Stage.DECODE: Role.DECODE in roles,
            Stage.FORK: True,
        }
        for stage, is_served in served.items():
            if is_served:
                self._unserved_since[stage] = None
            elif self._unserved_since[stage] is None:
                self._unserved_since[stage] = now

    def _expire(self, now: float) -> list[Decision]:
        decisions = []
        for stage in Stage:
            since = self._unserved_since[stage]
            forsaken = since is not None and since + self._settings.no_worker_grace_s <= now
            if not forsaken and now < self._next_deadline:
                continue
            for ticket in list(self._waiting[stage]):
                outcome: Outcome
                if ticket.deadline is not None and ticket.deadline <= now:
                    waited_s = now - ticket.pushed_s
                    outcome = DeadlinePassed(waited_s, f"the deadline passed after {waited_s:.3f} s in the queue")
                elif forsaken and since is not None:
                    outcome = NoWorker(f"{_LACKING[stage]} for {now - since:.1f} s")
                else:
                    continue
                self.remove(ticket)
                decisions.append(Decision(ticket, outcome))
        if self._next_deadline <= now:
            waiting = [ticket for tickets in self._waiting.values() for ticket in tickets]
            self._next_deadline = min((t.deadline for t in waiting if t.deadline is not None), default=math.inf)
        return decisions

    def _place(self, ticket: Ticket, views: Mapping[str, WorkerView]) -> Placement | None:
        """The policy's choice. One that nobody could take is not weighed again until that may have changed."""
        query, standstill = ticket.query, self._standstills.get(ticket.stage)
        if standstill is not None and standstill.number != ticket.number:
            standstill = None
        if standstill is not None and standstill.lasts(query, views, self._candidate):
            return None
        decode = self._candidates(query, views.values(), Role.DECODE)
        if ticket.stage is Stage.DECODE:
            placement, roles = self._policy.choose_decode(query, decode), SINKS
        else:
            prefill = self._candidates(query, views.values(), Role.COLOCATED)
            if any(not candidate.view.draining for candidate in decode):
                prefill += self._candidates(query, views.values(), Role.PREFILL)
            if self._settings.binding == "late":
                placement = self._policy.choose_prefill(query, prefill)
            else:
                placement = self._policy.choose(query, prefill, decode)
            roles = lacking(query, prefill, decode) if placement is None else SOURCES
            if placement is not None and placement.prefill is not None:
                source, limit = views[placement.prefill], self._settings.short_output_tokens
                placement = placement.stays() if may_stay(query, source, limit) else placement
        if placement is None:
            self._standstills[ticket.stage] = Standstill(ticket.number, roles, views)
        return placement

    def _candidates(self, query: PlacementQuery, views: Collection[WorkerView], role: Role) -> list[Candidate]:
        return [self._candidate(query, view) for view in views if view.role is role]

    def _candidate(self, query: PlacementQuery, view: WorkerView) -> Candidate:
        uncached = self._index.uncached_tokens
        return Candidate(view, uncached(view.worker_id, query.prefix_hashes, query.num_tokens, view.block_size))


_LACKING = {
    Stage.START: "no prefill and decode workers, nor a co-located one,",
    Stage.DECODE: "no decode worker",
}


def _num_tokens(ticket: Ticket) -> int:
    """What a ticket counts against the bound on tokens."""
    return ticket.query.num_tokens if ticket.stage is Stage.START else 0


class Dispatcher:
    """Lets coroutines wait for the queue's decisions. One event loop, no task of its own.

    `wake()` whenever a report, an end or a change of workers may have freed credit; deadlines wake it by themselves.
    """

    def __init__(self, queue: DispatchQueue, load: LoadBook, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._load = load
        self._clock = clock
        self._futures: dict[int, asyncio.Future[Outcome]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self._closed = False

    async def place(self, query: PlacementQuery, deadline: float | None = None) -> Outcome | QueueFull:
        """Waits for a placement (under late binding: for who computes the prompt). `deadline` is a time of the clock.

        A placement is booked under the query's leg ids when it is returned; the caller ends each leg. Cancelled, it
        leaves nothing behind.
        """
        return await self._decided(self._queue.push(query, deadline, self._clock()))

    async def place_decode(self, query: PlacementQuery, deadline: float | None = None) -> Outcome | QueueFull:
        """Late binding: waits for a decode worker, ahead of all who have not started."""
        return await self._decided(self._queue.push(query, deadline, self._clock(), Stage.DECODE))

    async def place_fork(self, query: PlacementQuery, deadline: float | None = None) -> Outcome | QueueFull:
        """Waits for credit at `query.at`, which has the prompt's KV; NoWorker at once if that takes nothing more."""
        return await self._decided(self._queue.push(query, deadline, self._clock(), Stage.FORK))

    def wake(self) -> None:
        """Hands out every decision that can be taken now."""
        while self._hand_out(self._queue.advance(self._clock())):
            pass
        self._set_timer()

    def close(self) -> None:
        """Stops the timer for good; those who still wait are cancelled by whoever started them."""
        self._closed = True
        self._stop_timer()

    @property
    def num_requests(self) -> int:
        return self._queue.num_requests

    @property
    def num_tokens(self) -> int:
        return self._queue.num_tokens

    async def _decided(self, ticket: Ticket | QueueFull) -> Outcome | QueueFull:
        if isinstance(ticket, QueueFull):
            return ticket
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._futures[ticket.number] = future
        self.wake()
        try:
            return await future
        except asyncio.CancelledError:
            self._futures.pop(ticket.number, None)
            if not self._queue.remove(ticket) and not future.cancelled():
                self._withdraw(ticket, future.result())
            self.wake()
            raise

    def _hand_out(self, decisions: list[Decision]) -> bool:
        """True if a placement came back: its coroutine is cancelled, but has not run since."""
        came_back = False
        for decision in decisions:
            future = self._futures.pop(decision.ticket.number)
            if future.cancelled():
                came_back |= self._withdraw(decision.ticket, decision.outcome)
            else:
                future.set_result(decision.outcome)
        return came_back

    def _withdraw(self, ticket: Ticket, outcome: Outcome) -> bool:
        if isinstance(outcome, Placement):
            self._load.withdraw(ticket.query, outcome)
            return True
        return False

    def _set_timer(self) -> None:
        """A timer that would ring too early is left to do so, and is then set anew: one a wake would cost more."""
        at = self._queue.next_event()
        if at is None or self._closed or (self._timer is not None and self._rings_at <= at):
            return
        self._stop_timer()
        self._rings_at = at
        self._timer = asyncio.get_running_loop().call_later(max(at - self._clock(), MIN_TIMER_S), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
