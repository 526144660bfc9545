"""What is told about each client's request to whoever counts, traces, logs or shows requests.

Owns: the record of one finished request and the interface of its observers.
Refuses to know: what observers do. They are called on the router's event loop, for each token too: an observer that
waits, or raises, holds up or ends a client's request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from baton.router.ledger import Timeline


class Face(StrEnum):
    """Which door a request came through."""

    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, slots=True)
class Call:
    """What came around a request. `left_s`: seconds until the client's own deadline, if it has one. `traceparent`
    and `tracestate`: the client's W3C trace context, empty without one. `client`: a name for the key that the client
    showed, never the key."""

    face: Face
    left_s: float | None = None
    traceparent: str = ""
    tracestate: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """One of the request's outputs. `finish` is a FinishReason's name in lower case, or a Trouble's value, which
    `message` explains. `text`: what the model wrote, only where `log_prompts` allows it."""

    index: int
    finish: str
    message: str
    completion_tokens: int
    cached_tokens: int
    transferred_tokens: int
    recomputed_tokens: int
    retries: int
    prefill_worker: str
    decode_worker: str
    connector: str
    timeline: Timeline
    text: str = ""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One client's request, over. Times of arrival and end are of the wall clock, in seconds; durations are not.

    `ttft_s`: from arrival to the first token of any output, None if none came. `completion_tokens`, of the outputs, are
    those that left the router. `trouble`: the Trouble's value that ended it, empty if it went well. `chat`: its prompt
    was a conversation. `prompt`: what the model read, only where `log_prompts` allows it.
    """

    request_id: str
    call: Call
    traceparent: str
    arrived_unix_s: float
    duration_s: float
    ttft_s: float | None
    prompt_tokens: int
    max_tokens: int
    temperature: float
    top_p: float
    outputs: tuple[OutputRecord, ...]
    trouble: str = ""
    chat: bool = False
    prompt: str = ""


class Observer(Protocol):
    """All methods have to return at once and may not raise."""

    def began(self, request_id: str, call: Call) -> str:
        """A request was admitted. Returns the traceparent that its legs carry; empty from who does not trace."""
        ...

    def refused(self, trouble: str, call: Call, fields: Sequence[str]) -> None:
        """A request was not admitted, for a Trouble of this value. `fields`: those of the request that are at fault."""
        ...

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """Tokens of one output left the router, `gap_s` after the output's last ones; None for its first."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A request that was admitted is over, in whatever way."""
        ...


class Observers:
    """Several observers as one. A traceparent comes from the first that has one."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def began(self, request_id: str, call: Call) -> str:
        traceparents = [observer.began(request_id, call) for observer in self._observers]
        return next(filter(None, traceparents), "")

    def refused(self, trouble: str, call: Call, fields: Sequence[str]) -> None:
        for observer in self._observers:
            observer.refused(trouble, call, fields)

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        for observer in self._observers:
            observer.tokens(num_tokens, gap_s)

    def ended(self, record: RequestRecord) -> None:
        for observer in self._observers:
            observer.ended(record)
