"""The dispatch queue: order, bounds, deadlines, and that no credit is ever given twice. The clock is a fake one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto.messages import Leg, LoadReport, Role, WorkerDescription
from baton.router.config import RouterSettings
from baton.router.dispatch import (
    DeadlinePassed,
    Decision,
    Dispatcher,
    DispatchQueue,
    NoWorker,
    QueueFull,
    Stage,
    Ticket,
)
from baton.router.load import LoadBook
from baton.router.placement import POLICIES, Placement, PlacementQuery, load_policy
from baton.router.prefix_index import PrefixIndex

STEP_TOKENS = 100
CREDIT = 2 * STEP_TOKENS


def description(worker_id: str, role: Role, incarnation: str = "first", **changes: Any) -> WorkerDescription:
    values: dict[str, Any] = {
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": 64,
        "block_size": 16,
        "num_blocks": 256,
    }
    return WorkerDescription(
        worker_id=worker_id,
        incarnation=incarnation,
        address=f"{worker_id}:1",
        role=role,
        model="demo",
        max_model_len=4096,
        vocab_size=10,
        dtype="float32",
        connector="local",
        version="0",
        kv_bytes_per_token=1,
        pid=1,
        **(values | changes),
    )


class Cluster:
    """A load book, a queue and a dispatcher on a clock that only the test moves."""

    def __init__(self, *roles: Role, policy: str = "queue_depth", **changes: Any) -> None:
        self.now = 100.0
        self.book = LoadBook(credit_steps=2.0)
        self.index = PrefixIndex()
        self.settings = replace(RouterSettings(no_worker_grace_s=5.0), **changes)
        self.queue = DispatchQueue(self.book, self.index, load_policy(policy, Random(1)), self.settings, self.now)
        self.dispatcher = Dispatcher(self.queue, self.book, lambda: self.now)
        for number, role in enumerate(roles):
            self.book.add_worker(description(f"{role.value}{number}", role))

    def push(self, name: str, num_tokens: int = 50, deadline: float | None = None, **changes: Any) -> Ticket:
        ticket = self.queue.push(ask(name, num_tokens, **changes), deadline, self.now)
        assert isinstance(ticket, Ticket)
        return ticket

    def advance(self) -> list[Decision]:
        return self.queue.advance(self.now)

    def placed(self) -> list[str]:
        """Advances; the names of those placed, in order."""
        return [each.ticket.query.attempt_id for each in self.advance() if isinstance(each.outcome, Placement)]

    def end(self, name: str) -> None:
        for leg in Leg:
            self.book.ended(ask(name).leg_id(leg))


def ask(name: str, num_tokens: int = 50, **changes: Any) -> PlacementQuery:
    return PlacementQuery(attempt_id=name, num_tokens=num_tokens, max_new_tokens=8, **changes)


def pair_cluster(**changes: Any) -> Cluster:
    return Cluster(Role.PREFILL, Role.DECODE, **changes)


# --- the queue ---


def test_requests_are_placed_by_priority_then_by_arrival() -> None:
    cluster = pair_cluster()
    cluster.push("late", arrived_s=3.0)
    cluster.push("early", arrived_s=1.0)
    cluster.push("urgent", arrived_s=4.0, priority=-1)
    cluster.push("patient", arrived_s=0.0, priority=5)
    assert cluster.placed() == ["urgent", "early", "late", "patient"]


def test_one_wake_never_gives_the_same_credit_twice() -> None:
    cluster = pair_cluster()
    for number in range(6):
        cluster.push(f"r{number}", 70, arrived_s=number)
    assert cluster.placed() == ["r0", "r1"]
    assert cluster.placed() == []
    cluster.end("r0")
    assert cluster.placed() == ["r2"]


def test_small_requests_do_not_overtake_a_large_one_that_waits_for_credit() -> None:
    cluster = pair_cluster()
    cluster.push("first", 150, arrived_s=1.0)
    cluster.push("large", 180, arrived_s=2.0)
    cluster.push("small", 10, arrived_s=3.0)
    assert cluster.placed() == ["first"]
    cluster.book.prefilled(ask("first").leg_id(Leg.PREFILL))
    assert cluster.placed() == ["large", "small"]


def test_a_request_above_the_whole_credit_goes_when_nothing_is_queued() -> None:
    cluster = pair_cluster()
    cluster.push("first", 20, arrived_s=1.0)
    cluster.push("huge", 1000, arrived_s=2.0)
    assert cluster.placed() == ["first"]
    cluster.end("first")
    assert cluster.placed() == ["huge"]


def test_a_cached_prefix_takes_no_credit() -> None:
    cluster = pair_cluster()
    hashes = tuple(range(12))
    cluster.push("first", 192, prefix_hashes=hashes)
    cluster.push("second", 192, prefix_hashes=hashes)
    assert cluster.placed() == ["first", "second"]
    assert cluster.book.view("prefill0", cluster.now).queued_tokens == 192 + 1


def test_the_queue_is_bounded_by_requests() -> None:
    cluster = Cluster(max_queued_requests=2)
    cluster.push("a")
    ticket = cluster.push("b")
    full = cluster.queue.push(ask("c"), None, cluster.now)
    assert isinstance(full, QueueFull)
    assert full.message == "2 requests are waiting, the most allowed is 2"
    cluster.queue.remove(ticket)
    cluster.push("c")


def test_the_queue_is_bounded_by_tokens_but_an_empty_one_takes_anything() -> None:
    cluster = Cluster(max_queued_tokens=100)
    cluster.push("a", 300)
    full = cluster.queue.push(ask("b", 1), None, cluster.now)
    assert isinstance(full, QueueFull)
    assert full.message == "300 prompt tokens are waiting, 1 more would exceed the 100 allowed"


def test_a_request_that_was_admitted_before_is_not_turned_away() -> None:
    cluster = Cluster(max_queued_requests=1)
    cluster.push("a")
    cluster.push("b", attempt=1)
    assert cluster.queue.num_requests == 2


def test_the_retry_hint_follows_the_rate_at_which_requests_leave() -> None:
    cluster = pair_cluster(max_queued_requests=1)
    unknown = pair_cluster(max_queued_requests=1)
    unknown.push("waits")
    assert unknown.queue.push(ask("x"), None, unknown.now) == QueueFull(
        1.0, "1 requests are waiting, the most allowed is 1"
    )
    for number in range(5):
        cluster.push(f"r{number}", 150)
        assert cluster.placed() == [f"r{number}"]
        cluster.end(f"r{number}")
        cluster.now += 2.0
    cluster.push("running", 150)
    assert cluster.placed() == ["running"]
    cluster.push("waits", 150)
    full = cluster.queue.push(ask("x", 150), None, cluster.now)
    assert isinstance(full, QueueFull)
    assert 1.0 < full.retry_after_s < 3.0


def test_a_deadline_ends_the_wait() -> None:
    cluster = pair_cluster()
    cluster.push("running", 200)
    cluster.push("waits", 50, deadline=103.0)
    assert cluster.placed() == ["running"]
    assert cluster.queue.next_event() == 103.0
    cluster.now = 103.0
    (decision,) = cluster.advance()
    assert decision.outcome == DeadlinePassed(3.0, "the deadline passed after 3.000 s in the queue")
    assert cluster.queue.next_event() is None
    assert (cluster.queue.num_requests, cluster.queue.num_tokens) == (0, 0)


def test_a_missing_role_is_waited_for_within_the_grace_period() -> None:
    cluster = pair_cluster()
    assert cluster.advance() == []
    cluster.book.remove_worker("decode1")
    cluster.advance()
    cluster.push("a")
    assert cluster.advance() == []
    assert cluster.queue.next_event() == 105.0
    cluster.now = 104.9
    cluster.book.add_worker(description("decode1", Role.DECODE, "second"))
    assert cluster.placed() == ["a"]


def test_a_missing_role_is_told_after_the_grace_period_and_at_once_from_then_on() -> None:
    cluster = Cluster(Role.PREFILL)
    cluster.push("a")
    cluster.now = 105.0
    (decision,) = cluster.advance()
    assert isinstance(decision.outcome, NoWorker)
    cluster.now = 106.0
    cluster.push("b")
    (decision,) = cluster.advance()
    assert isinstance(decision.outcome, NoWorker)
    assert decision.outcome.message.endswith("for 6.0 s")


def test_a_worker_that_drains_does_not_count_as_being_there() -> None:
    cluster = pair_cluster()
    cluster.advance()
    cluster.book.set_draining("decode1", True)
    cluster.push("a")
    assert cluster.advance() == []
    cluster.now += 5.0
    (decision,) = cluster.advance()
    assert isinstance(decision.outcome, NoWorker)


def test_overload_is_never_taken_for_a_missing_worker() -> None:
    cluster = pair_cluster()
    cluster.push("running", 200)
    cluster.push("waits", 200)
    assert cluster.placed() == ["running"]
    cluster.now += 1000.0
    assert cluster.advance() == []
    assert cluster.queue.num_requests == 1


def test_a_colocated_worker_serves_alone() -> None:
    cluster = Cluster(Role.COLOCATED)
    cluster.push("a")
    (decision,) = cluster.advance()
    assert isinstance(decision.outcome, Placement)
    assert decision.outcome.whole == "colocated0"
    assert [view.in_flight for view in cluster.book.views(0.0)] == [1]


def test_late_binding_places_the_prompt_first_and_those_with_a_prompt_before_all_others() -> None:
    cluster = pair_cluster(binding="late")
    cluster.push("a", 150, arrived_s=1.0)
    (decision,) = cluster.advance()
    assert isinstance(decision.outcome, Placement)
    assert (decision.outcome.prefill, decision.outcome.decode) == ("prefill0", None)
    cluster.end("a")
    cluster.push("b", 150, arrived_s=0.0)
    cluster.queue.push(ask("a", 150, arrived_s=1.0), None, cluster.now, Stage.DECODE)
    decisions = cluster.advance()
    assert [decision.ticket.query.attempt_id for decision in decisions] == ["a", "b"]
    assert isinstance(decisions[0].outcome, Placement)
    assert (decisions[0].outcome.prefill, decisions[0].outcome.decode) == (None, "decode1")


def test_late_binding_starts_no_prompt_that_nobody_could_decode() -> None:
    cluster = Cluster(Role.PREFILL, binding="late")
    cluster.push("a")
    assert cluster.placed() == []


# --- forks: one worker each, which has their prompt's KV ---


def fork(cluster: Cluster, name: str, at: str, num_tokens: int = 50, deadline: float | None = None) -> None:
    cluster.queue.push(ask(name, num_tokens, at=at, attempt=1), deadline, cluster.now, Stage.FORK)


def test_a_fork_goes_to_its_worker_and_counts_only_what_it_does_not_share() -> None:
    cluster = Cluster(Role.PREFILL, Role.DECODE, Role.DECODE)
    hashes = ("block 0", "block 1", "block 2")
    cluster.index.record("decode1", hashes)
    cluster.queue.push(ask("a", 50, at="decode1", prefix_hashes=hashes), None, cluster.now, Stage.FORK)
    (decision,) = cluster.advance()
    placement = Placement(whole="decode1", reason="fork", uncached_tokens=2, shared_tokens=48)
    assert decision.outcome == placement
    view = cluster.book.view("decode1", cluster.now)
    assert (view.queued_tokens, view.in_flight) == (2, 1)
    assert view.free_kv_tokens == view.total_kv_tokens - 16
    cluster.book.withdraw(decision.ticket.query, placement)
    assert cluster.book.in_flight == 0


def test_a_fork_waits_for_credit_at_its_worker_and_stands_in_nobodys_way() -> None:
    cluster = Cluster(Role.PREFILL, Role.DECODE, Role.DECODE)
    fork(cluster, "full", "decode1", 150)
    fork(cluster, "waits", "decode1", 100)
    fork(cluster, "small, but later", "decode1", 10)
    fork(cluster, "elsewhere", "decode2", 100)
    cluster.push("ordinary", 50)
    assert cluster.placed() == ["full", "elsewhere", "ordinary"]
    cluster.end("full")
    assert cluster.placed() == ["waits", "small, but later"]


@pytest.mark.parametrize("why", ["it drains", "it is gone"])
def test_a_fork_does_not_wait_for_a_worker_that_takes_nothing_more(why: str) -> None:
    cluster = pair_cluster()
    fork(cluster, "full", "decode1", 150)
    fork(cluster, "waits", "decode1", 150)
    assert cluster.placed() == ["full"]
    if why == "it drains":
        cluster.book.set_draining("decode1", True)
    else:
        cluster.book.remove_worker("decode1")
    (decision,) = cluster.advance()
    assert decision.outcome == NoWorker("decode1 takes nothing any more")
    assert cluster.queue.num_requests == 0


def test_a_fork_that_waits_too_long_is_told_so() -> None:
    cluster = pair_cluster()
    fork(cluster, "full", "decode1", 150)
    fork(cluster, "waits", "decode1", 150, deadline=cluster.now + 1.0)
    assert cluster.placed() == ["full"]
    assert cluster.queue.next_event() == cluster.now + 1.0
    cluster.now += 1.0
    (decision,) = cluster.advance()
    assert isinstance(decision.outcome, DeadlinePassed)


def test_a_removed_ticket_is_gone_and_its_tokens_too() -> None:
    cluster = Cluster()
    first, second = cluster.push("a", 30), cluster.push("b", 40)
    assert cluster.queue.remove(first)
    assert not cluster.queue.remove(first)
    assert cluster.queue.num_tokens == 40
    assert cluster.queue.remove(second)
    assert cluster.queue.num_requests == 0


# --- credit, against workers that really keep a queue ---


@dataclass
class Worker:
    """What a prefill worker truly holds, apart from what the router believes."""

    worker_id: str
    role: Role
    received: list[tuple[str, int]] = field(default_factory=list)
    last_submit: int = 0
    reports: int = 0

    @property
    def queued_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.received)

    def report(self) -> LoadReport:
        self.reports += 1
        return LoadReport(
            self.worker_id,
            "first",
            self.role,
            sequence_number=self.reports,
            waiting=len(self.received),
            queued_tokens=self.queued_tokens,
            total_blocks=256,
            free_blocks=256,
            last_submit=self.last_submit,
        )


events = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["push", "push", "fork"]), st.integers(1, 260)),
        st.tuples(st.sampled_from(["wake", "send", "compute", "report", "deliver", "end", "drain"]), st.integers(0, 5)),
    ),
    min_size=5,
    max_size=50,
)


@settings(max_examples=1000, deadline=None)
@given(events, st.sampled_from(POLICIES), st.sampled_from(["early", "late"]))
def test_no_worker_ever_holds_more_than_its_credit_and_nothing_stays_counted(
    operations: list[tuple[str, int]], policy: str, binding: str
) -> None:
    roles = (Role.PREFILL, Role.PREFILL, Role.COLOCATED, Role.DECODE)
    cluster = Cluster(*roles, policy=policy, binding=binding)
    workers = [Worker(f"{role.value}{number}", role) for number, role in enumerate(roles)]
    unsent: dict[str, list[tuple[str, int]]] = {worker.worker_id: [] for worker in workers}
    undelivered: list[LoadReport] = []
    in_flight: dict[str, Placement] = {}
    draining: set[str] = set()
    total = 0
    for operation, value in operations:
        worker = workers[value % len(workers)]
        if operation == "push":
            total += 1
            cluster.push(f"r{total}", value)
        elif operation == "fork" and in_flight:
            total += 1
            placement = in_flight[sorted(in_flight)[value % len(in_flight)]]
            fork(cluster, f"r{total}", placement.whole or placement.decode or "nobody", value)
        elif operation == "send" and unsent[worker.worker_id]:
            leg_id, num_tokens = unsent[worker.worker_id].pop(0)
            worker.last_submit += 1
            worker.received.append((leg_id, num_tokens))
            cluster.book.sent(leg_id, worker.last_submit)
        elif operation == "compute" and worker.received:
            worker.received.pop(0)
        elif operation == "report":
            undelivered.append(worker.report())
        elif operation == "deliver" and undelivered:
            cluster.book.report(undelivered.pop(value % len(undelivered)), cluster.now)
        elif operation == "end" and in_flight:
            name = sorted(in_flight)[value % len(in_flight)]
            cluster.book.withdraw(ask(name), in_flight.pop(name))
            for each in workers:
                unsent[each.worker_id] = [leg for leg in unsent[each.worker_id] if not leg[0].startswith(f"{name}.")]
                each.received = [leg for leg in each.received if not leg[0].startswith(f"{name}.")]
        elif operation == "drain":
            draining ^= {worker.worker_id}
            cluster.book.set_draining(worker.worker_id, worker.worker_id in draining)
        elif operation == "wake":
            for decision in cluster.advance():
                if isinstance(decision.outcome, NoWorker):
                    assert decision.ticket.query.at in draining | {"nobody"}
                    continue
                assert isinstance(decision.outcome, Placement)
                in_flight[decision.ticket.query.attempt_id] = decision.outcome
                for leg, worker_id in decision.outcome.legs():
                    assert worker_id not in draining
                    num_tokens = 0 if leg is Leg.DECODE else decision.ticket.query.num_tokens
                    unsent[worker_id].append((decision.ticket.query.leg_id(leg), num_tokens))
            # Whoever was passed over unweighed could not have been placed.
            cluster.queue._standstills.clear()
            assert cluster.advance() == []
        for each in workers:
            held = [num_tokens for _, num_tokens in each.received + unsent[each.worker_id] if num_tokens]
            assert sum(held) <= CREDIT or len(held) == 1
        cluster.book.check()
        assert cluster.book.in_flight == sum(len(placement.legs()) for placement in in_flight.values())
    for name, placement in in_flight.items():
        cluster.book.withdraw(ask(name), placement)
    cluster.book.check()
    assert cluster.book.in_flight == 0
    assert all(view.in_flight == 0 for view in cluster.book.views(cluster.now))


# --- waiting coroutines ---


async def settle() -> None:
    """Lets every coroutine run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_is_placed_at_once_if_there_is_credit() -> None:
    cluster = pair_cluster()
    placed = await cluster.dispatcher.place(ask("a"))
    assert isinstance(placed, Placement)
    assert (placed.prefill, placed.decode) == ("prefill0", "decode1")
    assert cluster.book.in_flight == 2


