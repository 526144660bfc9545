"""Hand-off between workers of any numbers of ranks: every head lands where it belongs, and nothing elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.kvtransfer.address import encode_group
from baton.kvtransfer.connector import ConnectorError, KvPool, Pull, PullEvent, PullState
from baton.kvtransfer.sharded import RemoteConnector, ShardedConnector, serve
from baton.proto.messages import KvGeometry
from baton.proto.settings import TransferSettings

NUM_BLOCKS = 12
NUM_LAYERS = 2
CANARY = -7.0
GEOMETRY = KvGeometry("demo", "1", "float32", block_size=4, num_layers=NUM_LAYERS, num_kv_heads=0, head_dim=8)
SIZES = [1, 2, 4]
WAYS = list(itertools.product(SIZES, SIZES, [1, 2, 4, 8]))
NIXL_WAYS = [(1, 2, 2), (2, 1, 8), (4, 2, 2), (1, 4, 2), (4, 4, 2)]


def heads_of(rank, size, num_heads):
    """The heads that a rank holds, straight from the definition."""
    return [head for head in range(num_heads) if head * size // num_heads == rank] or [rank * num_heads // size]


@pytest.fixture
def make_worker(connect):
    """A worker's connector over ranks whose pools are given in full: (connector, address, ranks' pools)."""
    opened = []

    def make(kind, size, whole, checksums="always", lost=None):
        num_heads = whole.shape[2]
        geometry = replace(GEOMETRY, num_kv_heads=num_heads, tp_size=size)
        pools = []
        for rank in range(size):
            heads = heads_of(rank, size, num_heads)
            part = whole[:, :, heads[0] : heads[-1] + 1].clone(memory_format=torch.contiguous_format)
            pools.append(KvPool(part, geometry, heads[0]))
        members = [connect(kind, checksums=checksums)]
        lines = []
        for rank in range(1, size):
            here, there = Pipe()
            lines.append((here, there))
            transfer = TransferSettings(connector=kind, checksums=checksums)
            members.append(RemoteConnector(rank, here, transfer, lost or pytest.fail))
            serve(there, connect(kind, checksums=checksums), pools[rank])
        connector = ShardedConnector(members)
        opened.append(connector)
        return SimpleNamespace(connector=connector, address=connector.attach(pools[0]), pools=pools, lines=lines)

    yield make
    for connector in opened:
        connector.close()


def whole_pool(num_heads, seed=None):
    shape = (NUM_BLOCKS, NUM_LAYERS, num_heads, 2, 4, 8)
    if seed is None:
        return torch.full(shape, CANARY)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def check_moves(make_worker, outcome, kind, way, max_examples):
    source_size, destination_size, num_heads = way
    lent = whole_pool(num_heads, seed=3)
    source = make_worker(kind, source_size, lent)
    destination = make_worker(kind, destination_size, whole_pool(num_heads))
    numbers = itertools.count()
    blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=8)

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(blocks, st.permutations(range(NUM_BLOCKS)), st.booleans())
    def check(targets, order, checked):
        sources = tuple(order[: len(targets)])
        for pool in destination.pools:
            pool.tensor.fill_(CANARY)
        crc = source.connector.export("s", sources) if checked else 0
        pull = Pull(next(numbers), "p", source.address, sources, tuple(targets), crc)
        told = outcome(destination.connector, pull)
        assert (told.state, told.reason) == (PullState.FINISHED, "")
        for rank, pool in enumerate(destination.pools):
            heads = heads_of(rank, destination_size, num_heads)
            expected = torch.full_like(pool.tensor, CANARY)
            for at, head in enumerate(heads):
                for to, block in zip(targets, sources, strict=True):
                    expected[to, :, at] = lent[block, :, head]
            assert torch.equal(pool.tensor, expected)

    check()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_head_of_every_block_lands_exactly_where_it_belongs(make_worker, outcome, way):
    check_moves(make_worker, outcome, "local", way, max_examples=12)


@pytest.mark.parametrize("way", NIXL_WAYS, ids=str)
def test_every_head_lands_by_nixl_too(make_worker, outcome, way):
    check_moves(make_worker, outcome, "nixl", way, max_examples=6)


def test_every_head_lands_by_nccl_between_equal_numbers_of_ranks(make_worker, outcome):
    check_moves(make_worker, outcome, "nccl", (2, 2, 4), max_examples=3)


def test_nccl_refuses_a_part_of_a_block(make_worker, outcome):
    source, destination = (make_worker("nccl", size, whole_pool(4, 3)) for size in (1, 2))
    told = outcome(destination.connector, Pull(1, "p", source.address, (5, 2), (0, 1)))
    assert told.state is PullState.FAILED
    assert "tensor_parallel" in told.reason


@pytest.mark.parametrize("sizes", list(itertools.product(SIZES, SIZES)), ids=str)
def test_a_checksum_catches_one_flipped_byte_of_any_head(make_worker, outcome, sizes):
    source, destination = (
        make_worker("local", size, whole_pool(4, seed)) for size, seed in zip(sizes, (3, None), strict=True)
    )
    crc = source.connector.export("s", (5, 2))
    assert outcome(destination.connector, Pull(1, "p", source.address, (5, 2), (0, 1), crc)).reason == ""
    source.pools[-1].tensor[2, 1, -1].view(-1).view(torch.uint8)[9] ^= 1
    told = outcome(destination.connector, Pull(2, "p", source.address, (5, 2), (0, 1), crc))
    assert told.state is PullState.FAILED
    assert "checksum" in told.reason


def test_a_checksum_does_not_depend_on_the_number_of_ranks(make_worker):
    workers = [make_worker("local", size, whole_pool(2, seed=3)) for size in SIZES]
    assert len({worker.connector.export("s", (7, 1)) for worker in workers}) == 1


def test_without_checksums_none_is_computed(make_worker):
    assert make_worker("local", 2, whole_pool(2, seed=3), checksums="off").connector.export("s", (7, 1)) == 0


# --- what is refused


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_cannot_share_three_heads_are_refused(connect, size):
    members = [connect("local") for _ in range(size)]
    pool = KvPool(whole_pool(3), replace(GEOMETRY, num_kv_heads=3, tp_size=size))
    with pytest.raises(ConnectorError, match=f"3 KV heads cannot be shared by .* {size}"):
        ShardedConnector(members).attach(pool)


def test_a_peer_whose_ranks_cannot_share_our_heads_is_refused(make_worker, outcome):
    worker = make_worker("local", 1, whole_pool(3))
    told = outcome(worker.connector, Pull(1, "p", encode_group([b"one", b"two"]), (0,), (0,)))
    assert told.state is PullState.FAILED
    assert "3 KV heads cannot be shared by prefill tensor parallel 2" in told.reason


def test_ranks_in_the_wrong_order_are_refused(make_worker, outcome, connect):
    lent = whole_pool(2, seed=3)
    geometry = replace(GEOMETRY, num_kv_heads=2, tp_size=2)
    addresses = []
    for rank in (0, 1):
        part = lent[:, :, rank : rank + 1].clone(memory_format=torch.contiguous_format)
        addresses.append(connect("local").attach(KvPool(part, geometry, rank)))
    worker = make_worker("local", 1, whole_pool(2))
    told = outcome(worker.connector, Pull(1, "p", encode_group(addresses[::-1]), (0,), (0,)))
    assert told.state is PullState.FAILED
    assert "KV heads [0, 1) wanted, the source has [1, 2)" in told.reason


@pytest.mark.parametrize("blocks", [((NUM_BLOCKS,), (0,)), ((0,), (NUM_BLOCKS,)), ((0, 1), (2, 2)), ((2**40,), (0,))])
def test_a_pull_of_blocks_that_are_not_there_fails_and_writes_nothing(make_worker, outcome, blocks):
    source = make_worker("local", 2, whole_pool(4, seed=3))
    destination = make_worker("local", 4, whole_pool(4))
    told = outcome(destination.connector, Pull(1, "p", source.address, *blocks))
    assert told.state is PullState.FAILED
    assert all(bool((pool.tensor == CANARY).all()) for pool in destination.pools)


# --- parts that fail


class Scripted:
    """A member that does nothing and tells what the test makes it tell."""

    name = "scripted"

    def __init__(self):
        self.pulls = []
        self.events = []

    def attach(self, pool):
        return b"here"

    def pull(self, pull):
        self.pulls.append(pull)

    def poll(self):
        events, self.events = self.events, []
        return events

    def tell(self, state, **details):
        self.events.append(PullEvent(self.pulls[-1].pull_id, state, **details))


@pytest.fixture
def scripted():
    """Two members, a connector over them, and a pull under way; a head of one block has 512 bytes."""
    members = [Scripted(), Scripted()]
    connector = ShardedConnector(members)
    connector.attach(KvPool(whole_pool(2)[:, :, :1].contiguous(), replace(GEOMETRY, num_kv_heads=2, tp_size=2)))
    connector.pull(Pull(9, "p", encode_group([b"a", b"b"]), (1,), (2,)))
    return connector, *members


def told(connector):
    return [event.state for event in connector.poll()]


HEAD_BYTES = NUM_LAYERS * 2 * 4 * 8 * 4


def test_a_pull_is_finished_when_the_last_part_is(scripted):
    connector, first, second = scripted
    first.tell(PullState.FINISHED, num_bytes=HEAD_BYTES)
    first.tell(PullState.SETTLED)
    assert told(connector) == []
    second.tell(PullState.FINISHED, num_bytes=HEAD_BYTES)
    assert told(connector) == []
    second.tell(PullState.SETTLED)
    assert told(connector) == [PullState.FINISHED, PullState.SETTLED]


def test_a_failure_is_told_after_the_last_sibling_and_settled_when_nothing_writes(scripted):
    connector, first, second = scripted
    first.tell(PullState.FAILED, reason="gone")
    assert told(connector) == []
    second.tell(PullState.FINISHED, num_bytes=HEAD_BYTES)
    second.tell(PullState.SETTLED)
    events = connector.poll()
    assert [(event.state, event.reason) for event in events] == [(PullState.FAILED, "gone")]
    assert told(connector) == []
    first.tell(PullState.SETTLED)
    assert told(connector) == [PullState.SETTLED]


def test_a_connector_that_does_not_read_single_heads_is_found_out(scripted):
    connector, first, second = scripted
    for member in (first, second):
        member.tell(PullState.FINISHED, num_bytes=2 * HEAD_BYTES)
        member.tell(PullState.SETTLED)
    failed, settled = connector.poll()
    assert (failed.state, settled.state) == (PullState.FAILED, PullState.SETTLED)
    assert f"{2 * HEAD_BYTES} bytes of heads" in failed.reason


def test_ranks_that_share_a_head_and_read_other_kv_are_found_out(scripted):
    _, *members = scripted
    connector = ShardedConnector(members)
    connector.attach(KvPool(whole_pool(1), replace(GEOMETRY, num_kv_heads=1, tp_size=2)))
    connector.pull(Pull(1, "p", encode_group([b"a", b"b"]), (1,), (2,), checksum=5))
    for member, found in zip(members, (5, 6), strict=True):
        member.tell(PullState.FINISHED, num_bytes=HEAD_BYTES, checksums=(found,))
        member.tell(PullState.SETTLED)
    assert "share head 0" in connector.poll()[0].reason


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_whose_connector_ends_fails_its_pulls_and_the_worker(make_worker, outcome):
    lost = []
    source = make_worker("local", 1, whole_pool(2, seed=3))
    destination = make_worker("local", 2, whole_pool(2), lost=lost.append)
    here, _ = destination.lines[0]
    here.send_bytes(b"no command at all")
    told_of = outcome(destination.connector, Pull(1, "p", source.address, (0,), (0,)))
    assert told_of.state is PullState.FAILED
    assert "rank 1" in told_of.reason
    assert [str(error) for error in lost] == ["the connector of rank 1 has ended"]


def test_a_forgotten_peers_ranks_are_all_forgotten(make_worker, outcome):
    lent = whole_pool(4, seed=3)
    destination = make_worker("local", 2, whole_pool(4))
    for start in range(3):
        source = make_worker("local", 4, lent)
        told_of = outcome(destination.connector, Pull(start, "p", source.address, (3,), (0,)))
        assert told_of.state is PullState.FINISHED
        destination.connector.forget("p")
