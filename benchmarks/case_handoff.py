"""S6: how fast KV moves between two workers, and how much of that a request waits for.

    pull     64 MiB in block runs by the connector, against one post of the same blocks by a bare agent (kv_pull.py)
    exposed  real requests of 2,048 prompt tokens on one prefill and one decode worker, a core each, read in 4 chunks:
             from the end of the last chunk's computation to the first decode step, as a share of the whole transfer,
             which is from the first pull's start to the last one's validation. Both ends are on this machine's clock.

Owns: a collector of spans, since the moments are those of the workers' own traces, and the rows.
"""

from __future__ import annotations

import gzip
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bars import Better, Measure, Row
from case import Options
from clusters import await_memory, local_ray, pin_workers, serving, shape, worker_pids
from kv_pull import between_processes
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.client.client import Client
from baton.proto.settings import ObservabilitySettings, TransferSettings

BAR_OF_RAW, BAR_EXPOSED = 0.9, 0.15
MIB, RUNS = 64, (4, 16, 64)
PROMPT_TOKENS, OUTPUT_TOKENS = 2048, 4
CHUNKS = 4
SPANS_WAIT_S = 30.0


def rows(options: Options) -> Iterator[Row]:
    settings = TransferSettings(connector="nixl", network_device="lo")
    rounds = options.rounds or (2 if options.quick else 9)
    mib = 8 if options.quick else MIB
    for result in between_processes(settings, mib, list(RUNS), rounds):
        measured = Measure("raw NIXL", Better.MORE, BAR_OF_RAW, result.pulls_gb_s, result.raws_gb_s)
        yield Row("S6", f"pull of {mib} MiB, runs of {result.run_blocks} blocks", "GB/s", (measured,))
    requests = 2 if options.quick else 8
    with local_ray():
        chunked = list(_moments(options, PROMPT_TOKENS // CHUNKS, requests))
        whole = list(_moments(options, PROMPT_TOKENS, requests))
    shares = tuple(moments.exposed_ms / moments.transfer_ms for moments in chunked)
    measured = Measure("transfer", Better.AT_MOST, BAR_EXPOSED, shares)
    yield Row("S6", f"share of the hand-off that is exposed, {CHUNKS} chunks", "", (measured,))
    exposed, unchunked = (tuple(moments.exposed_ms for moments in found) for found in (chunked, whole))
    measured = Measure("one chunk", Better.LESS, None, exposed, unchunked)
    yield Row("S6", f"exposed hand-off of {PROMPT_TOKENS} tokens, {CHUNKS} chunks", "ms", (measured,))


@dataclass(frozen=True, slots=True)
class Moments:
    """Of one hand-off."""

    exposed_ms: float
    transfer_ms: float


def _moments(options: Options, budget: int, number: int) -> Iterator[Moments]:
    """Those of so many requests, one after the other, the first ones apart."""
    with collecting() as collected:
        config = shape(options.model, 1, 1, dtype="bfloat16", num_blocks=1024, budget=budget, all_move=True)
        config = replace(config, observability=ObservabilitySettings(trace_endpoint=collected.endpoint))
        with serving(config) as addresses, Client(addresses.grpc) as client:
            pin_workers(addresses.grpc, options.cores)
            await_memory(worker_pids(addresses.grpc))
            rng = random.Random(budget)
            for _ in range(number + 2):
                prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
                client.generate(token_ids=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True).result()
            traces = collected.traces(number + 2, {"baton.prefill", "baton.decode", "baton.handoff"})
    for spans in traces[2:]:
        yield handoff(spans)


def handoff(spans: Sequence[Span]) -> Moments:
    """From the spans of one request; see `engine/tracing.py` for what their attributes count from."""
    named = {span.name: span for span in spans}
    prefill, decode, pulled = (named[f"baton.{name}"] for name in ("prefill", "decode", "handoff"))
    computed_ns = prefill.end_time_unix_nano - 1e9 * _seconds(prefill, "baton.lent_s")
    decoding_ns = pulled.end_time_unix_nano + 1e9 * _seconds(decode, "baton.queue_s")
    transfer_ns = pulled.end_time_unix_nano - pulled.start_time_unix_nano
    return Moments((decoding_ns - computed_ns) / 1e6, transfer_ns / 1e6)


def _seconds(span: Span, name: str) -> float:
    return next(attribute.value.double_value for attribute in span.attributes if attribute.key == name)


@dataclass(slots=True)
class Collected:
    """What a collector has received: spans by trace, in the order of the traces' first spans."""

    endpoint: str
    spans: dict[bytes, list[Span]] = field(default_factory=dict)
    more: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self.more:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.setdefault(span.trace_id, []).append(span)
            self.more.notify_all()

    def traces(self, number: int, names: set[str]) -> list[list[Span]]:
        """So many traces that have a span of each name, in the order of their time. Raises TimeoutError."""
        deadline = time.monotonic() + SPANS_WAIT_S
        with self.more:
            while True:
                whole = [spans for spans in self.spans.values() if names <= {span.name for span in spans}]
                if len(whole) >= number:
                    return sorted(whole, key=lambda spans: min(span.start_time_unix_nano for span in spans))
                if not self.more.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"{len(whole)} of {number} traces came within {SPANS_WAIT_S:.0f} s")


@contextmanager
def collecting(host: str = "127.0.0.1") -> Iterator[Collected]:
    """An OTLP collector on a free port of that address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collected.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing to standard error."""

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    collected = Collected(f"http://{host}:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collected
    finally:
        server.shutdown()
        server.server_close()
