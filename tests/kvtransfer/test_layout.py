"""The layout's arithmetic against slow, obvious versions of itself."""

import itertools
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.layout import (
    HeadCut,
    ascending,
    checksum,
    coalesce,
    copy_heads,
    copy_runs,
    head_checksums,
    head_map,
    joined,
    rows,
)
from baton.kvtransfer.runs import count_runs


@st.composite
def moves(draw):
    """Source and destination blocks with a fair chance of consecutive neighbours."""
    destinations = draw(st.lists(st.integers(0, 40), unique=True, max_size=30))
    shift = draw(st.integers(0, 20))
    sources = [block + shift if draw(st.booleans()) else draw(st.integers(0, 60)) for block in destinations]
    return sources, destinations


@given(moves())
def test_runs_move_exactly_the_blocks_that_were_named(case):
    sources, destinations = case
    moved = [
        (run.destination + at, run.source + at) for run in coalesce(sources, destinations) for at in range(run.length)
    ]
    assert moved == sorted(zip(destinations, sources, strict=True))


@given(moves())
def test_no_two_neighbouring_runs_could_be_one(case):
    runs = coalesce(*case)
    for before, after in itertools.pairwise(runs):
        joined = (
            before.source + before.length == after.source and before.destination + before.length == after.destination
        )
        assert not joined


@given(moves())
def test_runs_are_counted_as_they_are_made(case):
    assert count_runs(*case) == len(coalesce(*case))


@given(moves())
def test_ascending_moves_are_the_same_in_order_of_destination(case):
    sources, destinations = ascending(*case)
    assert list(zip(destinations, sources, strict=True)) == sorted(zip(case[1], case[0], strict=True))


@pytest.mark.parametrize("order", [coalesce, ascending])
@pytest.mark.parametrize(("sources", "destinations"), [([1, 2], [1]), ([1, 2], [5, 5])])
def test_moves_that_are_ambiguous_are_refused(sources, destinations, order):
    with pytest.raises(ValueError):
        order(sources, destinations)


@given(moves())
def test_copied_runs_equal_a_copy_block_by_block(case):
    sources, destinations = case
    source = torch.arange(61 * 6, dtype=torch.float32).view(61, 2, 3)
    destination = torch.zeros(41, 2, 3)
    expected = destination.clone()
    expected[destinations] = source[sources]
    copy_runs(source, destination, coalesce(sources, destinations))
    assert torch.equal(destination, expected)


def heads_of(rank, tp, num_kv_heads):
    """The heads that a rank holds, straight from the definition."""
    if tp > num_kv_heads:
        return [rank * num_kv_heads // tp]
    return [head for head in range(num_kv_heads) if head * tp // num_kv_heads == rank]


@pytest.mark.parametrize("prefill_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("decode_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 8, 12, 16, 32])
def test_every_decode_rank_reads_each_of_its_heads_once_from_a_rank_that_holds_it(prefill_tp, decode_tp, num_kv_heads):
    supported = all(num_kv_heads % tp == 0 or tp % num_kv_heads == 0 for tp in (prefill_tp, decode_tp))
    if not supported:
        with pytest.raises(ValueError, match=f"{num_kv_heads} KV heads"):
            head_map(prefill_tp, decode_tp, num_kv_heads)
        return
    slices = head_map(prefill_tp, decode_tp, num_kv_heads)
    for decode_rank in range(decode_tp):
        wanted = heads_of(decode_rank, decode_tp, num_kv_heads)
        landed = {}
        for part in (part for part in slices if part.decode_rank == decode_rank):
            held = heads_of(part.prefill_rank, prefill_tp, num_kv_heads)
            for at in range(part.num_heads):
                assert part.destination_head + at not in landed
                landed[part.destination_head + at] = held[part.source_head + at]
        assert [landed[at] for at in sorted(landed)] == wanted


def test_decode_ranks_that_share_a_head_spread_over_the_prefill_ranks_that_hold_it():
    assert [part.prefill_rank for part in head_map(prefill_tp=4, decode_tp=4, num_kv_heads=2)] == [0, 1, 2, 3]


@pytest.mark.parametrize("numbers", [(0, 1, 4), (1, -1, 4), (1, 1, 0)])
def test_ranks_and_heads_below_one_are_refused(numbers):
    with pytest.raises(ValueError):
        head_map(*numbers)


@st.composite
def head_cuts(draw):
    """Heads of two pools, and some that both have."""
    first, last = sorted(draw(st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True)))
    sides = [range(first - draw(st.integers(0, first)), last + draw(st.integers(0, 4))) for _ in range(2)]
    return HeadCut.of(*sides, range(first, last)), *sides, range(first, last)


