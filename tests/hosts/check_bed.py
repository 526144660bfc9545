"""The bed itself: hosts are hosts of their own, wires break as asked, and nothing of it stays behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hosts.bed import Bed, BedError, await_gone


def ping(bed: Bed, host: str, other: str) -> bool:
    """Whether a TCP connection to the other's sshd can be made within a second."""
    word = f"exec 3<>/dev/tcp/{bed.address(other)}/22 && read -r -t 1 banner <&3"
    return bed.run(host, "timeout", "1", "bash", "-c", word, check=False).returncode == 0


def ssh(bed: Bed, host: str, other: str, command: str) -> str:
    options = ("-i", str(bed.key), "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR")
    return bed.run(host, "ssh", *options, bed.address(other), command).stdout


def test_hosts_have_names_addresses_and_processes_of_their_own() -> None:
    with Bed(["ctl", "h0", "h1"]) as bed:
        assert ssh(bed, "ctl", "h1", "hostname; hostname -I").split() == ["h1", bed.address("h1")]
        bed.run("h0", "touch", "/tmp/mine", "/dev/shm/mine")
        assert bed.shared_memory("h0") == ["mine"]
        assert not bed.shared_memory("h1")
        assert bed.run("h1", "ls", "/tmp/mine", check=False).returncode
        assert set(bed.processes("h0")).isdisjoint(bed.processes("h1"))
        assert all("sshd" in line for line in bed.processes("h1").values())


def test_a_cable_is_pulled_and_plugged_and_a_host_dies_and_comes_back() -> None:
    with Bed(["h0", "h1"]) as bed:
        assert ping(bed, "h0", "h1")
        bed.cut("h1")
        assert not ping(bed, "h0", "h1")
        bed.heal("h1")
        assert ping(bed, "h0", "h1")
        bed.freeze("h1")
        assert not ping(bed, "h0", "h1")
        bed.thaw("h1")
        assert ping(bed, "h0", "h1")
        bed.run("h1", "touch", "/tmp/kept", "/dev/shm/lost")
        before = list(bed.processes("h1"))
        bed.crash("h1")
        assert not await_gone(before)
        assert not ping(bed, "h0", "h1")
        with pytest.raises(BedError, match="h1 is off"):
            bed.run("h1", "true")
        bed.boot("h1")
        assert ping(bed, "h0", "h1")
        assert not bed.shared_memory("h1")
        bed.run("h1", "ls", "/tmp/kept")


def test_a_wire_can_be_made_slow_in_two_ways() -> None:
    mbit, num_bytes = 40, 5_000_000
    with Bed(["h0", "h1"]) as bed:

        def seconds() -> float:
            began = time.monotonic()
            assert len(ssh(bed, "h0", "h1", f"head -c {num_bytes} /dev/zero | tr '\\0' x")) == num_bytes
            return time.monotonic() - began

        for slow, fast in (
            (lambda: bed.rate("h1", mbit), lambda: bed.rate("h1", None)),
            (lambda: bed.delay("h1", 1.0, mbit), lambda: bed.delay("h1", None)),
        ):
            slow()
            # Less what a bucket lets through at once.
            assert seconds() >= 0.9 * num_bytes * 8 / (mbit * 1e6)
            fast()
            ssh(bed, "h0", "h1", "true")


def test_a_wire_can_be_made_long() -> None:
    with Bed(["h0", "h1"]) as bed:

        def seconds() -> float:
            began = time.monotonic()
            assert ping(bed, "h0", "h1")
            return time.monotonic() - began

        bed.delay("h1", 100.0)
        # A connection takes one round trip, the banner at least half of another one.
        assert seconds() >= 0.3
        bed.delay("h1", None)
        assert ping(bed, "h0", "h1")


def test_nothing_stays_behind_when_it_is_taken_down() -> None:
    links = Path("/proc/self/net/dev").read_text().count(":")
    with Bed(["h0", "h1"]) as bed:
        bed.delay("h1", 1.0)
        bed.run("h0", "bash", "-c", "nohup sleep 1000 > /dev/null 2>&1 &")
        processes = [pid for name in bed.names for pid in bed.processes(name)]
        root = bed.home("h0").parents[1]
        assert any("sleep 1000" in line for line in bed.processes("h0").values())
    assert not await_gone(processes)
    assert not root.exists()
    assert Path("/proc/self/net/dev").read_text().count(":") == links
