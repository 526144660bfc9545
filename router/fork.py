"""Where the outputs of one request part: one of them brings the prompt's KV to a worker, the others start from it.

Owns: who brings it, and the news of where it is.
Refuses to know: legs, placement, and what an output does with the news.

    take: the first to ask brings it   -- parted(landing) -->  the others go where it is
                                       -- parted(None) ----->  it never got there: each goes its own way
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.proto.messages import TokenLogprob
from baton.router.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Landing:
    """The prompt's KV is on a worker since `landed_s`. `ledger`: a copy of the account of how it got there."""

    worker_id: str
    landed_s: float
    ledger: Ledger
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Fork:
    """Shared by the journeys of one request's outputs; belongs to one event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._parted = asyncio.Event()
        self._landing: Landing | None = None

    def take(self) -> bool:
        """Whether the caller is to bring the prompt's KV: the first is. It owes a call of `parted` on every way out."""
        first, self._taken = not self._taken, True
        return first

    def parted(self, landing: Landing | None) -> None:
        """Tells those who wait. What is told after the first time is ignored."""
        if not self._parted.is_set():
            self._landing = landing
            self._parted.set()

    async def landing(self, timeout_s: float | None) -> Landing | None:
        """Waits until the outputs part. Raises TimeoutError when the time is over."""
        async with asyncio.timeout(timeout_s):
            await self._parted.wait()
        return self._landing
