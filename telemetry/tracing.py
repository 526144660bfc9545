"""What a span is, and the W3C trace context that ties the spans of one request together across processes.

Owns: trace contexts (reading, writing, the decision whether a request is traced) and the value that a finished span is.
Refuses to know: what is traced, and OpenTelemetry: `otlp` loads that, only in processes that trace.

    client's traceparent -> begin -> the request's context -> Submit.traceparent -> workers
    work is over -> Span, with its times -> SpanSink -> collector

A span exists only when its work is over; until then there are its ids, in the traceparent that travels with the work.
So nothing is kept for requests in progress, and nothing can leak.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.proto.settings import ObservabilitySettings

Attribute = str | bool | int | float | tuple[str, ...]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
MAX_TRACESTATE_CHARS, MAX_TRACESTATE_MEMBERS = 512, 32
SAMPLED = 0x01
FLUSH_S = 2.0
"""For how long a process that ends waits for its last spans to leave."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Names one span in its trace. `sampled`: whether its trace is recorded."""

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The W3C header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{SAMPLED if self.sampled else 0:02x}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(self.trace_id, _random_id(8), self.sampled)


def begin(parent: TraceContext | None, ratio: float) -> TraceContext:
    """The context of a request. With a parent, its sampling decision stands; without, `ratio` of all are sampled."""
    if parent is not None:
        return parent.child()
    trace_id = _random_id(16)
    # By the trace id's lower half, as OpenTelemetry's own ratio sampler decides.
    return TraceContext(trace_id, _random_id(8), (trace_id & (1 << 64) - 1) < round(ratio * (1 << 64)))


def read_traceparent(header: str) -> TraceContext | None:
    """The context that a header names; None if it is empty, or not one of W3C Trace Context's."""
    match = _TRACEPARENT.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # What is longer than version 00 allows may come from a later version only; ff will never be one.
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & SAMPLED))


def read_tracestate(header: str) -> str:
    """The header without blanks around its members; empty if any of it is not as W3C Trace Context wants it."""
    members = [member.strip(" \t") for member in header.split(",") if member.strip(" \t")]
    if len(header) > MAX_TRACESTATE_CHARS or len(members) > MAX_TRACESTATE_MEMBERS:
        return ""
    if not all(_TRACESTATE_MEMBER.fullmatch(member) for member in members):
        return ""
    keys = {member.partition("=")[0] for member in members}
    return ",".join(members) if len(keys) == len(members) else ""


class SpanKind(Enum):
    """SERVER: the work that a message from another process asked for. INTERNAL: a part of it."""

    SERVER = "server"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work that is over. Times are nanoseconds of the wall clock.

    `parent` None makes it its trace's root; `remote_parent` says that the parent is a span of another process.
    `error`: why it failed, None if it did not.
    """

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    kind: SpanKind = SpanKind.INTERNAL
    remote_parent: bool = False
    tracestate: str = ""
    error: str | None = None


class SpanSink(Protocol):
    """Takes spans of sampled traces. May be called from any thread; never waits, never raises."""

    def record(self, span: Span) -> None: ...

    def close(self, timeout_s: float) -> None:
        """Sends what is left. Gives up after `timeout_s`."""
        ...


def open_sink(settings: ObservabilitySettings, service: str, instance: str) -> SpanSink | None:
    """The way to the configured collector, for a process of this name; None if there is none.

    Raises ValueError for an endpoint that is no URL.
    """
    endpoint = settings.trace_endpoint
    if not endpoint:
        return None
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise ValueError(f"observability.trace_endpoint is {endpoint!r}: it has to be a URL like http://collector:4318")
    # Here, so that a process that does not trace does not pay for OpenTelemetry.
    from baton.telemetry.otlp import OtlpSink

    return OtlpSink(endpoint, service, instance)


def _random_id(num_bytes: int) -> int:
    return secrets.randbits(8 * num_bytes) or 1
