"""A collector as OpenTelemetry's protocol wants it: takes OTLP over HTTP and keeps the spans that came."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from asking import until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class SeenSpan:
    """One span as it came over the wire."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    wire: trace_pb2.Span

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def error(self) -> str | None:
        """The status message of a span that failed."""
        return self.wire.status.message if self.wire.status.code == trace_pb2.Status.STATUS_CODE_ERROR else None


class Collector:
    """`with Collector() as collector`: listens at `collector.endpoint`; what came is in `collector.spans`.

    It answers nobody while `open` is cleared.
    """

    def __enter__(self) -> Collector:
        self.open = threading.Event()
        self.open.set()
        self.spans: list[SeenSpan] = []
        self.bodies: list[bytes] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    async def tree(self, num_spans: int, trace_id: str | None = None) -> Tree:
        """Waits for so many spans, of one trace if it is named; returns them."""

        def found() -> list[SeenSpan]:
            spans = [span for span in list(self.spans) if trace_id in (None, span.trace_id)]
            return spans if len(spans) >= num_spans else []

        try:
            return Tree(await until(found, 20.0))
        except AssertionError as error:
            raise AssertionError(
                f"{num_spans} spans were due, there came {[span.name for span in self.spans]}"
            ) from error

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.open.wait(60.0)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector.bodies.append(body)
                collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing to standard error."""

        return Handler


class Tree:
    """Spans by their parents."""

    def __init__(self, spans: list[SeenSpan]) -> None:
        self.spans = spans
        self._children: dict[str, list[SeenSpan]] = defaultdict(list)
        for span in spans:
            self._children[span.parent_id].append(span)

    @property
    def root(self) -> SeenSpan:
        """The one span whose parent is not among them."""
        known = {span.span_id for span in self.spans}
        (root,) = [span for span in self.spans if span.parent_id not in known]
        return root

    def children(self, span: SeenSpan) -> list[SeenSpan]:
        """In the order of their starts; of their arrival where those are equal."""
        return sorted(self._children[span.span_id], key=lambda child: child.start_ns)

    def child(self, span: SeenSpan, name: str) -> SeenSpan:
        (child,) = [child for child in self.children(span) if child.name == name]
        return child

    def shape(self, span: SeenSpan | None = None) -> dict[str, object]:
        """Names below names; siblings by name, as the clocks of processes do not order them."""
        span = span or self.root
        return {child.name: self.shape(child) for child in sorted(self.children(span), key=lambda child: child.name)}


def _spans(request: ExportTraceServiceRequest) -> list[SeenSpan]:
    seen = []
    for resource in request.resource_spans:
        about = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            seen += [
                SeenSpan(
                    service=str(about["service.name"]),
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    wire=span,
                )
                for span in scope.spans
            ]
    return seen


def _attributes(pairs) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    return getattr(value, kind)
