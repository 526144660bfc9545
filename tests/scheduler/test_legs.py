"""How each leg ends, and what is left when it is aborted anywhere on the way."""

from __future__ import annotations

import pytest

from baton.proto.messages import FinishReason, Leg
from baton.scheduler.plan import Emitted, Progressed
from baton.scheduler.sequence import State


def test_a_stop_token_ends_a_sequence(driver):
    d = driver()
    sequence = d.add("a", 4, max_tokens=8)
    d.step(token=5)
    d.step(token=2)
    assert (d.finished, sequence.finish_reason) == ({"a": FinishReason.STOP}, FinishReason.STOP)
    assert d.emitted == {"a": [5, 2]}
    d.assert_at_rest()


def test_a_stop_token_before_min_tokens_ends_nothing(driver):
    d = driver()
    d.add("a", 4, max_tokens=8, min_tokens=3)
    for _ in range(3):
        d.step(token=2)
    assert d.emitted == {"a": [2, 2, 2]}
    assert d.finished == {"a": FinishReason.STOP}


def test_max_tokens_ends_a_sequence(driver):
    d = driver()
    d.add("a", 4, max_tokens=3)
    d.run_until_idle()
    assert (d.emitted, d.finished) == ({"a": [7, 7, 7]}, {"a": FinishReason.LENGTH})


def test_tokens_of_an_earlier_attempt_count_against_max_tokens(driver):
    d = driver()
    d.add("a", 6, num_prompt_tokens=4, max_tokens=3)
    d.run_until_idle()
    assert (d.emitted, d.finished) == ({"a": [7]}, {"a": FinishReason.LENGTH})


def test_the_longest_sequence_of_the_model_ends_there(driver):
    d = driver(max_model_len=6)
    d.add("a", 4, max_tokens=2)
    d.run_until_idle()
    assert d.emitted == {"a": [7, 7]}


def test_a_landed_hand_off_goes_on_after_the_token_it_came_with(driver):
    d = driver()
    sequence = d.receive("a", 8, max_tokens=3)
    d.plan()
    d.land("a", next_token=9, num_transferred_tokens=8)
    assert (sequence.token_ids[-1], sequence.num_transferred_tokens) == (9, 8)
    d.run_until_idle()
    assert (d.emitted, d.finished) == ({"a": [7, 7]}, {"a": FinishReason.LENGTH})
    d.assert_at_rest()


def test_a_hand_off_that_lands_with_its_last_token_is_finished(driver):
    d = driver()
    sequence = d.receive("a", 8)
    d.plan()
    d.land("a", next_token=2)
    assert (sequence.state, sequence.finish_reason) == (State.FINISHED, FinishReason.STOP)
    d.assert_at_rest()


def test_late_and_unknown_landings_change_nothing(driver):
    d = driver()
    d.receive("a", 8)
    assert not d.scheduler.land("a", 7, 8, 0.0)
    assert not d.scheduler.land("nobody", 7, 8, 0.0)
    d.plan()
    d.land("a")
    assert not d.scheduler.land("a", 7, 8, 0.0)


def test_the_moments_of_a_hand_off_are_kept(driver):
    d = driver()
    sequence = d.receive("a", 8, max_tokens=2)
    d.plan()
    d.land("a")
    d.run_until_idle()
    assert sequence.added_s < sequence.landed_s < sequence.first_run_s < sequence.finished_s


def test_a_prefill_leg_reports_each_chunk_then_its_token_and_lends_its_blocks(driver):
    d = driver(max_num_batched_tokens=8)
    sequence = d.add("a", 12, leg=Leg.PREFILL)
    assert d.commit(d.plan()) == [Progressed(sequence, 8)]
    assert d.commit(d.plan()) == [Progressed(sequence, 12), Emitted(sequence, 7, None)]
    assert sequence.state is State.EXPORTED
    assert (d.pool.num_lent, d.pool.num_held) == (3, 0)
    assert d.scheduler.load().exported == 1


def test_released_blocks_stay_in_the_prefix_cache(driver):
    d = driver()
    sequence = d.add("a", 12, leg=Leg.PREFILL)
    d.step()
    assert d.scheduler.release("a", d.now())
    d.scheduler.check()
    assert sequence.state is State.FINISHED
    assert d.pool.num_cached == 3
    d.assert_at_rest()