async def test_a_request_waits_until_a_wake_finds_credit() -> None:
    cluster = pair_cluster()
    await cluster.dispatcher.place(ask("a", 200))
    waiting = asyncio.create_task(cluster.dispatcher.place(ask("b", 200)))
    await settle()
    assert cluster.dispatcher.num_requests == 1
    assert cluster.dispatcher.num_tokens == 200
    cluster.end("a")
    await settle()
    assert not waiting.done()
    cluster.dispatcher.wake()
    assert isinstance(await waiting, Placement)


async def test_cancelled_while_queued_it_leaves_the_queue_and_lets_the_next_go() -> None:
    cluster = pair_cluster()
    await cluster.dispatcher.place(ask("a", 120))
    large = asyncio.create_task(cluster.dispatcher.place(ask("b", 150)))
    await settle()
    small = asyncio.create_task(cluster.dispatcher.place(ask("c", 50)))
    await settle()
    assert cluster.dispatcher.num_requests == 2
    large.cancel()
    assert isinstance(await small, Placement)
    assert large.cancelled()
    assert cluster.dispatcher.num_requests == 0
    assert cluster.book.in_flight == 4


async def test_cancelled_just_after_the_decision_it_gives_the_placement_back() -> None:
    cluster = pair_cluster()
    await cluster.dispatcher.place(ask("a", 200))
    waiting = asyncio.create_task(cluster.dispatcher.place(ask("b", 200)))
    await settle()
    cluster.end("a")
    cluster.dispatcher.wake()
    assert cluster.book.in_flight == 2
    waiting.cancel()
    await settle()
    assert waiting.cancelled()
    assert cluster.book.in_flight == 0


