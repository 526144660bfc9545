"""An event loop whose clock jumps: nothing waits, and hours pass in as long as their events take to compute.

Owns: the virtual time and the order of what happens in it: by time, then by the order in which it was asked for.
Refuses to know: sockets, threads, and the time of the day.

    ready callbacks, until there are none -> the next timer: now = its time -> ready callbacks ...
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, cast

_MIN_CANCELLED = 256


class Stalled(RuntimeError):
    """Nothing is left that could ever happen, and yet somebody waits: a bug."""


class VirtualLoop:
    """What asyncio's tasks, futures and timers need of a loop, and `at` for events that nobody cancels.

    An exception in a callback ends `run`: in a simulation it is a bug.
    """

    def __init__(self) -> None:
        # It offers asyncio the part of AbstractEventLoop that needs no world outside.
        self._as_loop = cast(asyncio.AbstractEventLoop, self)
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, Callable[[], object] | asyncio.TimerHandle]] = []
        self._number = 0
        self._num_cancelled = 0
        self._stopping = False

    def run(self) -> None:
        """Until `stop`. Raises Stalled if nothing is left to happen before that."""
        outer = events._get_running_loop()
        events._set_running_loop(None)
        events._set_running_loop(self._as_loop)
        ready, timers, cancellable = self._ready, self._timers, asyncio.TimerHandle
        try:
            while True:
                while ready:
                    handle = ready.popleft()
                    if not handle.cancelled():
                        handle._run()
                if self._stopping:
                    self._stopping = False
                    return
                if not timers:
                    raise Stalled(f"nothing is left to happen after {self._now:.3f} s")
                when, _, event = heappop(timers)
                if when > self._now:
                    self._now = when
                if isinstance(event, cancellable):
                    if event.cancelled():
                        self._num_cancelled -= 1
                    else:
                        event._run()
                else:
                    event()
        finally:
            events._set_running_loop(None)
            events._set_running_loop(outer)

    def stop(self) -> None:
        """Ends `run` when what is ready now has run."""
        self._stopping = True

    def close(self) -> None:
        """Cancels the tasks that are left and lets them end; timers never ring."""
        self._timers.clear()
        for task in asyncio.all_tasks(self._as_loop):
            task.cancel()
        self.stop()
        self.run()

    def at(self, when: float, event: Callable[[], object]) -> None:
        """Has something happen at a time, for certain; at once, after what is due already, if that is past."""
        self._number += 1
        heappush(self._timers, (when, self._number, event))

    # --- asyncio's loop -----------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._as_loop, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._as_loop, context)
        self._number += 1
        heappush(self._timers, (when, self._number, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers leave when they are more than half of all: most are deadlines that never come."""
        self._num_cancelled += 1
        if self._num_cancelled > _MIN_CANCELLED and self._num_cancelled * 2 > len(self._timers):
            self._timers[:] = [
                entry
                for entry in self._timers
                if not (isinstance(entry[2], asyncio.TimerHandle) and entry[2].cancelled())
            ]
            heapify(self._timers)
            self._num_cancelled = 0

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._as_loop)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self._as_loop, name=name, context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise context.get("exception") or RuntimeError(context["message"])
