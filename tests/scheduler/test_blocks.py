"""The block pool and its prefix cache."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.scheduler.blocks import BlockPool, extend_prefix_hashes, prefix_hashes

SIZE = 4


def named(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Blocks held for `tokens`, as a sequence would: what the cache has first, the rest allocated and registered."""
    hashes = prefix_hashes(tokens, SIZE, salt)
    hits = pool.match(hashes)
    pool.hold(hits)
    fresh = pool.allocate(-(-len(tokens) // SIZE) - len(hits))
    for block_id, name in zip(fresh, hashes[len(hits) :], strict=False):
        pool.register([block_id], [name])
    pool.check()
    return hits + fresh


def release(pool: BlockPool, block_ids: list[int]) -> None:
    pool.release(block_ids)
    pool.check()


def test_only_full_blocks_have_names():
    assert [len(prefix_hashes(list(range(n)), SIZE)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_name_stands_for_every_token_before_it():
    first, second = prefix_hashes([1, 2, 3, 4, 9, 9, 9, 9], SIZE), prefix_hashes([5, 2, 3, 4, 9, 9, 9, 9], SIZE)
    assert first[1] != second[1]


def test_equal_prefixes_have_equal_names():
    assert prefix_hashes([1, 2, 3, 4, 5], SIZE) == prefix_hashes([1, 2, 3, 4, 6, 7], SIZE)


def test_salt_and_adapter_and_where_one_ends_are_part_of_every_name():
    scopes = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc")]
    assert len({prefix_hashes([1, 2, 3, 4], SIZE, salt, adapter)[0] for salt, adapter in scopes}) == len(scopes)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 40))
def test_names_extended_bit_by_bit_are_the_names_made_at_once(tokens, cut):
    hashes = prefix_hashes(tokens[:cut], SIZE, "salt", "adapter")
    extend_prefix_hashes(hashes, tokens, SIZE, "salt", "adapter")
    assert hashes == prefix_hashes(tokens, SIZE, "salt", "adapter")


def test_names_are_the_same_in_every_process():
    program = "from baton.scheduler.blocks import prefix_hashes as p; print(p([1, 2, 3, 4], 4, 'salt')[0].hex())"
    path = [entry for entry in sys.path if entry.endswith("src")]
    other = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(path)}, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == prefix_hashes([1, 2, 3, 4], 4, "salt")[0].hex()


def test_fresh_blocks_come_in_ascending_runs():
    pool = BlockPool(8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) == [3]


def test_a_run_that_was_released_is_handed_out_as_a_run_again():
    pool = BlockPool(8)
    run = pool.allocate(4)
    pool.allocate(2)
    release(pool, run)
    assert pool.allocate(4) == run


def test_evicted_blocks_come_in_ascending_order_too():
    pool = BlockPool(4)
    release(pool, named(pool, list(range(16))))
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_free_blocks_are_taken_before_cached_ones():
    pool = BlockPool(4)
    release(pool, named(pool, [1, 2, 3, 4]))
    pool.allocate(3)
    assert pool.num_cached == 1


def test_a_released_block_without_a_name_is_free():
    pool = BlockPool(2)
    release(pool, named(pool, [1, 2, 3]))
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_released_content_is_found_again():
    pool = BlockPool(4)
    blocks = named(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    release(pool, blocks)
    assert pool.match(prefix_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], SIZE)) == blocks


def test_content_of_another_salt_is_not_found():
    pool = BlockPool(4)
    named(pool, [1, 2, 3, 4], salt="mine")
    assert pool.match(prefix_hashes([1, 2, 3, 4], SIZE, "yours")) == []


def test_the_least_recently_released_is_evicted_first():
    pool = BlockPool(3)
    first, second = named(pool, [1, 1, 1, 1]), named(pool, [2, 2, 2, 2])
    release(pool, second)
    release(pool, first)
    pool.allocate(2)
    assert pool.match(prefix_hashes([1, 1, 1, 1], SIZE)) == first
    assert pool.match(prefix_hashes([2, 2, 2, 2], SIZE)) == []


def test_the_deepest_block_of_a_release_is_evicted_first():
    pool = BlockPool(3)
    tokens = list(range(12))
    blocks = named(pool, tokens)
    release(pool, blocks)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.match(prefix_hashes(tokens, SIZE)) == blocks[:left]


def test_a_held_block_is_never_evicted():
    pool = BlockPool(2)
    named(pool, [1, 2, 3, 4])
    pool.allocate(1)
    assert pool.num_available == 0
    assert len(pool.match(prefix_hashes([1, 2, 3, 4], SIZE))) == 1