async def test_a_wake_just_after_the_cancellation_gives_the_credit_to_the_next() -> None:
    cluster = pair_cluster()
    await cluster.dispatcher.place(ask("a", 200))
    first = asyncio.create_task(cluster.dispatcher.place(ask("b", 200)))
    await settle()
    second = asyncio.create_task(cluster.dispatcher.place(ask("c", 200)))
    await settle()
    first.cancel()
    cluster.end("a")
    cluster.dispatcher.wake()
    await settle()
    assert first.cancelled()
    assert isinstance(second.result(), Placement)
    assert cluster.book.in_flight == 2
    cluster.book.check()


async def test_refusals_are_values() -> None:
    cluster = pair_cluster(max_queued_requests=1)
    await cluster.dispatcher.place(ask("a", 200))
    late = asyncio.create_task(cluster.dispatcher.place(ask("b", 200), deadline=101.0))
    await settle()
    assert isinstance(await cluster.dispatcher.place(ask("c", 200)), QueueFull)
    cluster.now = 101.0
    cluster.dispatcher.wake()
    assert isinstance(await late, DeadlinePassed)
    cluster.book.remove_worker("prefill0")
    cluster.dispatcher.wake()
    cluster.now = 200.0
    assert isinstance(await cluster.dispatcher.place(ask("d")), NoWorker)


