"""What a process finds out about its machine is what the system says, and no more than its control group allows."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import psutil

from baton.telemetry import machine

MIB = 1 << 20


def group(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\nfile 2\n")


def test_a_machine_is_what_the_system_says() -> None:
    before = time.time()
    found = machine.look()
    assert before <= found.unix_s <= time.time()
    assert found.host == socket.gethostname()
    assert found.num_cores == len(os.sched_getaffinity(0))
    assert 0 < found.available_bytes <= found.memory_bytes <= psutil.virtual_memory().total
    assert 0 <= found.shm_free_bytes <= found.shm_bytes


def test_limits_of_all_groups_around_a_process_are_told_and_page_cache_is_no_use(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("0::/pod/worker\n")
    group(root / "pod" / "worker", "max", 700 * MIB, 0)
    group(root / "pod", str(1024 * MIB), 900 * MIB, 300 * MIB)
    group(tmp_path, "1", 1, 0)
    assert list(machine.memory_limits(own, root)) == [(1024 * MIB, 600 * MIB)]


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert list(machine.memory_limits(tmp_path / "absent", tmp_path / "none")) == []
