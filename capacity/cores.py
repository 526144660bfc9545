"""Cores that all of a cluster's processes share: a step slows down while others compute, and goes on faster after.

Owns: how fast a thread runs when so many do, and when work in progress ends as others begin and end.
Refuses to know: what is computed, and how much of it there is (`capacity.cost`).

    speed of each busy thread
      1 |---.                  one alone
        |    '--.              more of them: threads of one physical core, memory and caches are shared too
        |        |'.
        |        |  '--.___    more than cores: they take turns, and the sum stays what it is
        +---1----|---------> busy threads
               cores

The operating system's scheduler is taken to be fair: of threads that want a core, all get the same share at any moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.capacity.cost import CoreCost, CostModel
from baton.capacity.virtual_loop import VirtualLoop

PROCESSES_BESIDE_WORKERS = 2
"""Router and client."""


def shared_cores(num_cores: int, num_worker_threads: int) -> float | None:
    """What a set-up says of a machine on which a whole cluster and its client run: its cores, or None if there is one
    for each thread that computes."""
    return float(num_cores) if num_cores < num_worker_threads + PROCESSES_BESIDE_WORKERS else None


@dataclass(frozen=True, slots=True)
class CoreSpeed:
    """How fast threads run on so many cores, relative to one that has the machine to itself.

    `crowded_speed` is that of each when there are as many as cores; between one and there it falls evenly.
    """

    cores: float
    crowded_speed: float = 1.0

    def at(self, threads: float) -> float:
        """Of each of so many threads."""
        return self.on_own_cores(threads) * min(1.0, self.cores / threads if threads else 1.0)

    def on_own_cores(self, threads: float) -> float:
        """The same if none of them had to wait for a core: what a worker with so many threads has by itself."""
        if threads <= 1 or self.cores <= 1:
            return 1.0
        return 1.0 - (1.0 - self.crowded_speed) * min(1.0, (threads - 1) / (self.cores - 1))


class Work:
    """What is being computed. `until_s`: how far the machine's account must come for its end."""

    __slots__ = ("done", "number", "threads", "until_s")

    def __init__(self, until_s: float, number: int, threads: int, done: Callable[[], None]) -> None:
        self.until_s = until_s
        self.number = number
        self.threads = threads
        self.done = done


class Cores:
    """The cores of one machine on a virtual clock.

    All threads run at one speed. `served_s` is what each that computed all the time has got since the machine was last
    idle, in seconds of a thread alone; so work ends when that has grown by what it needs. Work in progress is little:
    a step a worker, and now and then something of router and client.
    """

    def __init__(self, loop: VirtualLoop, cores: float, cost: CostModel) -> None:
        self.cost: CoreCost = cost.cores
        self.threads_of_step = max(1, cost.origin.threads)
        self._loop = loop
        self._speed = CoreSpeed(cores, cost.cores.crowded_speed)
        self._working: list[Work] = []
        self._talking = 0
        self._unsaid: deque[float] = deque()
        self._num_threads = 0
        self._served_s = 0.0
        self._seen_s = 0.0
        self._number = 0
        self._alarms = 0

    def step(self, alone_s: float, done: Callable[[], None]) -> Work:
        """A worker's step that takes so long where its worker is alone and has a core for each of its threads."""
        return self.run(alone_s, self.threads_of_step, done)

    def spend(self, cpu_s: float) -> None:
        """Something that router or client has to do, and nobody waits for; each has one thread."""
        if cpu_s > 0:
            self._unsaid.append(cpu_s)
            self._talk()

    def _talk(self) -> None:
        while self._unsaid and self._talking < PROCESSES_BESIDE_WORKERS:
            self._talking += 1
            self.run(self._unsaid.popleft(), 1, self._said)

    def _said(self) -> None:
        self._talking -= 1
        self._talk()

    def run(self, alone_s: float, threads: int, done: Callable[[], None]) -> Work:
        self._serve()
        self._number += 1
        need_s = alone_s * self._speed.on_own_cores(threads)
        work = Work(self._served_s + need_s, self._number, threads, done)
        self._working.append(work)
        self._num_threads += threads
        self._set_alarm()
        return work

    def drop(self, work: Work) -> None:
        """Its process is gone: it takes no time from others any more, and is never done."""
        if work in self._working:
            self._serve()
            self._remove(work)

    def _serve(self) -> None:
        now = self._loop.time()
        if self._working:
            self._served_s += (now - self._seen_s) * self._speed.at(self._num_threads)
        self._seen_s = now

    def _remove(self, work: Work) -> None:
        self._working.remove(work)
        self._num_threads -= work.threads
        if self._working:
            self._set_alarm()
        else:
            self._alarms += 1
            self._served_s = 0.0

    def _set_alarm(self) -> None:
        self._alarms += 1
        left_s = max(self._next().until_s - self._served_s, 0.0) / self._speed.at(self._num_threads)
        self._loop.at(self._loop.time() + left_s, partial(self._ring, self._alarms))

    def _next(self) -> Work:
        return min(self._working, key=lambda work: (work.until_s, work.number))

    def _ring(self, alarm: int) -> None:
        """What was to end now has ended, unless something has begun or ended meanwhile."""
        if alarm != self._alarms:
            return
        self._serve()
        work = self._next()
        self._served_s = max(self._served_s, work.until_s)
        self._remove(work)
        work.done()
