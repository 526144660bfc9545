"""What a request cost and where its time went, as the members `usage` and `metrics` of a response.

Owns: the sums over prompts and outputs. Refuses to know: choices and how a response is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.proto import inference_pb2 as inference
from baton.router.gateway import Generation

FINISH_REASONS = {
    inference.FINISH_REASON_STOP: "stop",
    inference.FINISH_REASON_LENGTH: "length",
    inference.FINISH_REASON_ABORTED: "abort",
}
_STAGES = [stage.name for stage in inference.Timeline.DESCRIPTOR.fields]


class Account:
    """Of one request. `scored_only`: its outputs were asked for no token, and have one that nobody sees."""

    def __init__(self, generations: Sequence[Generation], scored_only: bool = False) -> None:
        self._prompt_tokens = sum(len(generation.admitted.prompt_token_ids) for generation in generations)
        self._scored_only = scored_only
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._finishes: list[inference.Finish] = []

    def count(self, message: inference.GenerateResponse) -> None:
        self.count_tokens(len(message.token_ids))
        if message.HasField("finish"):
            self._finishes.append(message.finish)
            if message.index == 0:
                # The prompt is one, however many outputs it has: what the first of them found counts.
                self._cached_tokens += message.finish.usage.cached_tokens

    def count_tokens(self, num_tokens: int) -> None:
        if not self._scored_only:
            self._completion_tokens += num_tokens

    @property
    def running_usage(self) -> str:
        """The usage so far, as JSON: for every event of a stream."""
        prompt, completion = self._prompt_tokens, self._completion_tokens
        return (
            f'{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{prompt + completion},'
            f'"prompt_tokens_details":{{"cached_tokens":{self._cached_tokens}}}}}'
        )

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def metrics(self) -> dict[str, Any] | None:
        """The stages of the output that took longest, in seconds: they add up to `total`, which is the request's."""
        if not self._finishes:
            return None
        slowest = max(self._finishes, key=lambda finish: finish.timeline.total)
        return {
            **{stage: round(getattr(slowest.timeline, stage), 6) for stage in _STAGES},
            "prefill_worker": slowest.prefill_worker,
            "decode_worker": slowest.decode_worker,
            "connector": slowest.connector,
            "retries": sum(finish.retries for finish in self._finishes),
            "recomputed_tokens": sum(finish.usage.recomputed_tokens for finish in self._finishes),
            "transferred_tokens": sum(finish.usage.transferred_tokens for finish in self._finishes),
        }
