"""Whole requests on a decode worker: further outputs of a prompt whose KV has landed there, and nothing else."""

from __future__ import annotations

import pytest

from baton.proto.messages import FailureKind, Leg, Role
from baton.scheduler.scheduler import Refusal
from baton.scheduler.sequence import State

PROMPT = list(range(100, 114))  # three full blocks of four, and two tokens


def landed(driver, prompt=PROMPT, **settings):
    """A decode worker on which the first output of a prompt has begun."""
    d = driver(role=Role.DECODE, **settings)
    d.receive("first", prompt, max_tokens=20)
    d.plan()
    d.land("first", num_transferred_tokens=len(prompt))
    d.step()
    return d


def test_a_fork_shares_the_full_blocks_and_computes_the_rest_and_its_own_first_token(driver, chunks_of):
    d = landed(driver)
    first, fork = d.scheduler.get("first"), d.add("fork", PROMPT, max_tokens=3)
    assert chunks_of(d.step())["fork"] == (12, 14)
    assert fork.block_ids[:3] == first.block_ids[:3]
    assert not set(fork.block_ids[3:]) & set(first.block_ids)
    assert fork.num_cached_tokens == 12
    d.run_until_idle()
    assert len(d.emitted["fork"]) == 3
    d.assert_at_rest()


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 12])
def test_at_most_one_block_of_a_landed_prompt_is_computed_again(driver, chunks_of, length):
    d = landed(driver, PROMPT[:length])
    d.add("fork", PROMPT[:length])
    start, end = chunks_of(d.step())["fork"]
    assert (start, end) == ((length - 1) // 4 * 4, length)


def test_a_fork_finds_the_blocks_of_an_output_that_has_ended(driver, chunks_of):
    d = landed(driver)
    d.run_until_idle()
    d.add("fork", PROMPT)
    assert chunks_of(d.step()) == {"fork": (12, 14)}


def test_a_decode_worker_refuses_a_prompt_that_it_would_have_to_compute(driver):
    d = driver(role=Role.DECODE)
    refusal = d.offer("fork", PROMPT)
    assert isinstance(refusal, Refusal)
    assert refusal.kind is FailureKind.SOURCE_LOST
    assert refusal.message.startswith("14 of 14 tokens are not in the prefix cache")
    d.assert_at_rest()


@pytest.mark.parametrize("why", ["another salt", "log-probabilities of the prompt", "no prefix cache"])
def test_a_decode_worker_refuses_what_cannot_share(driver, why):
    d = landed(driver, prefix_cache=why != "no prefix cache")
    fields = {"another salt": {"salt": "mine"}, "log-probabilities of the prompt": {"prompt_logprobs": 1}}.get(why, {})
    assert isinstance(d.offer("fork", PROMPT, **fields), Refusal)


def test_a_decode_worker_computes_a_prompt_of_two_blocks_by_itself(driver, chunks_of):
    d = driver(role=Role.DECODE)
    d.add("short", PROMPT[:8])
    assert chunks_of(d.step()) == {"short": (0, 8)}
    assert isinstance(d.offer("longer", PROMPT[4:13]), Refusal)


def test_a_co_located_worker_computes_any_prompt(driver, chunks_of):
    d = driver(role=Role.COLOCATED)
    d.add("whole", PROMPT)
    assert chunks_of(d.step()) == {"whole": (0, 14)}


def test_a_fork_whose_blocks_are_evicted_while_it_waits_is_computed_here(driver):
    d = landed(driver, num_blocks=12, max_num_seqs=1)
    fork = d.add("fork", PROMPT, max_tokens=2)
    d.abort("first")
    d.pool.release(d.pool.allocate(12))
    assert d.pool.num_cached == 0
    d.run_until_idle()
    assert (fork.state, fork.num_cached_tokens, len(d.emitted["fork"])) == (State.FINISHED, 0, 2)
    d.assert_at_rest()


def test_preempted_forks_come_back_and_end(driver):
    d = landed(driver, num_blocks=14)
    for index in range(3):
        d.add(f"fork{index}", PROMPT, max_tokens=20)
    d.run_until_idle()
    assert {name: len(tokens) for name, tokens in d.emitted.items()} == {
        "first": 19,
        "fork0": 20,
        "fork1": 20,
        "fork2": 20,
    }
    assert d.scheduler.counters.preemptions_recompute > 0
    d.assert_at_rest()


def test_a_fork_and_a_hand_off_wait_in_the_order_in_which_they_came(driver):
    d = landed(driver, max_num_seqs=1)
    d.receive("handoff", range(500, 514))
    fork = d.add("fork", PROMPT)
    d.abort("first")
    step = d.plan()
    assert [sequence.sequence_id for sequence in step.reserved] == ["handoff"]
    assert (fork.state, fork.leg) == (State.WAITING, Leg.WHOLE)
