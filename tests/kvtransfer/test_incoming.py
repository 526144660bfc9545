"""What is read next: each block from where the source told last that it is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kvtransfer.incoming import Incoming
from baton.proto.messages import ChunkNotice, HandoffSource

BLOCK, LENGTH = 4, 30
NUM_BLOCKS = -(-LENGTH // BLOCK)
SOURCE = HandoffSource("p0", "p0/1", "p0:1", "s.prefill")


@settings(max_examples=200, deadline=None)
@given(
    ends=st.lists(st.integers(1, NUM_BLOCKS - 1), unique=True, max_size=5).map(sorted),
    again=st.lists(st.booleans(), min_size=6, max_size=6),
    reads=st.lists(st.booleans(), min_size=6, max_size=6),
    cached=st.integers(0, NUM_BLOCKS - 1),
)
def test_every_block_is_read_once_from_where_the_source_told_that_it_is(ends, again, reads, cached) -> None:
    """`again`: a notice tells all from the first block on, as to one that has subscribed anew."""
    incoming = Incoming("s.decode", SOURCE, LENGTH, BLOCK)
    incoming.reserve(tuple(range(100, 100 + NUM_BLOCKS)), cached * BLOCK)
    blocks = [7 * index % 61 for index in range(NUM_BLOCKS)]
    read: list[tuple[int, int]] = []
    told = 0
    for end, from_the_first, reads_now in zip([*ends, NUM_BLOCKS], again, reads, strict=False):
        first, final = 0 if from_the_first else told, end == NUM_BLOCKS
        num_tokens = LENGTH if final else end * BLOCK
        notice = ChunkNotice("s.prefill", 0, num_tokens, first, tuple(blocks[first:end]), final, 5 if final else 0)
        incoming.notice(notice)
        told = end
        if reads_now or final:
            wanted = incoming.want()
            if wanted is not None:
                assert len(wanted.source_blocks) == len(wanted.destination_blocks)
                read += zip(wanted.destination_blocks, wanted.source_blocks, strict=True)
                incoming.finished()
                incoming.settled()
    assert read == [(100 + index, blocks[index]) for index in range(cached, NUM_BLOCKS)]
