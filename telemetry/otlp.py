"""Spans on their way to an OpenTelemetry collector, by OTLP over HTTP.

Owns: the batches, their thread, and the translation to OpenTelemetry's own span. Import it only where spans are sent.
Refuses to know: who made a span, and OpenTelemetry's global state: several sinks may live in one process.

Spans wait in a bounded queue; when the collector is slow or gone, those that do not fit are dropped.
"""

from __future__ import annotations

import threading

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags, TraceState
from opentelemetry.trace import SpanKind as OtelSpanKind
from opentelemetry.trace.status import Status, StatusCode

from baton import __version__
from baton.telemetry.tracing import Span, SpanKind, TraceContext

TRACES_PATH = "/v1/traces"
MAX_QUEUED_SPANS = 16384
MAX_BATCH_SPANS = 1024
EXPORT_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 5.0

_KINDS = {SpanKind.SERVER: OtelSpanKind.SERVER, SpanKind.INTERNAL: OtelSpanKind.INTERNAL}


class OtlpSink:
    """A `SpanSink`. `endpoint` is the collector's base URL, or the whole one up to /v1/traces.

    OTEL_EXPORTER_OTLP_HEADERS (a collector's credentials) and OTEL_RESOURCE_ATTRIBUTES are OpenTelemetry's to read.
    """

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        url = endpoint.rstrip("/")
        exporter = OTLPSpanExporter(
            endpoint=url if url.endswith(TRACES_PATH) else url + TRACES_PATH,
            timeout=EXPORT_TIMEOUT_S,
            compression=Compression.Gzip,
        )
        self._processor = BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=EXPORT_INTERVAL_S * 1000,
            max_export_batch_size=MAX_BATCH_SPANS,
        )
        self._resource = Resource.create(
            {
                "service.name": service,
                "service.namespace": "baton",
                "service.instance.id": instance,
                "service.version": __version__,
            }
        )
        self._scope = InstrumentationScope("baton", __version__)

    def record(self, span: Span) -> None:
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=_context(span.context, span.tracestate),
                parent=_context(span.parent, "", span.remote_parent) if span.parent is not None else None,
                resource=self._resource,
                attributes=span.attributes,
                kind=_KINDS[span.kind],
                status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=span.start_ns,
                end_time=span.end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def close(self, timeout_s: float) -> None:
        # The processor's own shutdown waits half a minute for a collector that is gone.
        closing = threading.Thread(target=self._processor.shutdown, name="span-flush", daemon=True)
        closing.start()
        closing.join(timeout_s)


def _context(context: TraceContext, tracestate: str, remote: bool = False) -> SpanContext:
    return SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([tracestate]) if tracestate else None,
    )