def test_a_hit_is_no_longer_evictable_until_its_last_holder_releases_it():
    pool = BlockPool(2)
    first = named(pool, [1, 2, 3, 4])
    second = named(pool, [1, 2, 3, 4])
    assert first == second
    release(pool, first)
    assert (pool.num_cached, pool.num_held) == (0, 1)
    release(pool, second)
    assert (pool.num_cached, pool.num_held) == (1, 0)


def test_two_blocks_with_one_content_have_one_name_and_both_come_back():
    pool = BlockPool(4)
    name = prefix_hashes([1, 2, 3, 4], SIZE)[0]
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first, [name])
    pool.register(second, [name])
    pool.check()
    assert pool.match([name]) == first
    release(pool, first)
    release(pool, second)
    assert (pool.num_free, pool.num_cached) == (3, 1)


def test_a_block_is_lent_only_while_every_holder_has_lent_it():
    pool = BlockPool(2)
    blocks = named(pool, [1, 2, 3, 4])
    pool.lend(blocks)
    pool.check()
    assert (pool.num_lent, pool.num_held) == (1, 0)
    pool.hold(blocks)
    pool.check()
    assert (pool.num_lent, pool.num_held) == (0, 1)
    release(pool, blocks)
    assert (pool.num_lent, pool.num_held) == (1, 0)
    pool.reclaim(blocks)
    release(pool, blocks)
    assert (pool.num_lent, pool.num_cached) == (0, 1)


def test_a_quarantined_block_is_not_handed_out_until_it_has_settled():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.quarantine(blocks)
    pool.check()
    assert (pool.num_available, pool.num_quarantined) == (0, 2)
    pool.settle(blocks)
    pool.check()
    assert (pool.num_available, pool.num_quarantined) == (2, 0)


def test_a_shared_block_cannot_be_quarantined():
    pool = BlockPool(2)
    blocks = named(pool, [1, 2, 3, 4])
    pool.hold(blocks)
    with pytest.raises(AssertionError):
        pool.quarantine(blocks)


@dataclass
class SlowBlock:
    prefix: tuple[int, ...] | None = None  # all tokens up to its end, if it is findable
    holders: int = 0
    released: int = 0


@dataclass
class SlowPool:
    """Every block with its whole prefix, searched from one end to the other."""

    blocks: list[SlowBlock]
    stamps: list[int] = field(default_factory=lambda: [0])

    def match(self, tokens):
        found = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            hit = next((b for b in self.blocks if b.prefix == tuple(tokens[:end])), None)
            if hit is None:
                return found
            found.append(hit)
        return found

    def take(self, tokens):
        mine = self.match(tokens)
        for block in mine:
            block.holders += 1
        while len(mine) * SIZE < len(tokens):
            idle = [b for b in self.blocks if not b.holders]
            block = min(idle, key=lambda b: (b.prefix is not None, b.released))
            end = (len(mine) + 1) * SIZE
            block.prefix = tuple(tokens[:end]) if end <= len(tokens) else None
            block.holders = 1
            mine.append(block)
        return mine

    def release(self, mine):
        for block in reversed(mine):
            block.holders -= 1
            self.stamps[0] += 1
            block.released = self.stamps[0]

    def available(self):
        return sum(not block.holders for block in self.blocks)

    def cached(self):
        return sum(not block.holders and block.prefix is not None for block in self.blocks)


@settings(max_examples=150, deadline=None)
@given(st.integers(4, 12), st.integers(0, 2**32), st.integers(5, 60))
def test_the_pool_finds_and_evicts_what_a_slow_obvious_one_does(num_blocks, seed, num_events):
    chance = random.Random(seed)
    pool, slow = BlockPool(num_blocks), SlowPool([SlowBlock() for _ in range(num_blocks)])
    holders = []
    for _ in range(num_events):
        tokens = [chance.choice((1, 1, 1, 2)) for _ in range(chance.randrange(1, 4 * SIZE))]
        hashes = prefix_hashes(tokens, SIZE)
        hits = pool.match(hashes)
        assert len(hits) == len(slow.match(tokens))
        fits = -(-len(tokens) // SIZE) - len(hits) + pool.count_cached(hits) <= pool.num_available
        if fits and (not holders or chance.random() < 0.6):
            holders.append((named(pool, tokens), slow.take(tokens)))
        elif holders:
            fast_blocks, slow_blocks = holders.pop(chance.randrange(len(holders)))
            release(pool, fast_blocks)
            slow.release(slow_blocks)
        assert (pool.num_available, pool.num_cached) == (slow.available(), slow.cached())
