"""A collector that is slow, or gone, costs spans and nothing else."""

from __future__ import annotations

import socket
import time

from collector import Collector

from baton.telemetry import otlp
from baton.telemetry.otlp import OtlpSink
from baton.telemetry.tracing import Span, TraceContext


def span(number: int) -> Span:
    return Span("work", TraceContext(7, number), None, number, number + 1, {"number": number})


def test_spans_that_do_not_fit_are_dropped_oldest_first_and_the_rest_arrive(monkeypatch):
    monkeypatch.setattr(otlp, "MAX_QUEUED_SPANS", 100)
    monkeypatch.setattr(otlp, "MAX_BATCH_SPANS", 10)
    with Collector() as collector:
        collector.open.clear()
        sink = OtlpSink(collector.endpoint, "baton-router", "one")
        for number in range(1, 1001):
            sink.record(span(number))
        collector.open.set()
        sink.close(30.0)
        seen = {seen.attributes["number"] for seen in collector.spans}
    # What was on its way when the queue was full is not in the queue.
    assert 100 <= len(seen) <= 100 + 2 * 10
    assert set(range(901, 1001)) <= seen


def test_closing_gives_up_on_a_collector_that_does_not_answer():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(16)
        sink = OtlpSink(f"http://127.0.0.1:{mute.getsockname()[1]}", "baton-router", "one")
        sink.record(span(1))
        begun_s = time.monotonic()
        sink.close(0.2)
        assert time.monotonic() - begun_s < otlp.EXPORT_TIMEOUT_S / 2


def test_sinks_of_one_process_keep_their_own_names():
    with Collector() as collector:
        for name in ("baton-router", "baton-decode"):
            sink = OtlpSink(collector.endpoint + "/v1/traces/", name, "one")
            sink.record(span(1))
            sink.close(30.0)
        assert [seen.service for seen in collector.spans] == ["baton-router", "baton-decode"]
