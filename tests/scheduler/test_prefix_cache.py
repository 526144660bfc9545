"""What a scheduler finds in its prefix cache, and what it puts there."""

from __future__ import annotations

import pytest

from baton.proto.messages import Leg

PROMPT = list(range(100, 112))  # three full blocks of four


def computed(driver, **settings):
    """A scheduler whose cache holds PROMPT and the token 7 after it; the sequence that did it has ended."""
    d = driver(**settings)
    d.add("first", PROMPT, max_tokens=2)
    d.run_until_idle()
    return d


def test_full_blocks_of_a_finished_sequence_are_not_computed_again(driver, chunks_of):
    d = computed(driver)
    sequence = d.add("a", [*PROMPT, 1, 2])
    assert chunks_of(d.step()) == {"a": (12, 14)}
    assert sequence.num_cached_tokens == 12
    assert d.scheduler.counters.prompt_tokens_cached == 12


def test_the_last_token_is_always_computed(driver, chunks_of):
    d = computed(driver)
    d.add("a", PROMPT)
    assert chunks_of(d.step()) == {"a": (8, 12)}


def test_hits_and_queries_are_counted_in_tokens(driver):
    d = computed(driver)
    d.add("a", [*PROMPT, 1])
    d.step()
    assert (d.scheduler.counters.prefix_queries, d.scheduler.counters.prefix_hits) == (12 + 13, 12)


def test_blocks_of_one_salt_are_not_given_to_another(driver, chunks_of):
    d = driver()
    d.add("mine", PROMPT, max_tokens=1, salt="mine")
    d.run_until_idle()
    for name, scope in {"yours": {"salt": "yours"}, "nobody's": {}, "adapted": {"adapter": "mine"}}.items():
        d.add(name, PROMPT, max_tokens=1, **scope)
        assert chunks_of(d.step()) == {name: (0, 12)}


def test_blocks_are_shared_with_a_sequence_that_still_runs(driver):
    d = driver()
    first = d.add("a", [*PROMPT, 1])
    d.step()
    second = d.add("b", [*PROMPT, 2])
    d.step()
    assert first.block_ids[:3] == second.block_ids[:3]
    assert first.block_ids[3] != second.block_ids[3]


def test_equal_prompts_of_one_step_are_each_computed_and_both_are_freed(driver, chunks_of):
    d = driver()
    d.add("a", PROMPT, max_tokens=2)
    d.add("b", PROMPT, max_tokens=2)
    assert chunks_of(d.step()) == {"a": (0, 12), "b": (0, 12)}
    d.run_until_idle()
    d.assert_at_rest()
    assert d.pool.num_cached == 3


def test_output_is_found_too(driver, chunks_of):
    d = driver()
    d.add("a", PROMPT, max_tokens=6)
    d.run_until_idle()
    d.add("next turn", [*PROMPT, 7, 7, 7, 7, 7, 7, 1])
    assert chunks_of(d.step()) == {"next turn": (16, 19)}


def test_blocks_are_found_only_once_they_have_been_computed(driver, chunks_of):
    d = driver()
    d.add("a", [*PROMPT, 1])
    in_flight = d.plan()
    d.add("b", [*PROMPT, 2])
    assert chunks_of(d.plan()) == {"b": (0, 13)}
    d.commit(in_flight)
    d.add("c", [*PROMPT, 3])
    assert chunks_of(d.plan()) == {"a": (13, 14), "c": (12, 13)}


def test_a_request_for_prompt_logprobs_computes_all_of_its_prompt(driver, chunks_of):
    d = computed(driver)
    d.add("a", PROMPT, prompt_logprobs=1)
    assert chunks_of(d.step()) == {"a": (0, 12)}


def test_what_a_request_for_prompt_logprobs_computed_is_found_by_others(driver, chunks_of):
    d = driver()
    d.add("a", PROMPT, prompt_logprobs=0, max_tokens=1)
    d.run_until_idle()
    d.add("b", [*PROMPT, 1])
    assert chunks_of(d.step()) == {"b": (12, 13)}


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_a_hand_off_may_find_every_full_block_for_it_needs_no_logits(driver, prompt_logprobs):
    d = computed(driver)
    sequence = d.receive("a", PROMPT, prompt_logprobs=prompt_logprobs)
    assert d.plan().reserved == [sequence]
    assert sequence.num_computed_tokens == sequence.num_cached_tokens == 12
    assert len(sequence.block_ids) == 4


def test_a_landed_prompt_is_found_by_the_next(driver):
    d = driver()
    d.receive("a", [*PROMPT, 1])
    d.plan()
    d.land("a")
    second = d.receive("b", [*PROMPT, 2])
    d.plan()
    assert second.num_cached_tokens == 12


def test_a_prompt_that_is_still_being_received_is_found_by_nobody(driver):
    d = driver()
    d.receive("a", PROMPT)
    second = d.receive("b", PROMPT)
    d.plan()
    assert second.num_cached_tokens == 0


def test_lent_blocks_may_be_shared(driver, chunks_of):
    d = driver()
    d.add("a", PROMPT, leg=Leg.PREFILL)
    d.step()
    assert d.pool.num_lent == 3
    d.add("b", [*PROMPT, 1], max_tokens=1)
    in_flight = d.plan()
    assert chunks_of(in_flight) == {"b": (12, 13)}
    assert (d.pool.num_lent, d.pool.num_held) == (0, 4)
    d.commit(in_flight)
    assert d.pool.num_lent == 3


def test_switched_off_nothing_is_found_and_nothing_is_kept(driver, chunks_of):
    d = computed(driver, prefix_cache=False)
    assert d.pool.num_cached == 0
    d.add("a", PROMPT)
    assert chunks_of(d.step()) == {"a": (0, 12)}
    assert d.scheduler.counters.prefix_queries == 0
