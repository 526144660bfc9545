"""The load book: what it predicts between two reports, and that nothing stays counted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto.messages import Leg, LoadReport, Role, WorkerDescription
from baton.router.load import LoadBook
from baton.router.placement import Placement, PlacementQuery


def description(worker_id: str = "p0", role: Role = Role.PREFILL, **changes: Any) -> WorkerDescription:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": "first",
        "address": "10.0.0.1:7000",
        "role": role,
        "model": "demo",
        "max_model_len": 2048,
        "vocab_size": 100,
        "block_size": 16,
        "num_blocks": 64,
        "max_num_batched_tokens": 100,
        "max_num_seqs": 8,
        "dtype": "float32",
        "connector": "local",
        "version": "0",
        "kv_bytes_per_token": 1,
        "pid": 1,
    }
    return WorkerDescription(**(values | changes))


def report(worker_id: str = "p0", sequence_number: int = 1, **changes: Any) -> LoadReport:
    values: dict[str, Any] = {"incarnation": "first", "role": Role.PREFILL, "total_blocks": 64, "free_blocks": 64}
    return LoadReport(worker_id=worker_id, sequence_number=sequence_number, **(values | changes))


def book_with(*descriptions: WorkerDescription) -> LoadBook:
    book = LoadBook(credit_steps=2.0)
    for each in descriptions:
        book.add_worker(each)
    return book


def test_a_new_worker_has_all_of_its_credit_and_all_of_its_room() -> None:
    view = book_with(description()).view("p0", now=5.0)
    assert (view.queued_tokens, view.credit_tokens, view.free_kv_tokens) == (0, 200, 1024)
    assert view.age_s is None
    assert view.host == "10.0.0.1"


def test_a_leg_counts_from_its_dispatch_on_top_of_the_report() -> None:
    book = book_with(description())
    book.report(report(queued_tokens=30, running=1, free_blocks=60, last_submit=0), now=1.0)
    book.dispatched("p0", "a", 1, prefill_tokens=50, kv_tokens=50)
    view = book.view("p0", now=1.0)
    assert view.queued_tokens == 80
    assert view.credit_tokens == 120
    assert view.running == 2
    assert view.free_kv_tokens == (60 - 4) * 16


def test_a_report_that_includes_a_leg_replaces_the_prediction() -> None:
    book = book_with(description())
    book.dispatched("p0", "a", 1, prefill_tokens=50, kv_tokens=50)
    book.dispatched("p0", "b", 2, prefill_tokens=20, kv_tokens=20)
    book.report(report(queued_tokens=10, waiting=1, last_submit=1), now=1.0)
    assert book.view("p0", now=1.0).queued_tokens == 10 + 20


def test_a_leg_that_is_not_sent_yet_is_in_no_report() -> None:
    book = book_with(description())
    book.dispatched("p0", "a", None, prefill_tokens=50, kv_tokens=50)
    book.report(report(last_submit=7), now=1.0)
    assert book.view("p0", now=1.0).queued_tokens == 50
    book.sent("a", 8)
    book.report(report(sequence_number=2, last_submit=8), now=2.0)
    assert book.view("p0", now=2.0).queued_tokens == 0


def test_a_computed_prompt_is_no_longer_queued() -> None:
    book = book_with(description())
    book.dispatched("p0", "a", 1, prefill_tokens=50, kv_tokens=50)
    book.prefilled("a")
    assert book.view("p0", now=0.0).queued_tokens == 0
    assert book.in_flight == 1


def test_decode_room_counts_legs_for_which_the_worker_has_not_reserved_yet() -> None:
    book = book_with(description("d0", Role.DECODE))
    book.dispatched("d0", "a", 1, prefill_tokens=0, kv_tokens=160)
    book.report(report("d0", role=Role.DECODE, last_submit=1, free_blocks=64), now=1.0)
    assert book.view("d0", now=1.0).free_kv_tokens == 1024 - 160


def test_a_worker_has_at_least_the_sequences_that_this_router_has_on_it() -> None:
    book = book_with(description("d0", Role.DECODE))
    for number in range(1, 9):
        book.dispatched("d0", f"leg{number}", number, prefill_tokens=0, kv_tokens=16)
    book.report(report("d0", role=Role.DECODE, last_submit=8, running=3), now=1.0)
    view = book.view("d0", now=1.0)
    assert (view.running, view.credit_sequences) == (8, 0)


def test_a_prefill_worker_may_have_steps_of_sequences_waiting_and_a_decode_worker_one_step_in_all() -> None:
    book = book_with(description("p0"), description("d0", Role.DECODE), description("c0", Role.COLOCATED))
    assert [view.credit_sequences for view in book.views(0.0)] == [16, 8, 8]


@pytest.mark.parametrize(
    "late",
    [
        report(sequence_number=1, queued_tokens=999),
        report(sequence_number=2, queued_tokens=999),
        report(sequence_number=9, queued_tokens=999, incarnation="earlier"),
        report("p9", sequence_number=9, queued_tokens=999),
    ],
    ids=["older", "the same again", "of another incarnation", "of an unknown worker"],
)
def test_a_report_is_ignored_and_counted_if_it_is(late: LoadReport) -> None:
    book = book_with(description())
    assert book.report(report(sequence_number=2, queued_tokens=5), now=1.0)
    assert not book.report(late, now=2.0)
    assert book.view("p0", now=2.0).queued_tokens == 5
    assert book.counts.reports_ignored == 1


def test_the_age_of_a_report_includes_its_age_when_it_was_sent() -> None:
    book = book_with(description())
    book.report(report(age_s=0.25), now=10.0)
    assert book.view("p0", now=11.0).age_s == pytest.approx(1.25)


def test_a_leg_ends_once() -> None:
    book = book_with(description())
    book.dispatched("p0", "a", 1, prefill_tokens=50, kv_tokens=50)
    assert book.ended("a")
    assert not book.ended("a")
    assert book.counts.ends_ignored == 1
    assert book.view("p0", now=0.0).queued_tokens == 0
    book.check()


def test_a_leg_cannot_be_dispatched_twice() -> None:
    book = book_with(description())
    book.dispatched("p0", "a", 1, prefill_tokens=1, kv_tokens=1)
    with pytest.raises(ValueError, match="a is in flight already, on p0"):
        book.dispatched("p0", "a", 2, prefill_tokens=1, kv_tokens=1)


def test_removing_a_worker_ends_its_legs_and_no_others() -> None:
    book = book_with(description("p0"), description("p1"))
    for worker_id, leg_id in (("p0", "a"), ("p1", "b"), ("p0", "c")):
        book.dispatched(worker_id, leg_id, 1, prefill_tokens=1, kv_tokens=1)
    assert book.remove_worker("p0") == ["a", "c"]
    assert book.remove_worker("p0") == []
    assert not book.ended("a")
    assert book.in_flight == 1
    book.check()


def test_a_new_incarnation_starts_from_nothing() -> None:
    book = book_with(description())
    book.report(report(sequence_number=900, queued_tokens=77), now=1.0)
    with pytest.raises(ValueError, match="p0 is in the book already"):
        book.add_worker(description(incarnation="second"))
    book.remove_worker("p0")
    book.add_worker(description(incarnation="second"))
    assert book.view("p0", now=1.0).queued_tokens == 0
    assert not book.report(report(sequence_number=901), now=2.0)
    assert book.report(report(sequence_number=1, incarnation="second"), now=2.0)


def test_a_worker_drains_by_the_routers_word_or_by_its_own() -> None:
    book = book_with(description("p0"), description("p1"), description("p2"))
    book.set_draining("p0", True)
    book.set_draining("nobody", True)
    book.report(report("p1", draining=True), now=1.0)
    assert [view.draining for view in book.views(now=1.0)] == [True, True, False]
    book.set_draining("p0", False)
    assert not book.view("p0", now=1.0).draining


def test_views_are_of_one_role_if_one_is_asked_for() -> None:
    book = book_with(description("p0"), description("d0", Role.DECODE))
    assert [view.worker_id for view in book.views(0.0, Role.DECODE)] == ["d0"]
    assert [view.worker_id for view in book.views(0.0)] == ["p0", "d0"]


def test_a_placement_is_booked_and_withdrawn_leg_by_leg() -> None:
    book = book_with(description("p0"), description("d0", Role.DECODE))
    query = PlacementQuery("r1", num_tokens=60, max_new_tokens=20)
    placement = Placement(prefill="p0", decode="d0", uncached_tokens=40)
    book.book(query, placement)
    assert book.view("p0", 0.0).queued_tokens == 40
    assert book.view("d0", 0.0).queued_tokens == 0
    assert book.view("d0", 0.0).free_kv_tokens == 1024 - 80
    book.ended(query.leg_id(Leg.PREFILL))
    book.withdraw(query, placement)
    assert book.in_flight == 0
    book.check()


steps = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "end", "prefilled", "sent", "report", "remove", "add"]),
        st.integers(0, 2),
        st.integers(0, 30),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_in_flight_is_what_was_dispatched_and_has_not_ended_whatever_happens(
    operations: list[tuple[str, int, int]],
) -> None:
    book = LoadBook()
    present: dict[str, dict[str, int]] = {}
    number = 0
    for operation, worker, value in operations:
        worker_id = f"w{worker}"
        legs = present.get(worker_id)
        leg_id = f"leg{value}"
        if operation == "add" and legs is None:
            book.add_worker(description(worker_id))
            present[worker_id] = {}
        elif operation == "dispatch" and legs is not None:
            number += 1
            book.dispatched(worker_id, f"leg{number}", None, value, value)
            legs[f"leg{number}"] = value
        elif operation == "remove":
            assert book.remove_worker(worker_id) == list(present.pop(worker_id, {}))
        elif operation == "end":
            held = [each for each in present.values() if leg_id in each]
            assert book.ended(leg_id) == bool(held)
            for each in held:
                del each[leg_id]
        elif operation == "prefilled":
            book.prefilled(leg_id)
        elif operation == "sent":
            book.sent(leg_id, value)
        elif operation == "report":
            book.report(report(worker_id, sequence_number=value, last_submit=value), now=0.0)
        book.check()
        assert {view.worker_id: view.in_flight for view in book.views(0.0)} == {
            name: len(each) for name, each in present.items()
        }
    for worker_id in list(present):
        book.remove_worker(worker_id)
    assert book.in_flight == 0
    book.check()


class SharedWorker:
    """One prefill worker and the books of several replicas; `queued` is what it has yet to compute."""

    def __init__(self, replicas: int, budget: int = 1000) -> None:
        self.books = [LoadBook(2.0, replicas) for _ in range(replicas)]
        for book in self.books:
            book.add_worker(description(max_num_batched_tokens=budget, max_num_seqs=1000, num_blocks=1 << 20))
        self.queued = 0
        self._numbers = [0] * replicas
        self._reports = 0

    def offer(self, replica: int, num_tokens: int) -> bool:
        """Sends a prompt if this replica's book has credit for it."""
        book = self.books[replica]
        view = book.view("p0", now=0.0)
        if not (num_tokens <= view.credit_tokens and view.credit_sequences > 0):
            return False
        self._numbers[replica] += 1
        number = self._numbers[replica]
        book.dispatched("p0", f"{replica}.{number}", number, num_tokens, num_tokens)
        self.queued += num_tokens
        return True

    def report(self, computed: int = 0) -> None:
        self.queued = max(0, self.queued - computed)
        self._reports += 1
        for book, number in zip(self.books, self._numbers, strict=True):
            book.report(report(sequence_number=self._reports, queued_tokens=self.queued, last_submit=number), now=0.0)


