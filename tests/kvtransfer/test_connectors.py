"""The contract of every connector, one suite for all of them, each against a second one of its kind in this process."""

import dataclasses
import itertools
import random
import time

import pytest
import torch

from baton.kvtransfer.address import PoolAddress
from baton.kvtransfer.connector import ConnectorError, Pull, PullState

CONNECTORS = ["local", "nixl", "nccl"]
DECIDED = (PullState.FINISHED, PullState.FAILED)


@pytest.fixture(params=CONNECTORS)
def kind(request):
    return request.param


@pytest.fixture
def pair(kind, connect, make_pool):
    """Opens a source of 50 blocks and a destination of 30: (source, its pool, its address, destination, its pool)."""

    def open_pair(big=False, **settings):
        source, destination = connect(kind, **settings), connect(kind, **settings)
        lent, taken = make_pool(50, seed=1, big=big), make_pool(30, big=big)
        address = source.attach(lent)
        destination.attach(taken)
        return source, lent, address, destination, taken

    return open_pair


@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_land_where_they_were_wanted_and_nowhere_else(pair, outcome, seed):
    _, lent, address, destination, taken = pair()
    choose = random.Random(seed)
    sources, destinations = choose.sample(range(50), 20), choose.sample(range(30), 20)
    expected = taken.tensor.clone()
    expected[destinations] = lent.tensor[sources]
    told = outcome(destination, Pull(1, "p", address, tuple(sources), tuple(destinations)))
    assert (told.state, told.num_bytes) == (PullState.FINISHED, 20 * taken.block_bytes)
    assert torch.equal(taken.tensor, expected)


def test_a_whole_pool_in_one_run_arrives(pair, outcome):
    _, lent, address, destination, taken = pair(big=True)
    blocks = tuple(range(30))
    outcome(destination, Pull(1, "p", address, tuple(block + 20 for block in blocks), blocks))
    assert torch.equal(taken.tensor, lent.tensor[20:])


def test_pulls_that_run_together_all_arrive_and_each_is_told_once(pair, settle):
    _, lent, address, destination, taken = pair(big=True)
    for block in range(30):
        destination.pull(Pull(block, "p", address, (49 - block,), (block,)))
    told = [(event.pull_id, event.state) for event in settle(destination, *range(30))]
    assert torch.equal(taken.tensor, lent.tensor.flip(0)[:30])
    for block in range(30):
        assert [state for pull_id, state in told if pull_id == block] == [PullState.FINISHED, PullState.SETTLED]
    assert destination.poll() == []


def test_a_pull_of_nothing_finishes(pair, outcome):
    _, _, address, destination, _ = pair()
    assert outcome(destination, Pull(1, "p", address, (), ())).state is PullState.FINISHED


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [((50,), (0,)), ((-1,), (0,)), ((0,), (30,)), ((0,), (-1,)), ((0, 1), (2,)), ((0, 1), (2, 2)), ((2**40,), (0,))],
)
def test_a_pull_of_blocks_that_are_not_there_fails_and_writes_nothing(pair, outcome, sources, destinations):
    _, _, address, destination, taken = pair()
    told = outcome(destination, Pull(1, "p", address, sources, destinations))
    assert told.state is PullState.FAILED
    assert told.reason
    assert not taken.tensor.any()


def test_a_failed_pull_leaves_the_peer_usable(pair, outcome):
    _, _, address, destination, _ = pair()
    outcome(destination, Pull(1, "p", address, (50,), (0,)))
    assert outcome(destination, Pull(2, "p", address, (49,), (0,))).state is PullState.FINISHED


def test_an_address_with_any_byte_changed_is_refused(pair, settle):
    _, _, address, destination, taken = pair()
    garbled = [address[:-1], address + b"\0", b"", b"nonsense"]
    garbled += [address[:at] + bytes([address[at] ^ 1]) + address[at + 1 :] for at in range(len(address))]
    for number, wrong in enumerate(garbled):
        destination.pull(Pull(number, f"p{number}", wrong, (0,), (0,)))
    events = settle(destination, *range(len(garbled)))
    assert [event.state for event in events] == [PullState.FAILED, PullState.SETTLED] * len(garbled)
    assert not taken.tensor.any()


@pytest.mark.parametrize("other", [{"big": True}, {"dtype": "float16"}, {"num_layers": 3}, {"version": "2"}])
def test_a_pool_of_another_geometry_is_refused(kind, connect, make_pool, outcome, other):
    source, destination = connect(kind), connect(kind)
    address = source.attach(make_pool(4, seed=1, **other))
    destination.attach(make_pool(4))
    told = outcome(destination, Pull(1, "p", address, (0,), (0,)))
    assert told.state is PullState.FAILED
    assert "here" in told.reason


