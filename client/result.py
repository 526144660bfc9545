"""All that came of one request, added up.

Owns: the sum of its outputs, and the times that the client's own clock shows.
Refuses to know: streams, and how often one broke before the outputs were whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.client.errors import Cancelled
from baton.client.resume import Finish, Output, Timeline
from baton.proto.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """All outputs of a request, and what the client's own clock says. The properties are those of the first output.

    `ttft_s` is from sending to the first token, `total_s` to the end; `num_resumes` counts breaks that were bridged.
    """

    request_id: str
    outputs: tuple[Completion, ...]
    ttft_s: float
    total_s: float
    num_resumes: int

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.outputs[0].finish

    @property
    def timeline(self) -> Timeline:
        return self.outputs[0].finish.timeline


class Record:
    """What has come of one request, and when, by the client's clock."""

    def __init__(self) -> None:
        self._started = 0.0
        self._first_token: float | None = None
        self._last = 0.0
        self._outputs: dict[int, list[Output]] = {}
        self.num_resumes = 0

    def start(self, now: float) -> None:
        self._started = self._last = now

    def add(self, output: Output, now: float) -> None:
        if output.token_ids and self._first_token is None:
            self._first_token = now
        self._last = now
        self._outputs.setdefault(output.index, []).append(output)

    def result(self, request_id: str) -> Result:
        completions = []
        for index, outputs in sorted(self._outputs.items()):
            finish = outputs[-1].finish
            if finish is None:
                raise Cancelled("the request was closed before it had finished", "CANCELLED")
            completions.append(
                Completion(
                    index=index,
                    text="".join(output.text for output in outputs),
                    token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
                    finish=finish,
                    logprobs=tuple(entry for output in outputs for entry in output.logprobs),
                    prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
                )
            )
        if not completions:
            raise Cancelled("the request was closed before it had begun", "CANCELLED")
        first_token = self._first_token if self._first_token is not None else self._last
        return Result(
            request_id=request_id,
            outputs=tuple(completions),
            ttft_s=first_token - self._started,
            total_s=self._last - self._started,
            num_resumes=self.num_resumes,
        )