@given(
    replicas=st.integers(1, 8),
    steps=st.lists(
        st.tuples(st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 7), st.integers(1, 2000)), max_size=40)),
        max_size=12,
    ),
)
@settings(deadline=None)
def test_replicas_exceed_a_workers_credit_by_at_most_one_prompt_each(replicas, steps) -> None:
    worker = SharedWorker(replicas)
    worker.report()
    for computed, offers in steps:
        before, largest = worker.queued, 0
        for replica, num_tokens in offers:
            if worker.offer(replica % replicas, num_tokens):
                largest = max(largest, num_tokens)
        assert worker.queued <= max(before, 2000 + replicas + (replicas - 1) * largest)
        worker.report(computed)


@given(replicas=st.integers(2, 16), num_tokens=st.integers(40, 100))
@settings(deadline=None)
def test_small_prompts_of_all_replicas_together_stay_within_the_credit(replicas, num_tokens) -> None:
    worker = SharedWorker(replicas)
    worker.report()
    for replica in range(replicas):
        while worker.offer(replica, num_tokens):
            pass
    assert worker.queued <= 2000 + replicas * num_tokens


def test_a_replica_that_is_alone_busy_fills_the_whole_credit_within_some_reports() -> None:
    worker = SharedWorker(4)
    worker.report()
    for _ in range(30):
        while worker.offer(0, 50):
            pass
        worker.report()
    assert worker.queued == 2000


def test_a_prompt_above_a_share_need_not_wait_for_an_idle_worker() -> None:
    worker = SharedWorker(4)
    worker.report()
    assert worker.offer(0, 1200)
    worker.report()
    assert worker.offer(1, 700), "800 tokens are left, and nobody has sent any since the report"
    assert not worker.offer(1, 300), "it has had more than its share of what the report left"


def test_a_single_router_has_the_credit_for_itself() -> None:
    worker = SharedWorker(1)
    worker.report()
    while worker.offer(0, 100):
        pass
    assert worker.queued == 2000


def test_the_others_legs_are_taken_to_promise_as_much_kv_as_ones_own() -> None:
    book = LoadBook(2.0, replicas=2)
    book.add_worker(description("d0", Role.DECODE, num_blocks=1000, max_num_seqs=100))
    book.dispatched("d0", "mine", 1, 0, 1600)
    book.report(report("d0", role=Role.DECODE, waiting=4, last_submit=1, total_blocks=1000, free_blocks=1000), now=0.0)
    assert book.view("d0", now=0.0).free_kv_tokens == 16_000 - 4 * 1600
