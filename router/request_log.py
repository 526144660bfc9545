"""One log line for each client's request, when it is over.

Owns: what such a line says. Refuses to know: its form (`telemetry.logs`), keys, and whether prompts and outputs may be
logged: a record has them only where they may.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.router.journey import Trouble
from baton.router.observe import Call, RequestRecord
from baton.telemetry.logs import Field, fields
from baton.telemetry.tracing import read_traceparent

log = logging.getLogger(__name__)


class RequestLog:
    """An `Observer`."""

    def began(self, request_id: str, call: Call) -> str:
        return ""

    def refused(self, trouble: str, call: Call, at_fault: Sequence[str]) -> None:
        # Not the message to the client: it may quote what the client sent.
        line = {"face": call.face.value, "client": call.client or None, "outcome": trouble, "fields": list(at_fault)}
        log.info("request refused", extra=fields(**line))

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """Counted at the end."""

    def ended(self, record: RequestRecord) -> None:
        if log.isEnabledFor(logging.INFO):
            log.info("request ended", extra=fields(**_line(record)))


def _line(record: RequestRecord) -> dict[str, Field]:
    outputs = record.outputs
    workers = dict.fromkeys(name for output in outputs for name in (output.prefill_worker, output.decode_worker))
    context = read_traceparent(record.traceparent)
    line: dict[str, Field] = {
        "request_id": record.request_id,
        "face": record.call.face.value,
        "client": record.call.client or None,
        "outcome": record.trouble or ",".join(dict.fromkeys(output.finish for output in outputs)),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": sum(output.completion_tokens for output in outputs),
        "cached_tokens": max((output.cached_tokens for output in outputs), default=0),
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
        "workers": [name for name in workers if name],
        "retries": sum(output.retries for output in outputs),
        "trace_id": f"{context.trace_id:032x}" if context is not None else None,
        # What is invalid may be quoted in the message.
        "error": next((output.message for output in outputs if output.message), None)
        if record.trouble != Trouble.INVALID.value
        else None,
        "prompt": record.prompt or None,
        "outputs": [output.text for output in outputs] if record.prompt else None,
    }
    return {name: value for name, value in line.items() if value is not None}
