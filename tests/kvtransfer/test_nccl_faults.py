"""What the nccl connector does when peers stop, die and misbehave: real processes, signals and sockets."""

import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.address import PoolAddress
from baton.kvtransfer.channel import (
    MAX_REQUEST_BLOCKS,
    Channel,
    ChannelLost,
    Entry,
    Hello,
    Refused,
    Request,
    Sending,
    Wake,
    Welcome,
)
from baton.kvtransfer.connector import Pull, PullState, TransportUnavailable, open_connector
from baton.kvtransfer.lane import NUM_SLOTS, READER, open_lane
from baton.proto.settings import TransferSettings

SETTLES_WITHIN_S = 2.0
DEADLINE_S = 20.0
BLOCKS = tuple(range(30))
NCCL = {"connector": "nccl"}


@pytest.fixture
def destination(connect, make_pool):
    """Opens a destination of 30 big blocks: (connector, pool)."""

    def open_destination(**settings):
        connector, pool = connect("nccl", **settings), make_pool(30, big=True)
        connector.attach(pool)
        return connector, pool

    return open_destination


def states(events, pull_id):
    return [event.state for event in events if event.pull_id == pull_id]


def test_bytes_and_checksums_agree_between_processes(destination, start_source, outcome):
    source = start_source(1, 30, big=True, checksums="always", **NCCL)
    connector, pool = destination()
    told = outcome(connector, Pull(1, "p", source.address, BLOCKS, BLOCKS, source.checksum))
    assert told.state is PullState.FINISHED
    assert torch.equal(pool.tensor, source.tensor)


def test_a_killed_peer_fails_pulls_within_a_second(destination, start_source, settle, outcome):
    source = start_source(1, 30, big=True, **NCCL)
    connector, _ = destination(peer_timeout_s=30.0)
    outcome(connector, Pull(0, "p", source.address, BLOCKS, BLOCKS))
    source.stop()
    for number in (1, 2, 3):
        connector.pull(Pull(number, "p", source.address, BLOCKS, BLOCKS))
    source.signal(signal.SIGKILL)
    events = settle(connector, 1, 2, 3, deadline_s=SETTLES_WITHIN_S)
    for number in (1, 2, 3):
        assert states(events, number) == [PullState.FAILED, PullState.SETTLED]
    told = outcome(connector, Pull(4, "p", source.address, BLOCKS, BLOCKS), deadline_s=SETTLES_WITHIN_S)
    assert told.state is PullState.FAILED


def test_a_peer_killed_at_any_moment_fails_or_finishes_each_pull_once(destination, start_source, settle):
    for attempt in range(5):
        source = start_source(1, 30, big=True, **NCCL)
        connector, _ = destination(peer_timeout_s=30.0)
        for number in range(60):
            connector.pull(Pull(number, "p", source.address, BLOCKS, BLOCKS))
        time.sleep(0.005 * attempt)
        source.signal(signal.SIGKILL)
        events = settle(connector, *range(60), deadline_s=SETTLES_WITHIN_S)
        for number in range(60):
            decided, settled = states(events, number)
            assert decided is not PullState.SETTLED
            assert settled is PullState.SETTLED


@pytest.mark.parametrize("met_before", [True, False])
def test_a_stopped_peer_fails_its_own_pulls_and_serves_again_when_it_goes_on(
    destination, start_source, settle, outcome, met_before
):
    stopped, other = (start_source(seed, 30, big=True, **NCCL) for seed in (1, 2))
    connector, pool = destination(peer_timeout_s=1.0)
    if met_before:
        outcome(connector, Pull(0, "stopped", stopped.address, (0,), (0,)))
    stopped.stop()
    connector.pull(Pull(1, "stopped", stopped.address, BLOCKS[:10], BLOCKS[:10]))
    began = time.monotonic()
    told = outcome(connector, Pull(2, "other", other.address, BLOCKS[10:], BLOCKS[10:]), deadline_s=1.0)
    assert told.state is PullState.FINISHED
    assert torch.equal(pool.tensor[10:], other.tensor[10:])
    events = settle(connector, 1, deadline_s=SETTLES_WITHIN_S)
    assert time.monotonic() - began >= 0.9
    assert states(events, 1) == [PullState.FAILED, PullState.SETTLED]
    assert "silent" in events[0].reason
    assert outcome(connector, Pull(3, "stopped", stopped.address, (0,), (29,))).state is PullState.FAILED

    stopped.signal(signal.SIGCONT)
    told = outcome(connector, Pull(4, "stopped", stopped.address, BLOCKS, BLOCKS))
    assert told.state is PullState.FINISHED
    assert torch.equal(pool.tensor, stopped.tensor)


