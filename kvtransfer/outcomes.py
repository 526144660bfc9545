"""The ledger of a connector's pulls: which are open, and what `poll` has not told yet.

Owns: that each pull is told FINISHED or FAILED, then SETTLED, each exactly once.
Refuses to know: threads' roles and transports: any thread may write, any may drain.

    opened -> finished ------------+-> settled
           -> failed, still moving +
           -> failed, quiet -------+
"""

from __future__ import annotations

import threading
import time
from collections import deque

from baton.kvtransfer.connector import PullEvent, PullState


class Outcomes:
    """Open pulls and untold events. Every call returns at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_at: dict[int, float] = {}
        self._decided: set[int] = set()
        self._events: deque[PullEvent] = deque()

    def opened(self, pull_id: int) -> None:
        """Raises ValueError if the id is in use: two pulls could not be told apart."""
        with self._lock:
            if pull_id in self._started_at:
                raise ValueError(f"pull {pull_id} is already under way")
            self._started_at[pull_id] = time.monotonic()

    def finished(self, pull_id: int, num_bytes: int, checksums: tuple[int, ...] = ()) -> None:
        """All bytes are there and nothing writes to them any more."""
        with self._lock:
            self._decide(pull_id, PullState.FINISHED, num_bytes, "", checksums)
            self._settle(pull_id)

    def failed(self, pull_id: int, reason: str, *, quiet: bool) -> None:
        """The pull has failed; `quiet`: nothing writes to its blocks any more. Only the first reason counts."""
        with self._lock:
            if pull_id not in self._decided:
                self._decide(pull_id, PullState.FAILED, 0, reason)
            if quiet:
                self._settle(pull_id)

    def drain(self) -> list[PullEvent]:
        """The untold events, in order."""
        if not self._events:
            return []
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    @property
    def num_open(self) -> int:
        """Pulls that have not settled."""
        return len(self._started_at)

    def _decide(
        self, pull_id: int, state: PullState, num_bytes: int, reason: str, checksums: tuple[int, ...] = ()
    ) -> None:
        assert pull_id not in self._decided, f"pull {pull_id} decided twice"
        self._decided.add(pull_id)
        seconds = time.monotonic() - self._started_at[pull_id]
        self._events.append(PullEvent(pull_id, state, num_bytes, seconds, reason, checksums))

    def _settle(self, pull_id: int) -> None:
        seconds = time.monotonic() - self._started_at.pop(pull_id)
        self._decided.remove(pull_id)
        self._events.append(PullEvent(pull_id, PullState.SETTLED, seconds=seconds))
