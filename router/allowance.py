"""How much of the router one client may take: requests at a time, and requests a second.

Owns: the counts, one for both faces. Refuses to know: who clients are (`door` and `guard` name them), and what they are
told.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

MAX_CLIENTS = 10_000
FULL_WAIT_S = 1.0
"""When to come back after having had too many at once: that depends on nobody but the client."""


@dataclass(frozen=True, slots=True)
class Excess:
    """A request too many, and when to try again."""

    message: str
    wait_s: float


class Allowance:
    """A client that enters has to leave. `max_per_s` 0 is no limit."""

    def __init__(self, max_at_once: int, max_per_s: float) -> None:
        self._max_at_once = max_at_once
        self._rate = RateLimit(max_per_s) if max_per_s else None
        self._open: Counter[str] = Counter()

    def enter(self, client: str) -> Excess | None:
        """Counts a request in, or says why not; then there is nothing to leave."""
        if self._open[client] >= self._max_at_once:
            limit = f"at most {self._max_at_once} of one client are served at a time"
            return Excess(f"too many requests at once: {limit}", FULL_WAIT_S)
        self._open[client] += 1
        return None

    def leave(self, client: str) -> None:
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def ask(self, client: str, now: float) -> Excess | None:
        """Takes one from what the client may ask for in a second, or says how long it must wait."""
        wait_s = self._rate.wait_s(client, now) if self._rate is not None else 0.0
        return Excess(f"too many requests: wait {wait_s:.2f} s", wait_s) if wait_s > 0.0 else None


class RateLimit:
    """A token bucket for each client: `per_s` requests a second, and as many at once, but at least one.

    The clients that have not called for longest are forgotten: their buckets are the fullest.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s)
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_s(self, client: str, now: float) -> float:
        """0 and one request less to come, or how long the client must wait for its next."""
        bucket = self._buckets.pop(client, None) or _Bucket(self._burst, now)
        self._buckets[client] = bucket
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        bucket.level = min(self._burst, bucket.level + (now - bucket.at_s) * self._per_s)
        bucket.at_s = now
        if bucket.level < 1.0:
            return (1.0 - bucket.level) / self._per_s
        bucket.level -= 1.0
        return 0.0


class _Bucket:
    __slots__ = ("at_s", "level")

    def __init__(self, level: float, at_s: float) -> None:
        self.level, self.at_s = level, at_s
