"""The requests that ended last, for whoever looks.

Owns: a ring of the last ones and the counts of what went wrong.
Refuses to know: how they are shown (`cluster`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from baton.proto import cluster_pb2 as cluster
from baton.proto import inference_pb2 as inference
from baton.router.journey import Trouble
from baton.router.observe import Call, RequestRecord

NUM_REQUESTS = 50
MAX_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True)
class _Ended:
    number: int
    at_s: float
    record: RequestRecord


class RecentRequests:
    """An observer that remembers the last requests. `size` bounds the ring."""

    def __init__(self, size: int = NUM_REQUESTS, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_refused = 0
        self.num_failed = 0
        self._clock = clock
        self._num_ended = 0
        self._ring: deque[_Ended] = deque(maxlen=size)

    def began(self, request_id: str, call: Call) -> str:
        return ""

    def refused(self, trouble: str, call: Call, fields: Sequence[str]) -> None:
        self.num_refused += 1

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        pass

    def ended(self, record: RequestRecord) -> None:
        if record.trouble == Trouble.OVERLOADED.value:
            # The queue is behind admission, but a client that it turns away has been refused all the same.
            self.num_refused += 1
        elif record.trouble:
            self.num_failed += 1
        self._num_ended += 1
        self._ring.append(_Ended(self._num_ended, self._clock(), record))

    def messages(self) -> Iterator[cluster.RecentRequest]:
        """As they are shown, the last one first."""
        now = self._clock()
        for ended in reversed(self._ring):
            yield _message(ended, now)


def _message(ended: _Ended, now: float) -> cluster.RecentRequest:
    record, outputs = ended.record, ended.record.outputs
    last = max(outputs, key=lambda output: output.timeline.total)
    return cluster.RecentRequest(
        number=ended.number,
        request_id=record.request_id[:MAX_TEXT_CHARS],
        face=record.call.face.value,
        outcome=record.trouble or last.finish,
        message=next((output.message for output in outputs if output.message), "")[:MAX_TEXT_CHARS],
        num_outputs=len(outputs),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=last.cached_tokens,
        transferred_tokens=sum(output.transferred_tokens for output in outputs),
        recomputed_tokens=sum(output.recomputed_tokens for output in outputs),
        completion_tokens=sum(output.completion_tokens for output in outputs),
        prefill_worker=last.prefill_worker,
        decode_worker=last.decode_worker,
        connector=last.connector,
        retries=sum(output.retries for output in outputs),
        ttft_s=record.ttft_s,
        timeline=inference.Timeline(**asdict(last.timeline)),
        age_s=now - ended.at_s,
    )
