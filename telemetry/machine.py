"""What a process can find out about the machine that it runs on.

Owns: where that is to be read: memory (of the process's control group, if that allows less), /dev/shm, GPUs, the clock.
Refuses to know: how much of anything is enough.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from baton.proto import worker_pb2 as wire

SHM = Path("/dev/shm")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def look() -> wire.Machine:
    """How things are now."""
    total, available = _memory()
    shm, shm_free = _shared_memory()
    return wire.Machine(
        host=socket.gethostname(),
        boot_id=_first_line(Path("/proc/sys/kernel/random/boot_id")),
        unix_s=time.time(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=total,
        available_bytes=available,
        shm_bytes=shm,
        shm_free_bytes=shm_free,
        num_gpus=num_gpus(),
    )


def num_gpus() -> int:
    """Those of NVIDIA and AMD that the system shows here, whether or not this process is meant to use them."""
    nvidia = list(Path("/dev").glob("nvidia[0-9]*"))
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    amd = [node for node in nodes if _first_line(node) not in ("", "0")]
    through_windows = Path("/dev/dxg").exists()
    return len(nvidia) + len(amd) or int(through_windows)


def memory_limits(own: Path, root: Path) -> Iterator[tuple[int, int]]:
    """Of each control group around a process that has one: its memory limit, and what counts against it for good.

    `own`: the process's cgroup file; `root`: where the unified hierarchy is mounted.
    """
    place = next((line for line in _lines(own) if line.startswith("0::")), "0::/")
    group = root / place.removeprefix("0::").lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        limit, used = _first_line(folder / "memory.max"), _first_line(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            cache = dict(line.split() for line in _lines(folder / "memory.stat")).get("inactive_file", "0")
            yield int(limit), max(0, int(used) - int(cache))


def _memory() -> tuple[int, int]:
    """Bytes in all and bytes left."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in memory_limits(OWN_CGROUP, CGROUPS):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _shared_memory() -> tuple[int, int]:
    """Bytes of /dev/shm in all and free; zeros where there is none."""
    try:
        state = os.statvfs(SHM)
    except OSError:
        return 0, 0
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _first_line(file: Path) -> str:
    return next(iter(_lines(file)), "").strip()
