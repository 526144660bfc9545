"""One client's request as spans: who had it when, in the words of the GenAI semantic conventions.

Owns: the shape of a request's span tree and its attributes. Refuses to know: how spans travel (`telemetry`), and
whether prompts and outputs may be shown: a record has them only where they may.

    chat {model}                             the client's request, from its arrival to its last message
      +- router_wait ... decode              the stages of its output's timeline, end to end: together its total
      +- baton.output                        one of several outputs, with its own stages below it
      +- baton.prefill, baton.decode ...     each worker's own view of its leg (`engine.tracing`)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from baton.router.journey import Trouble
from baton.router.observe import Call, OutputRecord, RequestRecord
from baton.telemetry.tracing import (
    Attribute,
    Span,
    SpanKind,
    SpanSink,
    TraceContext,
    begin,
    read_traceparent,
    read_tracestate,
)

STAGES = (
    "retry",
    "router_wait",
    "prefill_queue",
    "prefill_compute",
    "handoff_wait",
    "handoff_transfer",
    "decode_admission",
    "decode",
)
"""In the order in which they follow one another."""


class RequestTracer:
    """An `Observer`. `ratio`: the part of requests that is traced, of those whose client has not decided it."""

    def __init__(self, sink: SpanSink, model: str, ratio: float) -> None:
        self._sink = sink
        self._model = model
        self._ratio = ratio

    def began(self, request_id: str, call: Call) -> str:
        context = begin(read_traceparent(call.traceparent), self._ratio)
        return context.traceparent if context.sampled else ""

    def refused(self, trouble: str, call: Call, fields: Sequence[str]) -> None:
        """There is nothing to draw: nothing has run."""

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """A span a token would tell less than it costs."""

    def ended(self, record: RequestRecord) -> None:
        for span in request_spans(record, self._model):
            self._sink.record(span)


def request_spans(record: RequestRecord, model: str) -> Iterator[Span]:
    """The request's span and those below it; none if the request is not traced."""
    context = read_traceparent(record.traceparent)
    if context is None:
        return
    parent = read_traceparent(record.call.traceparent)
    tracestate = read_tracestate(record.call.tracestate) if parent is not None else ""
    start_ns = round(record.arrived_unix_s * 1e9)
    end_ns = start_ns + round(record.duration_s * 1e9)
    attributes = _request_attributes(record, model)
    if len(record.outputs) == 1:
        attributes |= _output_attributes(record.outputs[0])
    yield Span(
        name=f"{attributes['gen_ai.operation.name']} {model}",
        context=context,
        parent=parent,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=attributes,
        kind=SpanKind.SERVER,
        remote_parent=True,
        tracestate=tracestate,
        error=next(filter(None, map(_error, record.outputs)), None),
    )
    for output in record.outputs:
        above = context
        if len(record.outputs) > 1:
            above = context.child()
            yield Span(
                name="baton.output",
                context=above,
                parent=context,
                start_ns=start_ns,
                end_ns=min(end_ns, start_ns + round(output.timeline.total * 1e9)),
                attributes={"baton.output.index": output.index, **_output_attributes(output)},
                tracestate=tracestate,
                error=_error(output),
            )
        yield from _stage_spans(output, above, start_ns, end_ns, tracestate)


def _stage_spans(
    output: OutputRecord, parent: TraceContext, start_ns: int, last_ns: int, tracestate: str
) -> Iterator[Span]:
    """The stages that the output went through, each from where the one before it ended."""
    passed_s = 0.0
    expected = _expected_stages(output)
    for stage in STAGES:
        seconds: float = getattr(output.timeline, stage)
        if not seconds and stage not in expected:
            continue
        # Rounded as times, not as durations, so that rounding does not add up.
        begun_ns = min(last_ns, start_ns + round(passed_s * 1e9))
        passed_s += seconds
        yield Span(
            name=stage,
            context=parent.child(),
            parent=parent,
            start_ns=begun_ns,
            end_ns=min(last_ns, start_ns + round(passed_s * 1e9)),
            attributes=_stage_attributes(stage, output),
            tracestate=tracestate,
        )


def _expected_stages(output: OutputRecord) -> frozenset[str]:
    """Those that have a span even if they took no time."""
    stages = {"router_wait"}
    if output.retries:
        stages.add("retry")
    if output.prefill_worker:
        stages |= {"prefill_queue", "prefill_compute", "decode"}
    if output.decode_worker not in ("", output.prefill_worker):
        stages |= {"handoff_wait", "handoff_transfer", "decode_admission"}
    return frozenset(stages)


def _request_attributes(record: RequestRecord, model: str) -> dict[str, Attribute]:
    outputs = record.outputs
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat" if record.chat else "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.temperature": record.temperature,
        "gen_ai.request.top_p": record.top_p,
        "gen_ai.response.finish_reasons": tuple(output.finish for output in outputs),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(output.completion_tokens for output in outputs),
        "gen_ai.usage.cache_read.input_tokens": max((output.cached_tokens for output in outputs), default=0),
        "baton.request_id": record.request_id,
        "baton.face": record.call.face.value,
        "baton.retries": sum(output.retries for output in outputs),
    }
    if len(outputs) != 1:
        attributes["gen_ai.request.choice.count"] = len(outputs)
    if record.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    if record.call.client:
        attributes["baton.client"] = record.call.client
    if record.trouble:
        attributes["error.type"] = record.trouble
    if record.prompt:
        attributes["gen_ai.input.messages"] = _messages("user", [record.prompt])
        attributes["gen_ai.output.messages"] = _messages("assistant", [output.text for output in outputs])
    return attributes


def _output_attributes(output: OutputRecord) -> dict[str, Attribute]:
    return {
        "baton.finish": output.finish,
        "baton.completion_tokens": output.completion_tokens,
        "baton.cached_tokens": output.cached_tokens,
        "baton.transferred_tokens": output.transferred_tokens,
        "baton.recomputed_tokens": output.recomputed_tokens,
        "baton.retries": output.retries,
        "baton.prefill_worker": output.prefill_worker,
        "baton.decode_worker": output.decode_worker,
        "baton.connector": output.connector,
    }


def _stage_attributes(stage: str, output: OutputRecord) -> dict[str, Attribute]:
    match stage:
        case "retry":
            return {"baton.retries": output.retries}
        case "router_wait":
            return {}
        case "prefill_queue" | "prefill_compute":
            return {"baton.worker": output.prefill_worker, "baton.cached_tokens": output.cached_tokens}
        case "handoff_wait" | "handoff_transfer":
            return {
                "baton.worker": output.decode_worker,
                "baton.source": output.prefill_worker,
                "baton.connector": output.connector,
                "baton.transferred_tokens": output.transferred_tokens,
            }
        case _:
            return {"baton.worker": output.decode_worker}


def _messages(role: str, texts: Sequence[str]) -> str:
    """As the conventions want content in a span, which has it only where `log_prompts` allows it."""
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]} for text in texts])


def _error(output: OutputRecord) -> str | None:
    """What a failed output says; one that was aborted is no error. What is invalid may be quoted, so it is not told."""
    if not output.message:
        return None
    return output.message if output.finish != Trouble.INVALID.value else output.finish
