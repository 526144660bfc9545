"""Keys in batches go in the order in which a dict that is told of each would let them go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.scheduler import recency as recency_file
from baton.scheduler.recency import BlockRecency, Recency

batches = st.lists(st.integers(0, 12), unique=True, max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(batches, st.integers(0, 5), st.tuples(st.integers(0, 12))), max_size=40), st.booleans())
def test_keys_go_in_the_order_in_which_they_were_last_touched(events, tight: bool) -> None:
    """A list is touched, a number says how many go, a tuple names one that is taken out."""
    left_behind, recency_file._LEFT_BEHIND = recency_file._LEFT_BEHIND, 2 if tight else 1024
    try:
        recency: Recency[int] = Recency()
        expected: dict[int, None] = {}
        for event in events:
            if isinstance(event, list):
                recency.touch(event)
                for key in event:
                    expected.pop(key, None)
                    expected[key] = None
            elif isinstance(event, tuple):
                if event[0] in expected:
                    recency.remove(event[0])
                    del expected[event[0]]
            else:
                number = min(event, len(expected))
                oldest = list(expected)[:number]
                assert recency.pop_oldest(number) == oldest
                for key in oldest:
                    del expected[key]
            assert list(recency) == list(expected)
            assert len(recency) == len(expected)
            assert all((key in recency) == (key in expected) for key in range(13))
    finally:
        recency_file._LEFT_BEHIND = left_behind


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(batches, st.integers(0, 5), st.tuples(st.integers(0, 12))), max_size=40), st.booleans())
def test_blocks_go_in_the_order_in_which_other_keys_would(events, tight: bool) -> None:
    """As above; a block that is there is taken out before it is touched."""
    left_behind, recency_file._LEFT_BEHIND = recency_file._LEFT_BEHIND, 2 if tight else 1024
    try:
        recency: Recency[int] = Recency()
        blocks = BlockRecency(13)
        for event in events:
            if isinstance(event, list):
                for block_id in event:
                    if block_id in blocks:
                        blocks.remove(block_id)
                recency.touch(event)
                blocks.touch(event)
            elif isinstance(event, tuple):
                if event[0] in recency:
                    recency.remove(event[0])
                    blocks.remove(event[0])
            else:
                number = min(event, len(recency))
                assert blocks.pop_oldest(number) == recency.pop_oldest(number)
            assert list(blocks) == list(recency)
            assert len(blocks) == len(recency)
            assert all((block_id in blocks) == (block_id in recency) for block_id in range(13))
    finally:
        recency_file._LEFT_BEHIND = left_behind


def test_what_was_left_behind_does_not_pile_up() -> None:
    recency: Recency[int] = Recency()
    for _ in range(10_000):
        recency.touch(range(50))
    assert list(recency) == list(range(50))
    assert sum(map(len, recency._batches)) < 2 * 50 + 1024 + 50
