"""`ray down` ends all that `ray up` began, on every host."""

from __future__ import annotations

import time

import pytest
from hosts.launcher import RayHosts

pytestmark = pytest.mark.timeout(900)

GONE_WITHIN_S = 60.0


def test_ray_down_leaves_no_process_and_no_shared_memory_on_any_host(hosts: RayHosts) -> None:
    hosts.down()
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := remains(hosts):
        assert time.monotonic() < deadline, f"{GONE_WITHIN_S:.0f} s after ray down: {left}"
        time.sleep(0.5)


def remains(hosts: RayHosts) -> list[str]:
    processes = [
        f"{name}: {line}"
        for name in hosts.shape.hosts()
        for line in hosts.bed.processes(name).values()
        if "sshd" not in line
    ]
    files = [f"{name}: /dev/shm/{file}" for name in hosts.shape.hosts() for file in hosts.bed.shared_memory(name)]
    return processes + files
