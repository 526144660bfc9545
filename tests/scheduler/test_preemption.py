"""Who loses its blocks, and what follows from it."""

from __future__ import annotations

import pytest

from baton.proto.messages import Leg
from baton.scheduler import scheduler
from baton.scheduler.plan import StepResult
from baton.scheduler.sequence import State


@pytest.fixture(autouse=True)
def low_water(monkeypatch):
    """As low as it can be, so that a small pool is crowded soon."""
    monkeypatch.setattr(scheduler, "LOW_WATER_BLOCKS", 1)


def crowded(driver, **settings):
    """Two sequences that fill a pool of 8 blocks; the next block's worth of output of each needs one more.

    a | 1 2 3 4 | 5 6 7 8 | 9 10 11 12 | 13 14 15 16 |      b the same, one token behind
    """
    d = driver(num_blocks=8, **settings)
    first, second = d.add("a", 8, max_tokens=17, priority=0), d.add("b", 7, max_tokens=17, priority=1)
    d.step()
    while d.pool.num_available:
        d.step()
    return d, first, second


def step_until_preempted(d):
    for _ in range(1000):
        if (step := d.step()).preempted:
            return step
    raise AssertionError("nothing was preempted")


def test_the_last_in_order_loses_its_blocks_when_none_are_left(driver, chunks_of):
    d, first, second = crowded(driver)
    step = step_until_preempted(d)
    assert step.preempted == [second]
    assert (second.state, second.block_ids, second.num_computed_tokens) == (State.PREEMPTED, [], 0)
    assert set(chunks_of(step)) == {"a"}
    assert first.state is State.RUNNING


def test_the_least_urgent_loses_its_blocks_whoever_came_last(driver):
    d = driver(num_blocks=8, policy="priority")
    slow = d.add("slow", 11, max_tokens=17, priority=3)
    d.add("urgent", 12, max_tokens=17, priority=1)
    assert step_until_preempted(d).preempted == [slow]


def test_a_preempted_sequence_has_no_chunk_in_that_step_and_costs_it_no_tokens(driver, chunks_of):
    d = driver(num_blocks=7)
    d.add("a", 4, max_tokens=20)
    d.add("b", 2, max_tokens=20)
    victim = d.add("c", 4, max_tokens=20)
    step = step_until_preempted(d)
    assert step.preempted == [victim]
    assert set(chunks_of(step)) == {"a", "b"}
    assert step.num_tokens == 2


def test_nothing_is_admitted_in_a_step_that_preempted(driver):
    d, _, _ = crowded(driver, policy="priority")
    urgent = d.add("c", 1, leg=Leg.PREFILL, priority=-1)
    step_until_preempted(d)
    assert d.pool.num_available > 0
    assert urgent.state is State.WAITING
    d.plan()
    assert urgent.state is State.RUNNING


def test_a_preempted_sequence_comes_back_before_those_that_came_after_it(driver):
    d, _, second = crowded(driver)
    later = d.add("c", 4, max_tokens=4)
    step_until_preempted(d)
    while second.state is State.PREEMPTED:
        assert later.state is State.WAITING
        d.step()
    assert second.state is State.RUNNING


def test_a_preempted_sequence_stays_out_while_those_who_stayed_could_not_grow(driver):
    d, first, second = crowded(driver)
    step_until_preempted(d)
    while not first.ended:
        assert second.state is State.PREEMPTED
        d.step()
    d.step()
    assert second.state is State.RUNNING


def test_the_moment_of_the_first_run_outlives_a_preemption(driver):
    d, _, second = crowded(driver)
    began = second.first_run_s
    d.run_until_idle()
    assert second.num_preemptions > 0
    assert second.first_run_s == began


def test_a_preempted_sequence_goes_on_with_the_next_token(driver):
    d, _, _ = crowded(driver)
    d.run_until_idle()
    assert {name: len(tokens) for name, tokens in d.emitted.items()} == {"a": 17, "b": 17}
    d.assert_at_rest()


def test_recomputed_tokens_are_counted_and_those_found_in_the_prefix_cache_are_not(driver):
    d, _, second = crowded(driver, prefix_cache=True)
    computed = second.num_computed_tokens
    step_until_preempted(d)
    d.run_until_idle()
    found = d.scheduler.counters.prefix_hits
    assert second.num_preemptions == d.scheduler.counters.preemptions_recompute == 1
    assert second.num_recomputed_tokens == d.scheduler.counters.tokens_recomputed
    assert 0 < second.num_recomputed_tokens <= computed + 4 - found


def test_without_a_prefix_cache_everything_is_recomputed(driver):
    d, _, second = crowded(driver, prefix_cache=False)
    step = step_until_preempted(d)
    [lost] = [sequence.num_lost_tokens for sequence in step.preempted]
    d.run_until_idle()
    assert second.num_recomputed_tokens == d.scheduler.counters.tokens_recomputed == lost
    assert d.scheduler.counters.prompt_tokens_computed == 15


def test_tokens_to_recompute_are_queued_tokens(driver):
    d, _, second = crowded(driver)
    step_until_preempted(d)
    assert d.scheduler.load().queued_tokens == len(second.token_ids)


