"""Who used the cores during a calibration: CPU time beside the steps, and what ran beside each step.

Owns: what a request, a step and a token cost router, client and workers beside the steps; how many threads computed
at each moment, and so what a step would have taken alone. Refuses to know: what load was driven, and what is concluded
of steps (`calibrate`).

    CPU of router, client, workers in a window - CPU of step loops = request x requests + step x steps + token x tokens

    worker A      |== step ==|   |==== step ====|
    worker B           |=== step ===|
    what they say            |--|   |-|         |--|         router and client, from a step's end on
    threads       1    2     2  1..                          -> speed of each -> seconds alone of every step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.capacity.cores import CoreSpeed
from baton.capacity.cost import CoreCost
from baton.capacity.regression import Vector, robust_nonnegative
from baton.proto.step_log import StepLogFile

_MIN_WINDOWS = 6
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a load, by the clock of the step logs: what was asked for in it, and the CPU time that it took.

    `cpu_s` is of router and client, `workers_cpu_s` of the workers' processes, steps included.
    """

    start_s: float
    end_s: float
    requests: int
    tokens: int
    cpu_s: float
    workers_cpu_s: float


def fit_cpu(logs: Sequence[StepLogFile], windows: Sequence[Window]) -> CoreCost:
    """CPU time beside the steps. That of workers counts where a step loop is one thread, so that its own is known."""
    used = [window for window in windows if window.cpu_s > 0]
    if not used:
        return CoreCost()
    steps = [step for log in logs for step in log.steps]
    starts = np.array([step.start_s for step in steps])
    step_cpu = np.array([step.cpu_s for step in steps])
    rows, cpu = [], []
    for window in used:
        inside = (starts >= window.start_s) & (starts < window.end_s)
        of_workers = max(window.workers_cpu_s - float(step_cpu[inside].sum()), 0.0) if _one_thread_each(logs) else 0.0
        rows.append((window.requests, int(inside.sum()), window.tokens))
        cpu.append(window.cpu_s + of_workers)
    if len(used) < _MIN_WINDOWS:
        return CoreCost(token_cpu_s=sum(cpu) / max(sum(window.tokens for window in used), 1))
    found = robust_nonnegative(np.array(rows, dtype=float), np.array(cpu))
    return CoreCost(*(float(value) for value in found))


class Occupation:
    """How many threads computed at each moment, by the notes of all steps, and what followed from it for each step.

    Threads that speak for a step begin at its end. How long they take depends on how many there are, and that on how
    long they take: it is settled in a few rounds.
    """

    def __init__(self, logs: Sequence[StepLogFile], cost: CoreCost, num_cores: int) -> None:
        self._num_cores = num_cores
        self._threads = [max(1, log.header.threads) for log in logs]
        self._begins = [np.array([step.start_s - (step.gap_s or 0.0) for step in log.steps]) for log in logs]
        busy = [np.array([step.busy_s for step in log.steps]) for log in logs]
        self._ends = [begins + seconds for begins, seconds in zip(self._begins, busy, strict=True)]
        spoken = np.concatenate(self._ends)
        need_s = np.array(
            [cost.step_cpu_s + cost.token_cpu_s * step.decode_sequences for log in logs for step in log.steps]
        )
        fell_silent = spoken + need_s
        for _ in range(_ROUNDS):
            self._count([*self._begins, spoken], [*self._ends, fell_silent], [*self._threads, 1])
            served = self._served(1.0)
            fell_silent = np.interp(np.interp(spoken, self._times, served) + need_s, served, self._times)

    def alone_s(self, crowded_speed: float) -> list[Vector]:
        """What each step would have taken with a core for each of its worker's threads and nothing beside it."""
        speed, served = CoreSpeed(self._num_cores, crowded_speed), self._served(crowded_speed)
        return [
            (np.interp(ends, self._times, served) - np.interp(begins, self._times, served))
            / speed.on_own_cores(threads)
            for begins, ends, threads in zip(self._begins, self._ends, self._threads, strict=True)
        ]

    def beside(self) -> list[Vector]:
        """For which part of each step's time those of other workers ran."""
        found = []
        for log, (begins, ends) in enumerate(zip(self._begins, self._ends, strict=True)):
            others = [number for number in range(len(self._begins)) if number != log and len(self._begins[number])]
            shared = sum(
                (_overlap(begins, ends, self._begins[k], self._ends[k]) for k in others), np.zeros(len(begins))
            )
            found.append(np.minimum(shared / np.maximum(ends - begins, 1e-9), 1.0))
        return found

    def _count(self, begins: Sequence[Vector], ends: Sequence[Vector], threads: Sequence[int]) -> None:
        """Moments in order, and how many threads compute from each on."""
        times = np.concatenate([*begins, *ends])
        more = np.concatenate([np.full(len(each), many) for each, many in zip(begins, threads, strict=True)])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        self._busy = np.cumsum(np.concatenate([more, -more])[order])

    def _served(self, crowded_speed: float) -> Vector:
        """At each moment, what a thread has got that computes all the time."""
        speed = CoreSpeed(self._num_cores, crowded_speed)
        speeds = np.array([speed.at(many) for many in range(max(int(self._busy.max(initial=0)), 0) + 1)])
        pace = speeds[np.maximum(self._busy, 0)]
        return np.concatenate(([0.0], np.cumsum(np.diff(self._times) * pace[:-1])))


def _overlap(begins: Vector, ends: Vector, other_begins: Vector, other_ends: Vector) -> Vector:
    """How much of each stretch is in the others, which follow one another."""
    times = np.maximum.accumulate(np.column_stack([other_begins, other_ends]).ravel())
    sums = np.column_stack([np.zeros(len(other_begins)), other_ends - other_begins]).ravel().cumsum()
    return np.asarray(np.interp(ends, times, sums) - np.interp(begins, times, sums))


def _one_thread_each(logs: Sequence[StepLogFile]) -> bool:
    return all(log.header.threads == 1 for log in logs)