async def test_a_deadline_needs_no_wake() -> None:
    cluster = pair_cluster()
    await cluster.dispatcher.place(ask("a", 200))
    loop = asyncio.get_running_loop()
    dispatcher = Dispatcher(cluster.queue, cluster.book, loop.time)
    outcome = await asyncio.wait_for(dispatcher.place(ask("b", 200), deadline=loop.time() + 0.01), 5.0)
    assert isinstance(outcome, DeadlinePassed)
    dispatcher.close()


async def test_late_binding_asks_for_the_decode_worker_later() -> None:
    cluster = pair_cluster(binding="late")
    query = ask("a")
    first = await cluster.dispatcher.place(query)
    assert isinstance(first, Placement)
    assert first.decode is None
    second = await cluster.dispatcher.place_decode(query)
    assert isinstance(second, Placement)
    assert second.decode == "decode1"
    assert cluster.book.in_flight == 2
    cluster.end("a")
    assert cluster.book.in_flight == 0


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_serves_a_crowd_without_losing_anybody(policy: str) -> None:
    cluster = Cluster(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.COLOCATED, policy=policy)
    done: list[str] = []

    async def serve(name: str) -> None:
        placed = await cluster.dispatcher.place(ask(name, 90))
        assert isinstance(placed, Placement)
        await asyncio.sleep(0)
        cluster.book.withdraw(ask(name), placed)
        cluster.dispatcher.wake()
        done.append(name)

    names = [f"r{number}" for number in range(100)]
    await asyncio.wait_for(asyncio.gather(*(serve(name) for name in names)), 30.0)
    assert sorted(done) == sorted(names)
    assert cluster.book.in_flight == 0
    assert cluster.dispatcher.num_requests == 0
    cluster.book.check()
