"""A worker's part of a request as spans, on the worker's own clock.

Owns: the spans of one leg and their attributes. Refuses to know: how spans travel (`telemetry`), and the scheduler.

    client's request (router)
      +- baton.prefill      from its arrival here to its blocks' return: queue, compute, lent
      +- baton.decode       from its arrival here to its last token
      |    +- baton.handoff from the first read of KV to all of it validated
      +- baton.whole        a leg that needs no other worker
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from baton.engine.leg import LegRecord
from baton.proto.messages import Leg
from baton.proto.settings import WorkerSettings
from baton.scheduler.sequence import Sequence
from baton.telemetry.tracing import Attribute, Span, SpanKind, SpanSink, TraceContext, open_sink, read_traceparent


class LegTracer:
    """Records the legs of one worker that belong to a traced request. Called on the step loop's thread."""

    def __init__(self, sink: SpanSink, worker_id: str, incarnation: str, connector: str) -> None:
        self._sink = sink
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._connector = connector

    def ended(self, sequence: Sequence, record: LegRecord, now: float, outcome: str, error: str | None) -> None:
        """A leg is over at `now` of the worker's clock, for a reason of that name; `error`: what went wrong."""
        parent = read_traceparent(sequence.request.traceparent)
        if parent is None or not parent.sampled:
            return
        for span in self._spans(sequence, record, parent, now, outcome, error):
            self._sink.record(span)

    def close(self, timeout_s: float) -> None:
        """Sends what is left."""
        self._sink.close(timeout_s)

    def _spans(
        self,
        sequence: Sequence,
        record: LegRecord,
        parent: TraceContext,
        now: float,
        outcome: str,
        error: str | None,
    ) -> Iterator[Span]:
        context = parent.child()
        offset_ns = time.time_ns() - round(now * 1e9)

        def unix_ns(moment_s: float) -> int:
            return offset_ns + round(moment_s * 1e9)

        request, landed_s, first_token_s = sequence.request, sequence.landed_s, record.first_token_s
        num_generated = len(sequence.token_ids) - len(request.token_ids) - (landed_s is not None)
        attributes: dict[str, Attribute] = {
            "baton.worker": self._worker_id,
            "baton.incarnation": self._incarnation,
            "baton.leg_id": sequence.sequence_id,
            "baton.outcome": outcome,
            "baton.input_tokens": len(request.token_ids),
            "baton.output_tokens": num_generated,
            "baton.cached_tokens": sequence.num_cached_tokens,
            "baton.recomputed_tokens": sequence.num_recomputed_tokens,
            "baton.preemptions": sequence.num_preemptions,
        }
        if sequence.first_run_s is not None:
            ready_s = landed_s if landed_s is not None else sequence.added_s
            attributes["baton.queue_s"] = sequence.first_run_s - ready_s
            if request.leg is not Leg.DECODE and first_token_s is not None:
                attributes["baton.compute_s"] = first_token_s - sequence.first_run_s
        if request.leg is Leg.PREFILL and first_token_s is not None:
            attributes["baton.lent_s"] = now - first_token_s
        if request.leg is Leg.DECODE:
            attributes["baton.transferred_tokens"] = sequence.num_transferred_tokens
            if request.source is not None:
                attributes["baton.source"] = request.source.worker_id
        yield Span(
            name=f"baton.{request.leg.name.lower()}",
            context=context,
            parent=parent,
            start_ns=unix_ns(sequence.added_s),
            end_ns=unix_ns(now),
            attributes=attributes,
            kind=SpanKind.SERVER,
            remote_parent=True,
            error=error,
        )
        if landed_s is None or request.source is None:
            return
        handoff = record.handoff
        yield Span(
            name="baton.handoff",
            context=context.child(),
            parent=context,
            start_ns=unix_ns(landed_s - handoff.pulling_s),
            end_ns=unix_ns(landed_s),
            attributes={
                "baton.worker": self._worker_id,
                "baton.source": request.source.worker_id,
                "baton.source_incarnation": request.source.incarnation,
                "baton.connector": self._connector,
                "baton.transferred_tokens": sequence.num_transferred_tokens,
                "baton.cached_tokens": sequence.num_cached_tokens,
                "baton.pulls": handoff.num_pulls,
                "baton.bytes": handoff.num_bytes,
                "baton.wait_s": handoff.wait_s,
                "baton.transfer_s": handoff.transfer_s,
            },
        )


def open_leg_tracer(settings: WorkerSettings, incarnation: str, connector: str) -> LegTracer | None:
    """The tracer of a worker; None where nothing is traced. Raises ValueError for an endpoint that is no URL."""
    service = f"baton-{settings.role.value}"
    sink = open_sink(settings.observability, service, f"{settings.worker_id}/{incarnation}")
    return LegTracer(sink, settings.worker_id, incarnation, connector) if sink is not None else None