def test_what_a_forgotten_peer_still_sends_never_lands(destination, start_source, settle, poll_until):
    """The peer stops at many moments of a transfer, its pulls are given up and settle at once, and it goes on."""
    source = start_source(1, 30, big=True, **NCCL)
    for attempt in range(8):
        connector, pool = destination(peer_timeout_s=2.0)
        for number in range(20):
            connector.pull(Pull(number, "p", source.address, BLOCKS, BLOCKS))
        time.sleep(0.002 * attempt)
        source.stop()
        connector.forget("p")
        settle(connector, *range(20), deadline_s=0.5)
        pool.tensor.fill_(-1.0)
        source.signal(signal.SIGCONT)
        end = time.monotonic() + 0.1
        poll_until(connector, lambda events, end=end: time.monotonic() > end)
        assert bool((pool.tensor == -1.0).all())
        connector.close()


def test_closing_is_bounded_while_a_peer_is_stopped(destination, start_source):
    source = start_source(1, 30, big=True, **NCCL)
    connector, _ = destination(peer_timeout_s=1.0)
    for number in range(20):
        connector.pull(Pull(number, "p", source.address, BLOCKS, BLOCKS))
    source.stop()
    began = time.monotonic()
    connector.close()
    assert time.monotonic() - began < 6.0
    events = connector.poll()
    for number in range(20):
        assert states(events, number)[1:] == [PullState.SETTLED]


def test_restarts_leave_no_thread_and_no_file_behind(connect, make_pool, start_source, outcome):
    connector, pool = connect("nccl"), make_pool(30)
    connector.attach(pool)
    process = psutil.Process()
    held = []
    for start in range(8):
        source = start_source(start, 30, **NCCL)
        told = outcome(connector, Pull(start, f"worker-{start}", source.address, BLOCKS, BLOCKS))
        assert told.state is PullState.FINISHED
        assert torch.equal(pool.tensor, source.tensor)
        held.append((process.num_fds(), process.num_threads()))
        source.signal(signal.SIGKILL)
        if start % 2:
            connector.forget(f"worker-{start}")
    deadline = time.monotonic() + DEADLINE_S
    while (process.num_fds(), process.num_threads()) > held[0]:
        assert time.monotonic() < deadline, f"{held}, then {process.num_fds()} files, {process.num_threads()} threads"
        time.sleep(0.01)


def test_idle_connectors_leave_the_processor_alone(connect, make_pool, start_source, outcome):
    """What the source's process and the destination's threads use; other tests have left threads in this process."""
    others = {thread.id for thread in psutil.Process().threads()}
    source = start_source(1, 30, **NCCL)
    connector = connect("nccl")
    connector.attach(make_pool(30))
    assert outcome(connector, Pull(1, "p", source.address, BLOCKS, BLOCKS)).state is PullState.FINISHED
    process = psutil.Process(source.pid)

    def used_s() -> tuple[float, float]:
        own = [thread for thread in psutil.Process().threads() if thread.id not in others]
        threads_s = sum(thread.user_time + thread.system_time for thread in own)
        return time.thread_time() + threads_s, sum(process.cpu_times()[:2])

    start_s, before = time.monotonic(), used_s()
    while time.monotonic() < start_s + 2.0:
        assert connector.poll() == []
        time.sleep(0.2)
    elapsed = time.monotonic() - start_s
    for used, at_first in zip(used_s(), before, strict=True):
        assert (used - at_first) / elapsed < 0.03


