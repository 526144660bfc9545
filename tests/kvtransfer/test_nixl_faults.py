"""What NIXL does when processes stop and die: real processes and signals, both lanes of a machine without RDMA."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from baton.kvtransfer.connector import Pull, PullState, TransportUnavailable, open_connector
from baton.proto.settings import TransferSettings

SETTLES_WITHIN_S = 2.0


@pytest.fixture(params=["", "tcp"], ids=["cma", "tcp"])
def lane(request, monkeypatch):
    """UCX_TLS; set here too so that the environment of later tests is as before."""
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    return request.param


@pytest.fixture
def destination(connect, make_pool, lane):
    """Opens a destination of 30 big blocks: (connector, pool)."""

    def open_destination(**settings):
        connector, pool = connect("nixl", transport=lane, **settings), make_pool(30, big=True)
        connector.attach(pool)
        return connector, pool

    return open_destination


BLOCKS = tuple(range(30))


def states(events, pull_id):
    return [event.state for event in events if event.pull_id == pull_id]


def test_bytes_and_checksums_agree_between_processes(destination, start_source, outcome, lane):
    source = start_source(1, 30, big=True, transport=lane, checksums="always")
    connector, pool = destination()
    told = outcome(connector, Pull(1, "p", source.address, BLOCKS, BLOCKS, source.checksum))
    assert told.state is PullState.FINISHED
    assert torch.equal(pool.tensor, source.tensor)


def test_a_killed_peer_fails_pulls_within_a_second(destination, start_source, settle, outcome, lane):
    source = start_source(1, 30, big=True, transport=lane)
    connector, _ = destination()
    outcome(connector, Pull(0, "p", source.address, BLOCKS, BLOCKS))
    source.stop()
    for number in (1, 2, 3):
        connector.pull(Pull(number, "p", source.address, BLOCKS, BLOCKS))
    source.signal(signal.SIGKILL)
    events = settle(connector, 1, 2, 3, deadline_s=SETTLES_WITHIN_S)
    assert states(events, 3) == [PullState.FAILED, PullState.SETTLED]
    for number in (1, 2):
        assert states(events, number)[1:] == [PullState.SETTLED]
    told = outcome(connector, Pull(4, "p", source.address, BLOCKS, BLOCKS), deadline_s=SETTLES_WITHIN_S)
    assert told.state is PullState.FAILED


def test_a_peer_killed_at_any_moment_fails_or_finishes_each_pull_once(destination, start_source, settle, lane):
    for attempt in range(3):
        source = start_source(1, 30, big=True, transport=lane)
        connector, _ = destination()
        for number in range(60):
            connector.pull(Pull(number, "p", source.address, BLOCKS, BLOCKS))
        time.sleep(0.01 * attempt)
        source.signal(signal.SIGKILL)
        events = settle(connector, *range(60), deadline_s=5.0)
        for number in range(60):
            decided, settled = states(events, number)
            assert decided is not PullState.SETTLED
            assert settled is PullState.SETTLED
        connector.close()


def test_a_stopped_peer_fails_its_pulls_but_they_settle_only_when_it_goes_on(
    destination, start_source, settle, poll_until, outcome, lane
):
    stopped, other = (start_source(seed, 30, big=True, transport=lane) for seed in (1, 2))
    connector, pool = destination(peer_timeout_s=1.0)
    stopped.stop()
    connector.pull(Pull(1, "stopped", stopped.address, BLOCKS[:10], BLOCKS[:10]))
    connector.pull(Pull(2, "other", other.address, BLOCKS[10:], BLOCKS[10:]))
    events = poll_until(connector, lambda events: len(states(events, 1)) >= 1 and len(states(events, 2)) == 2)
    assert states(events, 2) == [PullState.FINISHED, PullState.SETTLED]
    assert torch.equal(pool.tensor[10:], other.tensor[10:])
    assert states(events, 1) == [PullState.FAILED]
    assert [event.reason for event in events if "silent" in event.reason]
    assert outcome(connector, Pull(3, "stopped", stopped.address, (0,), (29,))).state is PullState.FAILED
    assert connector.poll() == []
    assert outcome(connector, Pull(4, "other", other.address, BLOCKS[10:], BLOCKS[10:])).state is PullState.FINISHED

    stopped.signal(signal.SIGCONT)
    assert states(settle(connector, 1, deadline_s=SETTLES_WITHIN_S), 1) == [PullState.SETTLED]
    told = outcome(connector, Pull(5, "stopped", stopped.address, BLOCKS, BLOCKS))
    assert told.state is PullState.FINISHED
    assert torch.equal(pool.tensor, stopped.tensor)


def test_what_a_forgotten_peer_still_sends_lands_before_settled_and_never_after(
    destination, start_source, settle, poll_until, lane
):
    source = start_source(1, 30, big=True, transport=lane)
    connector, pool = destination(peer_timeout_s=30.0)
    source.stop()
    connector.pull(Pull(1, "p", source.address, BLOCKS, BLOCKS))
    connector.forget("p")
    events = poll_until(connector, lambda events: bool(events))
    assert states(events, 1) == [PullState.FAILED]
    source.signal(signal.SIGCONT)
    assert states(settle(connector, 1, deadline_s=SETTLES_WITHIN_S), 1) == [PullState.SETTLED]
    pool.tensor.fill_(-1.0)
    settled_at = time.monotonic()
    poll_until(connector, lambda events: time.monotonic() > settled_at + 0.3)
    assert bool((pool.tensor == -1.0).all())


def test_a_pull_held_by_a_stopped_peer_settles_when_the_peer_dies(destination, start_source, settle, poll_until, lane):
    source = start_source(1, 30, big=True, transport=lane)
    connector, _ = destination(peer_timeout_s=0.2)
    source.stop()
    connector.pull(Pull(1, "p", source.address, BLOCKS, BLOCKS))
    poll_until(connector, lambda events: states(events, 1) == [PullState.FAILED])
    source.signal(signal.SIGKILL)
    settle(connector, 1, deadline_s=SETTLES_WITHIN_S)


def test_closing_is_bounded_while_a_peer_is_stopped(destination, start_source, lane):
    source = start_source(1, 30, big=True, transport=lane)
    connector, _ = destination()
    source.stop()
    connector.pull(Pull(1, "p", source.address, BLOCKS, BLOCKS))
    connector.close()
    assert states(connector.poll(), 1) == [PullState.FAILED, PullState.SETTLED]


def test_a_restarted_process_serves_under_a_new_incarnation(destination, start_source, outcome, lane):
    connector, pool = destination()
    for start in range(3):
        source = start_source(start, 30, big=True, transport=lane)
        told = outcome(connector, Pull(start, f"worker-{start}", source.address, BLOCKS, BLOCKS))
        assert told.state is PullState.FINISHED
        assert torch.equal(pool.tensor, source.tensor)
        source.signal(signal.SIGKILL)
        if start % 2:
            connector.forget(f"worker-{start}")


def test_idle_connectors_leave_the_processor_alone(connect, make_pool, start_source, outcome):
    """What the source's process and the destination's threads use; other tests have left threads in this process."""
    others = {thread.id for thread in psutil.Process().threads()}
    source = start_source(1, 30)
    connector = connect("nixl")
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


def test_a_missing_nixl_is_named(monkeypatch):
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TransportUnavailable, match="pip install nixl"):
        open_connector(TransferSettings(connector="nixl"))


def test_a_transport_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "")
    with pytest.raises(TransportUnavailable, match="carrier_pigeon"):
        open_connector(TransferSettings(connector="nixl", transport="carrier_pigeon"))


def test_importing_the_connector_loads_nothing_of_nixl():
    look = "import sys, baton.kvtransfer.connectors.nixl; print([name for name in sys.modules if name[:5] == 'nixl_'])"
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2] / "src")}
    answer = subprocess.run(
        [sys.executable, "-c", look], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert answer.stdout.strip() == "[]"
