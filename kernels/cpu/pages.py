"""Memory in the large pages of the system, where it has some, and memory that is there before it is needed.

Owns: how the system is asked. Refuses to know: what lies there.

A kernel reads memory faster than the processor finds out where pages of 4 KiB lie: in those, a product with few rows
takes up to twice as long. And a page is given by the system when it is first written to, which takes longer than what
is written: on a virtual machine whose host has to find the memory first, up to 3 ms a MiB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import suppress

import torch

_LINE = 64
_LARGE_PAGE = 2 << 20
_AREA = 64 << 20  # what is not used of one takes no memory
_SLICE = 2 << 20  # meanwhile nothing else of the process can map memory, as loading libraries does
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_LOWEST = 19


def large_pages(num_bytes: int) -> torch.Tensor:
    """So many bytes of zeros. They take memory as they are first written to."""
    return _mapped(num_bytes)[1]


def populated_pages(num_bytes: int) -> tuple[torch.Tensor, threading.Thread]:
    """So many bytes of zeros, and the thread by which the system gives all of their memory; it steps back for others.

    What is written meanwhile stays. A system that cannot do that gives memory at the first write, as it would have.
    """
    memory, area = _mapped(num_bytes)
    work = (weakref.ref(memory), area.data_ptr(), num_bytes)
    thread = threading.Thread(target=_populate, args=work, name="populate", daemon=True)
    thread.start()
    return area, thread


def _mapped(num_bytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    memory = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    area = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -area.data_ptr() % _LARGE_PAGE
    return memory, area[skipped : skipped + num_bytes]


def _populate(memory: weakref.ref[mmap.mmap], address: int, num_bytes: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for at in range(0, num_bytes, _SLICE):
        kept = memory()  # for as long as this slice takes
        if kept is None or madvise(address + at, min(_SLICE, num_bytes - at), _POPULATE_WRITE):
            return
        del kept


class LargePages:
    """Memory handed out piece by piece: large pages are given to aligned areas only, so small pieces share one."""

    def __init__(self) -> None:
        self._area = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Bytes that start a line of the cache. They live until their last tensor is gone."""
        needed = -(-num_bytes // _LINE) * _LINE
        if needed > len(self._area):
            self._area = large_pages(max(needed, _AREA))
        piece, self._area = self._area[:num_bytes], self._area[needed:]
        return piece


class Reused:
    """Memory for one tensor at a time; the tensor before loses its contents."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def scores(self, rows: int, columns: int) -> torch.Tensor:
        """Room for [rows, columns] of fp32."""
        num_bytes = 4 * rows * columns
        if num_bytes > len(self._memory):
            self._memory = large_pages(num_bytes)
        return self._memory[:num_bytes].view(torch.float32).view(rows, columns)
