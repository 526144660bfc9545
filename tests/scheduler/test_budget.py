"""Who gets how many tokens of a step."""

from __future__ import annotations

import pytest

from baton.proto.messages import Leg
from baton.scheduler.sequence import State


def test_an_empty_scheduler_plans_an_empty_step(driver):
    d = driver()
    step = d.plan()
    assert (step.chunks, step.num_tokens, d.commit(step)) == ([], 0, [])


def test_a_prompt_that_fits_the_budget_is_one_chunk_that_samples(driver):
    d = driver()
    sequence = d.add("a", 10)
    [chunk] = d.plan().chunks
    assert chunk == (sequence, 0, 10, True)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget_and_only_the_last_samples(driver):
    d = driver(max_num_batched_tokens=8)
    d.add("a", 20)
    chunks = [d.step().chunks[0] for _ in range(3)]
    assert [(chunk.start, chunk.num_tokens, chunk.samples) for chunk in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]


def test_one_sequence_takes_no_more_of_a_step_than_the_threshold(driver, chunks_of):
    d = driver(max_num_batched_tokens=100, long_prefill_token_threshold=12)
    d.add("a", 40)
    d.add("b", 40)
    assert chunks_of(d.step()) == {"a": (0, 12), "b": (0, 12)}
    assert chunks_of(d.step()) == {"a": (12, 24), "b": (12, 24)}


def test_running_sequences_come_before_waiting_ones(driver, chunks_of):
    d = driver(max_num_batched_tokens=8)
    d.add("a", 12)
    d.step()
    d.add("b", 12)
    assert chunks_of(d.step()) == {"a": (8, 12), "b": (0, 4)}


def test_a_sequence_cut_to_zero_is_skipped_and_gets_its_turn_later(driver, chunks_of):
    d = driver(max_num_batched_tokens=8, policy="priority")
    d.add("slow", 4, priority=1)
    d.step()
    d.add("urgent", 12, priority=0)
    assert chunks_of(d.step()) == {"slow": (4, 5), "urgent": (0, 4)}
    assert chunks_of(d.step()) == {"urgent": (4, 12)}
    assert chunks_of(d.step()) == {"urgent": (12, 13), "slow": (5, 6)}


def test_a_cut_chunk_ends_at_the_end_of_a_block(driver, chunks_of):
    d = driver(max_num_batched_tokens=10)
    d.add("a", 20)
    assert chunks_of(d.step()) == {"a": (0, 8)}


def test_a_chunk_that_holds_no_end_of_a_block_is_still_taken(driver, chunks_of):
    d = driver(max_num_batched_tokens=3)
    d.add("a", 8)
    assert [chunks_of(d.step())["a"] for _ in range(3)] == [(0, 3), (3, 6), (6, 8)]


def test_what_rounding_leaves_of_the_budget_does_not_begin_another_prompt(driver, chunks_of):
    d = driver(max_num_batched_tokens=10)
    d.add("a", 20)
    d.add("b", 20)
    assert chunks_of(d.step()) == {"a": (0, 8)}
    assert chunks_of(d.step()) == {"a": (8, 16)}


def test_no_more_sequences_run_than_there_are_seats(driver, chunks_of):
    d = driver(max_num_seqs=2)
    for name in "abc":
        d.add(name, 4, max_tokens=2)
    assert set(chunks_of(d.step())) == {"a", "b"}
    d.step()
    assert set(chunks_of(d.step())) == {"c"}


def test_receiving_sequences_take_seats(driver):
    d = driver(max_num_seqs=2)
    d.receive("a", 4)
    d.add("b", 4)
    waiting = d.add("c", 4)
    d.step()
    assert waiting.state is State.WAITING


def test_progress_counts_at_plan_time_so_the_next_step_can_be_planned_at_once(driver, chunks_of):
    d = driver(max_num_batched_tokens=8)
    d.add("a", 20)
    first, second = d.plan(), d.plan()
    assert (chunks_of(first), chunks_of(second)) == ({"a": (0, 8)}, {"a": (8, 16)})
    d.commit(first)
    d.commit(second)
    assert chunks_of(d.step()) == {"a": (16, 20)}


def test_a_sequence_whose_token_is_being_sampled_is_not_planned_again(driver):
    d = driver()
    d.add("a", 4)
    first = d.plan()
    assert d.plan().chunks == []
    d.commit(first)
    assert len(d.plan().chunks) == 1


def test_there_is_no_work_after_an_empty_plan_until_something_happens(driver):
    d = driver()
    assert not d.scheduler.has_work()
    d.add("a", 4)
    assert d.scheduler.has_work()
    first = d.plan()
    d.plan()
    assert not d.scheduler.has_work()
    d.commit(first)
    assert d.scheduler.has_work()


def test_an_expected_sequence_is_no_work(driver):
    d = driver()
    d.add("a", 4, leg=Leg.DECODE)
    assert not d.scheduler.has_work()


def test_the_counters_tell_how_much_of_the_budget_was_used(driver):
    d = driver(max_num_batched_tokens=8)
    d.add("a", 12, max_tokens=2)
    d.run_until_idle()
    counters = d.scheduler.counters
    assert (counters.steps, counters.budget_tokens_used, counters.budget_tokens_offered) == (3, 13, 24)
    assert (counters.prompt_tokens_computed, counters.tokens_generated) == (12, 2)


def test_the_load_counts_prompt_tokens_until_they_are_computed(driver):
    d = driver(max_num_batched_tokens=8)
    d.add("a", 20)
    d.add("b", 5)
    d.add("c", 9, leg=Leg.DECODE)
    assert d.scheduler.load().queued_tokens == 25
    d.step()
    assert d.scheduler.load().queued_tokens == 17
    assert d.scheduler.load().running_context_tokens == 8
    d.abort("a")
    assert d.scheduler.load().queued_tokens == 5


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
def test_every_policy_orders_waiting_and_running_alike(driver, policy):
    d = driver(max_num_batched_tokens=4, max_num_seqs=1, policy=policy)
    d.add("late", 4, max_tokens=1, priority=2, deadline_s=90.0)
    d.add("never", 4, max_tokens=1, priority=1)
    d.add("soon", 4, max_tokens=1, priority=0, deadline_s=10.0)
    ended = []
    for _ in range(3):
        ended += [chunk.sequence.sequence_id for chunk in d.step().chunks]
    assert (
        ended
        == {
            "fcfs": ["late", "never", "soon"],
            "priority": ["soon", "never", "late"],
            "deadline": ["soon", "late", "never"],
        }[policy]
    )