def test_late_and_unknown_releases_change_nothing(driver):
    d = driver()
    d.add("a", 12, leg=Leg.PREFILL)
    assert not d.scheduler.release("a", 0.0)
    assert not d.scheduler.release("nobody", 0.0)
    d.step()
    assert d.scheduler.release("a", 0.0)
    assert not d.scheduler.release("a", 0.0)


@pytest.mark.parametrize(("token", "max_tokens", "reason"), [(2, 8, FinishReason.STOP), (7, 1, FinishReason.LENGTH)])
def test_a_prefill_leg_whose_first_token_ends_the_request_lends_nothing(driver, token, max_tokens, reason):
    d = driver()
    sequence = d.add("a", 12, leg=Leg.PREFILL, max_tokens=max_tokens)
    events = d.commit(d.plan(), token)
    assert events == [Progressed(sequence, 12), Emitted(sequence, token, reason)]
    assert sequence.state is State.FINISHED
    d.assert_at_rest()


def expected(d):
    return d.add("a", 12, leg=Leg.DECODE)


def waiting(d):
    return d.add("a", 12)


def receiving(d):
    sequence = d.receive("a", 12)
    d.plan()
    return sequence


def landed(d):
    sequence = receiving(d)
    d.land("a")
    return sequence


def running(d):
    sequence = d.add("a", 12)
    d.step()
    return sequence


def running_midway(d):
    sequence = d.add("a", 120)
    d.step()
    return sequence


def exported(d):
    sequence = d.add("a", 12, leg=Leg.PREFILL)
    d.step()
    return sequence


def preempted(d):
    sequence = running(d)
    d.scheduler._preempt(sequence)
    return sequence


WAYS = {
    State.EXPECTED: [expected],
    State.WAITING: [waiting],
    State.RECEIVING: [receiving],
    State.LANDED: [landed],
    State.RUNNING: [running, running_midway],
    State.EXPORTED: [exported],
    State.PREEMPTED: [preempted],
}


@pytest.mark.parametrize(("state", "way"), [(state, way) for state, ways in WAYS.items() for way in ways])
def test_an_abort_in_any_state_leaves_nothing_held(driver, state, way):
    d = driver(max_num_batched_tokens=64)
    sequence = way(d)
    assert sequence.state is state
    assert d.abort("a") is sequence
    assert (sequence.state, sequence.finish_reason) == (State.ABORTED, FinishReason.ABORTED)
    assert d.scheduler.get("a") is None
    d.scheduler.settle("a")
    d.assert_at_rest()
    assert d.scheduler.counters.requests_aborted == 1


@pytest.mark.parametrize("way", [waiting, running, running_midway, landed])
def test_an_abort_between_plan_and_commit_yields_no_token_and_leaves_nothing_held(driver, way):
    d = driver(max_num_batched_tokens=64)
    way(d)
    step = d.plan()
    assert step.chunks
    d.abort("a")
    assert d.commit(step) == []
    d.assert_at_rest()


def test_an_aborted_id_that_is_added_again_gets_nothing_of_the_old_step(driver):
    d = driver()
    d.add("a", 12)
    old = d.plan()
    d.abort("a")
    again = d.add("a", 12)
    assert d.commit(old) == []
    assert again.state is State.WAITING


def test_unknown_and_ended_sequences_cannot_be_aborted(driver):
    d = driver()
    d.add("a", 4, max_tokens=1)
    d.run_until_idle()
    assert d.abort("a") is None
    assert d.abort("nobody") is None


def test_blocks_that_are_being_pulled_into_are_quarantined_until_settled(driver):
    d = driver(num_blocks=6)
    d.receive("a", 12)
    d.plan()
    d.abort("a")
    assert (d.pool.num_quarantined, d.pool.num_held) == (4, 0)
    late = d.add("b", 12, max_tokens=1)
    d.step()
    assert late.state is State.WAITING
    assert d.scheduler.settle("a")
    assert d.scheduler.has_work()
    d.run_until_idle()
    assert d.emitted == {"b": [7]}


def test_blocks_that_a_hand_off_found_in_the_cache_are_not_quarantined(driver):
    d = driver()
    d.add("first", range(12), max_tokens=1)
    d.run_until_idle()
    d.receive("a", range(12))
    d.plan()
    d.abort("a")
    assert d.pool.num_quarantined == 1


def test_settling_twice_or_what_was_never_aborted_changes_nothing(driver):
    d = driver()
    d.receive("a", 12)
    d.plan()
    assert not d.scheduler.settle("a")
    d.abort("a")
    assert d.scheduler.settle("a")
    assert not d.scheduler.settle("a")
    assert not d.scheduler.settle("nobody")
