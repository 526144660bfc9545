"""The prefix index: what it answers, and that it is bounded without lying about chains."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.prefix_index import PrefixIndex


def chain(*tokens: int) -> list[tuple[int, ...]]:
    """Hashes that chain: each is all the tokens so far."""
    return [tokens[: end + 1] for end in range(len(tokens))]


def test_the_leading_blocks_that_a_worker_was_sent_match() -> None:
    index = PrefixIndex()
    index.record("p0", chain(1, 2, 3))
    assert index.match("p0", chain(1, 2, 3, 4)) == 3
    assert index.match("p0", chain(1, 2, 9)) == 2
    assert index.match("p0", chain(9, 2, 3)) == 0
    assert index.match("p1", chain(1, 2, 3)) == 0
    assert index.match("p0", []) == 0


def test_the_last_token_is_always_computed() -> None:
    index = PrefixIndex()
    index.record("p0", chain(1, 2))
    assert index.uncached_tokens("p0", chain(1, 2), num_tokens=32, block_size=16) == 1
    assert index.uncached_tokens("p0", chain(1, 2), num_tokens=40, block_size=16) == 8
    assert index.uncached_tokens("p1", chain(1, 2), num_tokens=40, block_size=16) == 40


def test_a_dropped_worker_has_nothing() -> None:
    index = PrefixIndex()
    index.record("p0", chain(1, 2))
    index.drop("p0")
    index.drop("p0")
    assert index.match("p0", chain(1, 2)) == 0


def test_the_least_recently_used_chain_goes_first_and_from_its_end() -> None:
    index = PrefixIndex(blocks_per_worker=4)
    index.record("p0", chain(1, 2, 3))
    index.record("p0", chain(7, 8))
    assert index.match("p0", chain(1, 2, 3)) == 2
    index.record("p0", chain(1))
    index.record("p0", chain(9, 9))
    assert index.match("p0", chain(1)) == 1
    assert index.size("p0") == 4


def test_a_chain_longer_than_the_bound_keeps_its_start() -> None:
    index = PrefixIndex(blocks_per_worker=2)
    index.record("p0", chain(1, 2, 3, 4))
    assert index.match("p0", chain(1, 2, 3, 4)) == 2


chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=25)


@settings(max_examples=300, deadline=None)
@given(chains, chains, st.integers(1, 12))
def test_bisection_finds_what_looking_at_every_block_finds(
    recorded: list[list[int]], asked: list[list[int]], bound: int
) -> None:
    index = PrefixIndex(blocks_per_worker=bound)
    for tokens in recorded:
        index.record("p0", chain(*tokens))
        assert index.size("p0") <= bound
    for tokens in asked + recorded:
        hashes = chain(*tokens)
        leading = 0
        while leading < len(hashes) and index.match("p0", hashes[: leading + 1]) == leading + 1:
            leading += 1
        assert index.match("p0", hashes) == leading


def test_a_worker_is_not_believed_to_have_cached_more_than_its_pool_holds():
    index = PrefixIndex()
    index.expect("w", 3)
    index.record("w", ["a", "b", "c", "d", "e"])
    assert index.match("w", ["a", "b", "c", "d", "e"]) == 3
    assert index.size("w") == 3
    index.drop("w")
    index.record("w", ["a", "b", "c", "d", "e"])
    assert index.size("w") == 5