def test_an_address_of_another_kind_of_connector_is_refused(connect, make_pool, outcome):
    source, destination = connect("local"), connect("nixl")
    address = source.attach(make_pool(4, seed=1))
    destination.attach(make_pool(4))
    assert "local" in outcome(destination, Pull(1, "p", address, (0,), (0,))).reason


@pytest.mark.parametrize("metadata", [b"", b"junk" * 100])
def test_a_sound_address_with_a_nonsensical_connection_fails_the_pull(connect, make_pool, outcome, metadata):
    source, destination = connect("nixl"), connect("nixl")
    place = PoolAddress.decode(source.attach(make_pool(4, seed=1)))
    destination.attach(make_pool(4))
    wrong = dataclasses.replace(place, metadata=metadata).encode()
    assert outcome(destination, Pull(1, "p", wrong, (0,), (0,))).state is PullState.FAILED
    assert outcome(destination, Pull(2, "p", place.encode(), (0,), (0,))).state is PullState.FINISHED


def test_an_address_that_carries_the_connection_of_another_is_refused(connect, make_pool, outcome):
    first, second, destination = connect("nixl"), connect("nixl"), connect("nixl")
    places = [PoolAddress.decode(peer.attach(make_pool(4, seed=1))) for peer in (first, second)]
    destination.attach(make_pool(4))
    mixed = dataclasses.replace(places[0], metadata=places[1].metadata).encode()
    assert outcome(destination, Pull(1, "p", mixed, (0,), (0,))).state is PullState.FAILED
    assert outcome(destination, Pull(2, "q", places[1].encode(), (0,), (0,))).state is PullState.FINISHED


def test_a_pool_outside_what_the_peer_has_registered_is_refused(connect, make_pool, outcome):
    source, destination = connect("nixl"), connect("nixl")
    place = PoolAddress.decode(source.attach(make_pool(4, seed=1)))
    destination.attach(make_pool(4))
    wrong = dataclasses.replace(place, num_blocks=10**6).encode()
    assert outcome(destination, Pull(1, "p", wrong, (10**5,), (0,))).state is PullState.FAILED
    assert outcome(destination, Pull(2, "p", place.encode(), (0,), (0,))).state is PullState.FINISHED


def test_a_peer_does_not_change_its_address(kind, connect, make_pool, outcome):
    first, second, destination = connect(kind), connect(kind), connect(kind)
    addresses = [first.attach(make_pool(4, seed=1)), second.attach(make_pool(4, seed=2))]
    destination.attach(make_pool(4))
    assert outcome(destination, Pull(1, "p", addresses[0], (0,), (0,))).state is PullState.FINISHED
    assert outcome(destination, Pull(2, "p", addresses[1], (0,), (1,))).state is PullState.FAILED


def test_a_checksum_catches_a_flipped_byte(pair, outcome):
    source, lent, address, destination, _ = pair(checksums="always")
    crc = source.export("s", (7, 3))
    assert outcome(destination, Pull(1, "p", address, (7, 3), (0, 1), crc)).state is PullState.FINISHED
    lent.tensor.view(torch.uint8)[3].view(-1)[1000] ^= 1
    told = outcome(destination, Pull(2, "p", address, (7, 3), (0, 1), crc))
    assert told.state is PullState.FAILED
    assert "checksum" in told.reason


def test_a_checksum_catches_swapped_blocks(pair, outcome):
    source, _, address, destination, _ = pair(checksums="always")
    crc = source.export("s", (7, 3))
    assert outcome(destination, Pull(1, "p", address, (3, 7), (0, 1), crc)).state is PullState.FAILED


@pytest.mark.parametrize(("mode", "computed"), [("off", 0), ("sampled", 4), ("always", 64)])
def test_checksums_are_computed_as_often_as_configured(kind, connect, make_pool, mode, computed):
    source = connect(kind, checksums=mode)
    source.attach(make_pool(4, seed=1))
    assert sum(source.export(f"s{number}", (0, 1)) != 0 for number in range(64)) == computed


def test_an_export_of_a_block_that_is_not_there_is_refused(pair):
    source, *_ = pair()
    with pytest.raises(ConnectorError, match="50"):
        source.export("s", (50,))


def test_releases_of_unknown_and_released_exports_are_ignored(pair, outcome):
    source, _, address, destination, _ = pair()
    source.export("s", (1,))
    source.export("s", (2,))
    for export_id in ("s", "s", "other"):
        source.release(export_id)
    assert outcome(destination, Pull(1, "p", address, (1,), (0,))).state is PullState.FINISHED


def test_a_pool_is_attached_once(pair, make_pool):
    source, *_ = pair()
    with pytest.raises(ConnectorError):
        source.attach(make_pool(4))