def test_a_victim_that_would_free_nothing_is_left_alone(driver):
    d = driver(num_blocks=12)
    for name in "abc":
        d.add(name, 11, max_tokens=17)
    d.step()
    while d.pool.num_available:
        d.step()
    _, second, third = d.scheduler._running.sequences
    d.pool.hold(third.block_ids)  # somebody else's too, so taking them from one of the two frees none
    while not (step := d.scheduler.plan(0.0)).preempted:
        d.scheduler.commit(step, StepResult([7] * len(step.chunks)), 0.0)
    assert step.preempted == [second]


def test_a_sequence_ahead_is_never_set_back_for_one_behind_it(driver):
    d, first, second = crowded(driver)
    while not second.ended:
        assert d.step().preempted in ([], [second])
    assert first.num_preemptions == 0


def test_the_last_in_order_keeps_its_blocks_and_waits_when_only_those_ahead_could_give(driver, chunks_of):
    d = driver(num_blocks=12, max_num_batched_tokens=5, long_prefill_token_threshold=4)
    d.add("a", 40, leg=Leg.PREFILL)
    last = d.add("b", 1, max_tokens=12)
    while "b" in chunks_of(step := d.step()):
        pass
    assert (set(chunks_of(step)), step.preempted) == ({"a"}, [])
    assert (last.state, last.num_computed_tokens) == (State.RUNNING, 8)
    d.run_until_idle()
    assert not last.ended
    assert d.scheduler.release("a", d.now())
    d.run_until_idle()
    assert d.emitted["b"] == [7] * 12
    assert last.num_preemptions == 0


def test_a_running_sequence_waits_for_blocks_held_by_a_hand_off_in_progress(driver):
    d = driver(num_blocks=6)
    running = d.add("a", 6, max_tokens=12)
    d.step()
    receiving = d.receive("b", 11, max_tokens=8)
    d.step()
    assert receiving.state is State.RECEIVING
    d.run_until_idle()
    assert not running.ended
    assert (running.num_preemptions, receiving.state) == (0, State.RECEIVING)
    d.land("b")
    d.run_until_idle()
    assert running.ended
    assert receiving.ended


def test_a_landed_hand_off_may_be_preempted_and_is_then_computed_here(driver):
    d = driver(num_blocks=6, prefix_cache=False)
    d.add("a", 6, max_tokens=12)
    d.step()
    landed = d.receive("b", 11, max_tokens=8)
    while d.scheduler.has_work():
        d.step()
    d.land("b", num_transferred_tokens=11)
    assert d.plan().preempted == [landed]
    assert landed.state is State.PREEMPTED


def test_a_preempted_hand_off_counts_its_prompt_as_recomputed(driver):
    d = driver(num_blocks=6, prefix_cache=False)
    d.add("a", 6, max_tokens=12)
    d.step()
    landed = d.receive("b", 11, max_tokens=8)
    while d.scheduler.has_work():
        d.step()
    d.land("b", num_transferred_tokens=11)
    d.run_until_idle()
    assert landed.num_recomputed_tokens == 11
    assert d.emitted["b"] == [7] * 7


def test_a_single_sequence_that_fits_the_pool_finishes(driver):
    d = driver(num_blocks=5)
    d.add("a", 5, max_tokens=15)
    d.run_until_idle()
    assert len(d.emitted["a"]) == 15


def test_the_token_of_a_step_in_flight_is_dropped_when_its_sequence_is_preempted(driver):
    d, first, second = crowded(driver)
    in_flight = d.plan()
    before = len(second.token_ids)
    d.scheduler._preempt(second)
    d.scheduler.check()
    events = d.commit(in_flight)
    assert [event.sequence for event in events] == [first]
    assert len(second.token_ids) == before
    d.run_until_idle()
    assert len(d.emitted["b"]) == 17


def test_blocks_that_a_step_in_flight_writes_to_are_free_only_after_its_commit(driver):
    d = driver(prefix_cache=False)
    d.add("a", 10)
    d.step()
    in_flight = d.plan()
    d.abort("a")
    assert (d.pool.num_held, d.pool.num_quarantined) == (0, 1)
    d.commit(in_flight)
    d.assert_at_rest()


def test_blocks_of_two_steps_in_flight_are_free_only_after_the_second_commit(driver):
    d = driver(max_num_batched_tokens=8)
    d.add("a", 20)
    first, second = d.plan(), d.plan()
    d.abort("a")
    d.commit(first)
    assert d.pool.num_quarantined > 0
    d.commit(second)
    d.assert_at_rest()


def test_a_step_that_a_sequence_has_left_has_no_say_in_its_later_blocks(driver, chunks_of):
    d = driver()
    prompt = list(range(12))
    d.add("other", prompt, max_tokens=1)
    others = d.plan()
    sequence = d.add("a", prompt)
    left = d.plan()
    d.commit(others)
    d.scheduler._preempt(sequence)
    again = d.plan()
    assert (chunks_of(left), chunks_of(again)) == ({"a": (0, 12)}, {"a": (8, 12)})
    d.abort("a")
    d.commit(left)
    d.commit(again)
    assert "a" not in d.emitted
    d.assert_at_rest()


def test_prefill_legs_that_lend_are_named_when_they_lose_their_blocks(driver):
    d = driver(num_blocks=8, max_num_batched_tokens=4)
    d.add("a", 4, max_tokens=17)
    lender = d.add("b", 22, leg=Leg.PREFILL)
    while not lender.num_preemptions and lender.state is not State.EXPORTED:
        step = d.step()
    assert step.preempted == [lender]