@given(head_cuts(), st.lists(st.integers(0, 9), unique=True, max_size=5), st.integers(1, 3))
def test_pieces_of_a_cut_are_its_heads_in_every_layer_of_every_block(case, blocks, num_layers):
    cut, source, destination, heads = case
    for side, pieces in ((source, cut.source_pieces), (destination, cut.destination_pieces)):
        each = len(side) // cut.unit
        covered = [
            (piece // each // num_layers, piece // each % num_layers, side.start + piece % each * cut.unit + at)
            for piece in pieces(np.array(blocks, np.int64), num_layers).tolist()
            for at in range(cut.unit)
        ]
        assert covered == list(itertools.product(blocks, range(num_layers), heads))


@given(head_cuts())
def test_copied_heads_equal_a_copy_head_by_head(case):
    cut, source, destination, heads = case
    whole = torch.randn(4, 2, 16, 2, 3, 2)
    taken = whole[:, :, source.start : source.stop].contiguous()
    given_ = torch.zeros(3, 2, len(destination), 2, 3, 2)
    expected = given_.clone()
    for to, block in ((0, 3), (2, 1)):
        for head in heads:
            expected[to, :, head - destination.start] = whole[block, :, head]
    copy_heads(taken, given_, [3, 1], [0, 2], cut)
    assert torch.equal(given_, expected)


@pytest.mark.parametrize("sides", [(range(2), range(1, 4)), (range(1, 4), range(2)), (range(2), range(2))])
def test_a_cut_of_heads_that_one_side_lacks_is_refused(sides):
    with pytest.raises(ValueError, match="KV heads"):
        HeadCut.of(*sides, range(1, 3))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 6), (torch.bfloat16, 4), (torch.bfloat16, 3)])
def test_a_heads_checksum_is_the_crc_of_its_blocks_sums_times_an_odd_number(dtype, width):
    pool = torch.randn(5, 2, 3, 2, 1, width).to(dtype)
    words = pool.flatten(3).view(torch.int64 if pool[0, 0, 0].nbytes % 8 == 0 else torch.uint8).long()
    for head, found in enumerate(head_checksums(pool, [3, 0, 4], first_head=7)):
        sums = [sum(words[block, :, head].flatten().tolist()) for block in (3, 0, 4)]
        wrapped = b"".join(((total + 2**63) % 2**64 - 2**63).to_bytes(8, "little", signed=True) for total in sums)
        assert found == zlib.crc32(wrapped) * (2 * (7 + head) + 1) % 2**32


def test_checksum_tells_blocks_in_another_order():
    pool = torch.randn(5, 1, 1, 2, 1, 4)
    assert checksum(pool, [1, 2]) != checksum(pool, [2, 1])


def test_checksum_tells_heads_in_another_order():
    pool = torch.randn(5, 1, 2, 2, 1, 4)
    assert checksum(pool, [1, 2]) != checksum(pool.flip(2).contiguous(), [1, 2])


def test_checksum_does_not_depend_on_how_heads_are_split():
    pool = torch.randn(5, 2, 4, 2, 1, 4)
    parts = [checksum(pool[:, :, at : at + 2].contiguous(), [1, 4], first_head=at) for at in (0, 2)]
    assert joined(parts) == checksum(pool, [1, 4])


def test_a_pool_with_gaps_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        rows(torch.zeros(4, 8)[:, ::2])