def test_a_pull_without_a_pool_fails(kind, connect, outcome):
    assert outcome(connect(kind), Pull(1, "p", b"", (0,), (0,))).state is PullState.FAILED


def test_a_pull_id_in_use_is_a_bug(pair, settle):
    _, _, address, destination, _ = pair(big=True)

    def pull_often():
        for _ in range(1000):
            destination.pull(Pull(1, "p", address, tuple(range(30)), tuple(range(30))))

    with pytest.raises(ValueError, match="pull 1"):
        pull_often()
    settle(destination, 1)


@pytest.mark.parametrize("met_before", [True, False])
def test_a_peer_that_has_closed_fails_pulls(pair, outcome, met_before):
    source, _, address, destination, _ = pair()
    if met_before:
        assert outcome(destination, Pull(1, "p", address, (0,), (0,))).state is PullState.FINISHED
    source.close()
    told = outcome(destination, Pull(2, "p", address, (0,), (0,)))
    assert told.state is PullState.FAILED
    assert "peer p" in told.reason


def test_pulls_of_a_forgotten_peer_are_decided_once_and_settle(pair, settle):
    _, _, address, destination, _ = pair(big=True)
    for number in range(20):
        destination.pull(Pull(number, "p", address, tuple(range(30)), tuple(range(30))))
    destination.forget("p")
    destination.forget("never met")
    events = settle(destination, *range(20))
    for number in range(20):
        decided, settled = [event for event in events if event.pull_id == number]
        assert decided.state in DECIDED
        assert settled.state is PullState.SETTLED


def test_a_peer_can_come_back_after_it_was_forgotten(pair, outcome):
    _, _, address, destination, _ = pair()
    for number in range(5):
        assert outcome(destination, Pull(number, "p", address, (0,), (0,))).state is PullState.FINISHED
        destination.forget("p")


def test_settled_blocks_are_never_written_again(pair, settle):
    """Give up pulls at many moments, put a canary where they wrote, and look at it after everything has been quiet."""
    _, _, address, destination, taken = pair(big=True)
    blocks = tuple(range(30))
    for number in range(12):
        destination.pull(Pull(number, f"p{number}", address, blocks, blocks))
        time.sleep(0.0007 * number)
        destination.forget(f"p{number}")
        settle(destination, number)
        taken.tensor.fill_(-1.0)
        destination.pull(Pull(1000 + number, "nobody", b"", (0,), (0,)))
        settle(destination, 1000 + number)
        assert bool((taken.tensor == -1.0).all())


def test_closing_decides_and_settles_every_pull(pair):
    _, _, address, destination, _ = pair(big=True)
    for number in range(20):
        destination.pull(Pull(number, "p", address, tuple(range(30)), tuple(range(30))))
    destination.close()
    destination.pull(Pull(99, "p", address, (0,), (0,)))
    events = destination.poll()
    for number in [*range(20), 99]:
        decided, settled = [event for event in events if event.pull_id == number]
        assert decided.state in DECIDED
        assert settled.state is PullState.SETTLED
    destination.close()


def test_a_worker_may_restart_25_times_under_one_name(kind, connect, make_pool, outcome):
    destination = connect(kind)
    taken = make_pool(4)
    destination.attach(taken)
    for start in range(25):
        source = connect(kind)
        lent = make_pool(4, seed=start)
        address = source.attach(lent)
        told = outcome(destination, Pull(start, f"worker-{start}", address, (3, 2), (0, 1)))
        assert told.state is PullState.FINISHED
        assert torch.equal(taken.tensor[:2], lent.tensor[[3, 2]])
        source.close()
        if start % 2:
            destination.forget(f"worker-{start}")


def test_workers_may_read_from_one_another_at_once(kind, connect, make_pool, settle):
    members = [connect(kind) for _ in range(3)]
    pools = [make_pool(15, seed=number) for number in range(3)]
    addresses = [member.attach(pool) for member, pool in zip(members, pools, strict=True)]
    before = [pool.tensor.clone() for pool in pools]
    ways = list(itertools.permutations(range(3), 2))
    for number, (taker, giver) in enumerate(ways):
        first = 6 + 3 * giver
        destinations = tuple(range(first, first + 3))
        members[taker].pull(Pull(number, f"w{giver}", addresses[giver], (0, 1, 2), destinations))
    for taker in range(3):
        settle(members[taker], *[number for number, way in enumerate(ways) if way[0] == taker])
    for taker, giver in ways:
        first = 6 + 3 * giver
        assert torch.equal(pools[taker].tensor[first : first + 3], before[giver][:3])


def test_settings_name_the_connector(kind, connect):
    assert connect(kind).name == kind
