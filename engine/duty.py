"""What a worker does for its role, as the rest of the worker sees it.

Owns: the interfaces of a duty and of its half of the hand-off, and what such a half counts.
Refuses to know: how KV moves. `prefill_worker` and `decode_worker` have one duty each.

A duty belongs to one incarnation. A worker that changes its role closes the one, at rest, and opens another.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import astuple, dataclass
from typing import Protocol

from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.messages import HandoffSource
from baton.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """What a hand-off side has counted since it was made; see worker.proto for each."""

    prompt_tokens_transferred: int = 0
    chunks_pulled: int = 0
    chunks_pulled_early: int = 0
    bytes_pulled: int = 0
    pulls_failed: int = 0
    validations_refused: int = 0
    leases_expired: int = 0
    unknown_completions: int = 0

    def __add__(self, other: TransferCounters) -> TransferCounters:
        return TransferCounters(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class HandoffSide(Protocol):
    """The role's half of the hand-off. Every call comes on the step loop's thread."""

    def accepted(self, sequence: Sequence) -> None:
        """The scheduler has taken it in."""
        ...

    def preempted(self, sequence: Sequence) -> None:
        """Its blocks may be written to as soon as this returns."""
        ...

    def reserved(self, sequence: Sequence) -> None:
        """A leg with a hand-off has got blocks for its whole prompt. A decode leg has KV for the first
        `num_computed_tokens` tokens, a prefill leg is in the step that comes now."""
        ...

    def progressed(self, sequence: Sequence, num_tokens: int) -> None:
        """A prefill leg has KV for tokens [0, num_tokens)."""
        ...

    def exported(self, sequence: Sequence, next_token: int) -> None:
        """A prefill leg is computed and `next_token` sampled: all of its KV may be lent."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """It has finished, or was aborted: it lends and receives nothing any more."""
        ...

    def counters(self) -> TransferCounters: ...


class Duty(Protocol):
    """Complete when its constructor returns; `open` and `close` are called once each, on the event loop."""

    @property
    def side(self) -> HandoffSide: ...

    @property
    def lending(self) -> worker_pb2_grpc.HandoffServicer | None:
        """The face for those who read KV here; None: nothing is lent."""
        ...

    def open(self) -> None:
        """Begins to serve, on the running event loop."""
        ...

    async def meet(self, sources: Many[HandoffSource], probe_bytes: int, timeout_s: float) -> tuple[wire.Lane, ...]:
        """Meets workers to read KV from, and reads at most so many bytes from each; returns what is known of all such
        ways by then, within the time."""
        ...

    async def close(self) -> None:
        """Ends its tasks and its streams. Messages that still come in change nothing."""
        ...
