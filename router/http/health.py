"""GET /health: whether a request that came now would be answered, which is more than that the process lives.

Owns: the verdict and what counts as progress. Refuses to know: who asks and how often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton.proto.messages import Role
from baton.router.observe import Call, RequestRecord
from baton.router.placement import can_serve
from baton.router.router import Router

STALL_S = 60.0

_PAIR = {Role.PREFILL, Role.DECODE}


class Health:
    """An `Observer` that sees tokens and ends. Long prompts have neither, so workers' own counts are progress too."""

    def __init__(self, router: Router, clock: Callable[[], float] = time.monotonic) -> None:
        self._router = router
        self._clock = clock
        self._progress_s = clock()
        self._steps = -1

    def faults(self) -> list[str]:
        """Why requests would not be answered; empty if they would."""
        router = self._router
        faults = []
        if not router.ready.is_set():
            faults.append("no request has gone through yet")
        if router.draining:
            faults.append("the router is draining")
        roles = router.book.serving_roles()
        if not can_serve(roles):
            wanted = _PAIR if any(pool.role in _PAIR for pool in router.config.pools) else {Role.COLOCATED}
            faults += [f"no {role.value} worker is there" for role in sorted(wanted - roles)]
        stalled_s = self._stalled_s()
        if stalled_s > STALL_S:
            faults.append(f"{router.num_running} requests are there, and nothing has moved for {stalled_s:.0f} s")
        return faults

    def _stalled_s(self) -> float:
        router, now = self._router, self._clock()
        if not router.num_running:
            return 0.0
        reports = map(router.book.last_report, router.links)
        steps = sum(report.counters.steps for report in reports if report is not None)
        if steps != self._steps:
            self._steps, self._progress_s = steps, now
        return now - self._progress_s

    # --- Observer ---------------------------------------------------------------------------------------------------

    def began(self, request_id: str, call: Call) -> str:
        if not self._router.num_running:
            self._progress_s = self._clock()
        return ""

    def refused(self, trouble: str, call: Call, fields: Sequence[str]) -> None:
        pass

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        self._progress_s = self._clock()

    def ended(self, record: RequestRecord) -> None:
        self._progress_s = self._clock()