class Reader:
    """A reader made by hand, which says what it likes."""

    def __init__(self, address, pool):
        self.place, self.pool = PoolAddress.decode(address), pool
        port = int.from_bytes(self.place.metadata[:2], "little")
        self.socket = socket.create_connection(("127.0.0.1", port), 5.0)
        self.channel = Channel(self.socket)

    def hello(self, **changes):
        place = self.place
        fields = {"name": place.name, "geometry": place.geometry, "block_bytes": place.block_bytes}
        fields |= {"num_blocks": place.num_blocks, "gpu": ""} | changes
        self.channel.send(Hello(**fields))
        return self.channel.receive(5.0)

    def open(self):
        assert self.hello() == Welcome("gloo")
        return open_lane("gloo", self.channel, READER, self.pool, 5.0, "")

    def ended(self):
        """Whether the source hangs up, within a few seconds."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(5000))


@pytest.fixture
def read_by_hand(connect, make_pool):
    """Opens a source with a short time limit, and any number of readers."""
    source = connect("nccl", peer_timeout_s=0.5)
    address = source.attach(make_pool(30, seed=1))
    readers = []

    def read():
        readers.append(Reader(address, make_pool(30)))
        return readers[-1]

    yield read
    for reader in readers:
        reader.channel.close()


@pytest.fixture
def still_serves(read_by_hand, connect, make_pool, outcome):
    """Checks that the source serves who behaves."""

    def check():
        connector, pool = connect("nccl"), make_pool(30)
        connector.attach(pool)
        address = read_by_hand().place.encode()
        assert outcome(connector, Pull(1, "p", address, BLOCKS, BLOCKS)).state is PullState.FINISHED
        assert torch.equal(pool.tensor, make_pool(30, seed=1).tensor)

    return check


@pytest.mark.parametrize(
    "changes",
    [{"name": "kv-other"}, {"geometry": b"another "}, {"block_bytes": 8}, {"num_blocks": 29}],
    ids=["name", "geometry", "block_bytes", "num_blocks"],
)
def test_a_reader_that_means_another_pool_is_refused(read_by_hand, still_serves, changes):
    reader = read_by_hand()
    answer = reader.hello(**changes)
    assert isinstance(answer, Refused)
    assert answer.reason
    assert reader.ended()
    still_serves()


@pytest.mark.parametrize(
    "blocks", [(30,), (0, 2**32 - 1), (), (0,) * 3000], ids=["beyond", "far", "none", "more than a message carries"]
)
def test_a_request_for_what_is_not_there_is_refused(read_by_hand, still_serves, blocks):
    reader = read_by_hand()
    lane = reader.open()
    reader.channel.send(Request(0, blocks))
    answer = reader.channel.receive(5.0)
    lane.close()
    assert isinstance(answer, Refused)
    assert answer.reason
    assert reader.ended()
    still_serves()


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5, b"\0\0\0\0\x06", b"\x04\0\0\0\x04abcd", Sending(0), Request(7, (1,))],
)
def test_a_reader_that_talks_nonsense_is_hung_up_on(read_by_hand, still_serves, opened, noise):
    reader = read_by_hand()
    lane = reader.open() if opened else None
    if isinstance(noise, bytes):
        reader.socket.sendall(noise)
    else:
        reader.channel.send(noise)
    assert reader.ended()
    if lane:
        lane.close()
    still_serves()


def test_a_reader_that_says_nothing_is_hung_up_on(read_by_hand, still_serves):
    assert read_by_hand().ended()
    still_serves()


@pytest.mark.parametrize("num_requests", [1, NUM_SLOTS + 1])
def test_a_reader_that_takes_nothing_is_hung_up_on_and_delays_nobody(read_by_hand, still_serves, num_requests):
    reader = read_by_hand()
    lane = reader.open()
    for number in range(num_requests):
        reader.channel.send(Request(number, (number,)))
    still_serves()
    assert reader.ended()
    lane.close()


def test_a_wake_that_was_rung_before_the_wait_ends_it():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    listener = socket.create_server(("127.0.0.1", 0))
    channel = Channel(socket.create_connection(listener.getsockname()))
    wake = Wake()
    for _ in range(100_000):
        wake.ring()
    assert channel.receive(None, wake) is None
    assert channel.receive(0.0, wake) is None
    for closing in (channel, wake, listener, ours, theirs):
        closing.close()


def _exchange(payload):
    """What the other end of a connection makes of these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = Channel(listener.accept()[0])
    near.sendall(payload)
    near.close()
    try:
        return far.receive(5.0)
    finally:
        far.close()


