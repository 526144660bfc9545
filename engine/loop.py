"""The step loop of a worker: plan, launch, commit, on one plain thread.

Owns: the thread, the order of things inside one step, and the inbox through which other threads reach the scheduler.
Refuses to know: gRPC, connectors, what becomes of a token. Nothing here waits on a wire.

    other threads --call(command)--> inbox --+
                                             v
          +--> commands -> plan -> revoke, reserve -> launch -> read -> commit -> listener --+
          +------------------------------ (idle: wait for a command) <----------------------+

Where the scheduler plans ahead, a step is launched before the one before it is read, so a device that computes by
itself never waits for a plan:

    launch 1 | launch 2  read 1  commit 1 | launch 3  read 2  commit 2 | ...
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from baton.engine.clock import Clock
from baton.engine.step_log import StepLog
from baton.scheduler.plan import Emitted, Progressed, Step, StepResult
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.sequence import Sequence


class Launched(Protocol):
    """A step whose computation has begun."""

    def read(self) -> StepResult:
        """Waits for its end. Called once, in the order of the launches."""
        ...


class Computed(NamedTuple):
    """A step that was over when its launch returned."""

    result: StepResult

    def read(self) -> StepResult:
        return self.result


class StepRunner(Protocol):
    """Computes steps, one after the other.

    A token of a chunk that its sequence does not have yet is the one that the launch before sampled for it.
    """

    def launch(self, step: Step) -> Launched: ...


class _Flight(NamedTuple):
    step: Step
    launched: Launched
    begun_s: float
    planned_s: float


class StepListener(Protocol):
    """What a worker does with the outcome of a step. Every call comes on the loop's thread."""

    def preempted(self, sequence: Sequence) -> None:
        """Its blocks may be written to as soon as this returns: whoever lent them revokes the lease now."""
        ...

    def reserved(self, sequence: Sequence) -> None:
        """It holds blocks for a hand-off: pulls may start."""
        ...

    def committed(self, step: Step, result: StepResult, events: list[Emitted | Progressed], now: float) -> None: ...

    def idle(self, now: float) -> None:
        """Nothing was computed in this turn; called at least every `idle_s`."""
        ...


class StepLoop:
    """Runs a scheduler and a runner against each other until stopped.

    `failed` is called, on the loop's thread, with the exception that ended it: a bug or a broken device, after which
    the worker must not go on. Each step is noted in `step_log`, if there is one, which the thread closes at its end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        listener: StepListener,
        clock: Clock,
        failed: Callable[[BaseException], None],
        idle_s: float = 0.1,
        step_log: StepLog | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._listener = listener
        self._clock = clock
        self._failed = failed
        self._idle_s = idle_s
        self._depth = 2 if scheduler.config.plans_ahead else 1
        self._flights: deque[_Flight] = deque()
        self.log = step_log
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self.step_s = 0.0
        self.last_step_s = 0.0
        self._last_end_s = 0.0
        self.last_turn_s = clock()

    def start(self) -> None:
        self._thread.start()

    def call(self, command: Callable[[], object]) -> None:
        """Runs `command` on the loop's thread, between two steps. May be called from any thread, in order."""
        self._inbox.put(command)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the step in progress."""
        self._stopping = True
        self.call(lambda: None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            worked = False
            while not self._stopping:
                self._drain_inbox(wait_s=0.0 if worked else self._idle_s)
                self.last_turn_s = self._clock()
                worked = self._turn(self.last_turn_s)
        except BaseException as error:  # noqa: BLE001 - reported, then the thread ends
            self._failed(error)
        finally:
            if self.log is not None:
                self.log.close()

    def _drain_inbox(self, wait_s: float) -> None:
        try:
            command = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            while True:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _turn(self, now: float) -> bool:
        """Launches a step, if there is one, and reads one, if enough are in flight or nothing else is to be done.

        Returns whether anything happened that may let the next plan do more.
        """
        step = self._scheduler.plan(now)
        for sequence in step.preempted:
            self._listener.preempted(sequence)
        for sequence in step.reserved:
            self._listener.reserved(sequence)
        if step.chunks:
            planned_s = self._clock()
            self._flights.append(_Flight(step, self._runner.launch(step), now, planned_s))
            if len(self._flights) < self._depth:
                return True
        elif not self._flights:
            self._listener.idle(now)
            if self.log is not None:
                self.log.idle()
            return bool(step.preempted or step.reserved)
        self._read()
        return True

    def _read(self) -> None:
        """Takes in the oldest step in flight. Its time begins with its launch, or with the end of the one before."""
        step, launched, began_s, planned_s = self._flights.popleft()
        begun_s = max(began_s, self._last_end_s)
        result = launched.read()
        end = self._clock()
        self.last_step_s = end - begun_s
        self._last_end_s = end
        self.step_s += 0.2 * (self.last_step_s - self.step_s)
        self._listener.committed(step, result, self._scheduler.commit(step, result, end), end)
        if self.log is not None:
            self.log.stepped(step, begun_s, max(planned_s, begun_s), end, self._clock())
