"""A point measured by the simulator, in a process of its own.

Owns: what crosses to such a process, and how many there are. Refuses to know: which points there are (`sweep`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from baton.capacity.cost import CostModel
from baton.capacity.record import to_plain
from baton.capacity.simulate import simulate
from baton.capacity.summary import Recorder, Summary
from baton.capacity.sweep import Backend, Point


@dataclass(frozen=True, slots=True)
class Simulated:
    """Measures points by one cost model."""

    cost: CostModel

    def __call__(self, point: Point) -> Summary:
        recorder = Recorder(point.slo)
        arrivals = point.traffic.arrivals(point.setup.max_model_len)
        run = simulate(point.setup, self.cost, arrivals, point.traffic.seed, sink=recorder.add)
        return recorder.summary(run)


_MALLOC = {"hugetlb": 1, "tcache_count": 2000, "trim_threshold": 256 << 20, "top_pad": 16 << 20}
"""Large pages; and small objects that were freed, and memory at the heap's end, are kept for those that come next."""
_LARGE_PAGES = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items()),
}


@contextmanager
def large_pages() -> Iterator[None]:
    """Processes that begin meanwhile keep objects in large pages, where the kernel grants them. Pools and indexes have
    tens of thousands of blocks and are read all over; to find their pages takes a good part of a simulation's time."""
    added = [name for name in _LARGE_PAGES if name not in os.environ]
    os.environ |= {name: _LARGE_PAGES[name] for name in added}
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def simulation(cost: CostModel, jobs: int | None = None) -> Iterator[Backend]:
    """As many processes as cores, or `jobs`; started afresh, as a fork would copy locks of threads."""
    number = jobs or len(os.sched_getaffinity(0))
    with large_pages(), ProcessPoolExecutor(number, get_context("spawn")) as executor:
        try:
            yield Backend("simulate", Simulated(cost), executor, to_plain(cost), number)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)