NAMES = st.text(max_size=20)
MESSAGES = st.one_of(
    st.builds(
        Hello, NAMES, st.binary(min_size=8, max_size=8), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), NAMES
    ),
    st.builds(Welcome, NAMES),
    st.builds(Refused, NAMES),
    st.builds(Entry, NAMES, st.binary(max_size=300)),
    st.builds(Request, st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**32 - 1), max_size=50).map(tuple)),
    st.builds(Sending, st.integers(0, 2**64 - 1)),
)


@given(MESSAGES)
def test_messages_arrive_as_they_were_sent(message):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = Channel(socket.create_connection(listener.getsockname()))
        far = Channel(listener.accept()[0])
    near.send(message)
    assert far.receive(5.0) == message
    near.close()
    far.close()


def test_the_largest_request_arrives():
    request = Request(2**63, tuple(range(MAX_REQUEST_BLOCKS)))
    body = request.encode()
    assert _exchange(len(body).to_bytes(4, "little") + b"\x04" + body) == request


@given(st.binary(max_size=80))
def test_random_bytes_are_a_message_or_end_the_channel(data):
    try:
        assert _exchange(data).encode() is not None
    except ChannelLost:
        pass


def test_an_interface_that_does_not_exist_is_named():
    with pytest.raises(TransportUnavailable, match="carrier_pigeon"):
        open_connector(TransferSettings(connector="nccl", network_device="carrier_pigeon"))


def test_without_an_interface_peers_are_told_an_address_of_this_machine():
    connector = open_connector(TransferSettings(connector="nccl"))
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    assert connector._host in own
    connector.close()


# Forks a process for each line "address pid close|leave wait_s", which ends in the middle of its pulls.
EXITS = """
import os, signal, sys, time, torch
from baton.kvtransfer.connector import KvPool, Pull, open_connector
from baton.proto.messages import KvGeometry
from baton.proto.settings import TransferSettings
geometry = KvGeometry("demo", "1", "float32", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
for line in sys.stdin:
    address, pid, ending, wait_s = line.split()
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    connector = open_connector(TransferSettings(connector="nccl", network_device="lo", peer_timeout_s=0.3))
    connector.attach(KvPool(torch.zeros(30, 30, 3, 2, 16, 64), geometry))
    for number in range(40):
        connector.pull(Pull(number, "p", bytes.fromhex(address), tuple(range(30)), tuple(range(30))))
    time.sleep(float(wait_s))
    os.kill(int(pid), signal.SIGSTOP)
    if ending == "close":
        connector.close()
    sys.exit(0)
"""


def test_a_process_ends_in_order_while_its_peer_is_stopped(start_source):
    ends = [(ending, wait_s) for ending in ("close", "leave") for wait_s in (0.005, 0.03)]
    sources = [start_source(1, 30, big=True, **NCCL) for _ in ends]
    lines = [
        f"{source.address.hex()} {source.pid} {ending} {wait_s}\n"
        for source, (ending, wait_s) in zip(sources, ends, strict=True)
    ]
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "src")}
    told = subprocess.run(
        [sys.executable, "-c", EXITS], input="".join(lines), env=env, capture_output=True, text=True, timeout=180
    )
    assert told.stdout.split() == ["0"] * len(ends), told.stderr
