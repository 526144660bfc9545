"""One request's progress through streams that may break: what has come, what to ask for next, whether to try again.

Owns: the tokens received of each output, the request that continues an output after them, and the patience to wait
for a router that restarts. Takes time and errors as arguments.
Refuses to know: channels, threads, event loops (`client.client` has those, twice) and what is shown to a person.

    next_attempt() --> Attempt --stream--> accept(message) --> Output ...
         ^                                   |          \
         |                                   | error     `-- every output has finished: next_attempt() is None
         '--- after retry_delay_s(error) ----'
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.client.errors import (
    AlreadyExists,
    BatonError,
    ConnectionLost,
    ConnectionRefused,
    Overloaded,
    ServerError,
    Unavailable,
)
from baton.proto import inference_pb2 as inference
from baton.proto.messages import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    transferred_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the router says that the time went, in seconds; the stages add up to `total`."""

    router_wait: float = 0.0
    prefill_queue: float = 0.0
    prefill_compute: float = 0.0
    handoff_wait: float = 0.0
    handoff_transfer: float = 0.0
    decode_admission: float = 0.0
    decode: float = 0.0
    retry: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """How an output ended. `stop` is the stop string that matched; `connector` is what moved the KV, if it moved."""

    reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    timeline: Timeline = field(default_factory=Timeline)
    prefill_worker: str = ""
    decode_worker: str = ""
    retries: int = 0
    stop: str = ""
    connector: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What one message adds to output `index` of a request. `finish` is set on the last of each index."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    first_token_index: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to go on trying after a break, and how often. Any token received starts the time anew."""

    give_up_s: float = 30.0
    first_delay_s: float = 0.05
    longest_delay_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request to send; its outputs are numbered from `first_index` on."""

    request: inference.GenerateRequest
    first_index: int = 0


class Progress:
    """`request` must name its id and its seed: only then is its continuation the very one that was cut off.

    `connected` tells that the router was reached before, so that failing to reach it now is a restart, not a mistake.
    """

    def __init__(
        self,
        request: inference.GenerateRequest,
        patience: Patience,
        connected: bool = False,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._request = request
        self._patience = patience
        self._jitter = jitter
        n = request.sampling.n if request.sampling.HasField("n") else 1
        self._received: list[list[int]] = [list(request.resume_token_ids) for _ in range(n)]
        self._open = set(range(n))
        self._streamed = False
        self._connected = connected
        self._broken_since: float | None = None
        self._num_failures = 0
        self.num_resumes = 0

    def next_attempt(self) -> Attempt | None:
        """What to send now; None when every output has finished."""
        if not self._open:
            return None
        if not self._streamed:
            return Attempt(self._request)
        index = min(self._open)
        request = inference.GenerateRequest()
        request.CopyFrom(self._request)
        del request.resume_token_ids[:]
        request.resume_token_ids.extend(self._received[index])
        if self._received[index]:
            request.sampling.ClearField("prompt_logprobs")
        if len(self._received) > 1:
            # The seeds of the n outputs count up from the request's, so each can be asked for by itself.
            request.request_id = f"{request.request_id}-{index}"
            request.sampling.n = 1
            request.sampling.seed = _wrapped(request.sampling.seed + index)
        return Attempt(request, index)

    def accept(self, attempt: Attempt, message: inference.GenerateResponse) -> Output:
        """Takes one message in. Raises ServerError if its tokens do not follow on those received."""
        index = attempt.first_index + message.index
        if index not in self._open:
            raise ServerError(f"output {index} goes on after its end, or was never asked for")
        received = self._received[index]
        if message.token_ids and message.first_token_index != len(received):
            raise ServerError(
                f"output {index} goes on at token {message.first_token_index}, {len(received)} were received"
            )
        received.extend(message.token_ids)
        self._streamed = self._connected = True
        self._broken_since, self._num_failures = None, 0
        finish = None
        if message.HasField("finish"):
            self._open.remove(index)
            finish = _finish(message.finish)
        return Output(
            index=index,
            text=message.text,
            token_ids=tuple(message.token_ids),
            first_token_index=len(received) - len(message.token_ids),
            logprobs=tuple(TokenLogprob.from_wire(entry) for entry in message.logprobs),
            prompt_logprobs=tuple(TokenLogprob.from_wire(entry) for entry in message.prompt_logprobs),
            finish=finish,
        )

    def ended(self, attempt: Attempt) -> BatonError | None:
        """Judges a stream that closed without an error: one that left an output open has broken."""
        n = attempt.request.sampling.n if attempt.request.sampling.HasField("n") else 1
        left = [index for index in range(attempt.first_index, attempt.first_index + n) if index in self._open]
        return ConnectionLost("the stream ended before the output did", "UNAVAILABLE") if left else None

    def retry_delay_s(self, error: BatonError, now: float) -> float | None:
        """How long to wait before the next attempt; None if there should be none."""
        if not self._is_passing(error):
            return None
        if self._broken_since is None:
            self._broken_since = now
            self.num_resumes += 1
        if now - self._broken_since >= self._patience.give_up_s:
            return None
        self._connected = True
        if isinstance(error, Overloaded) and error.retry_after_s is not None:
            return error.retry_after_s
        delay_s = min(self._patience.first_delay_s * 2.0**self._num_failures, self._patience.longest_delay_s)
        self._num_failures += 1
        return delay_s * (0.5 + self._jitter() / 2)

    def _is_passing(self, error: BatonError) -> bool:
        """Whether waiting may help. What a router says to a request that it never took on is the answer to it."""
        if isinstance(error, ConnectionLost):
            return True
        if isinstance(error, ConnectionRefused):
            return self._connected
        taken_on = self._streamed or self._broken_since is not None
        # AlreadyExists: the router has not yet noticed that the stream it knows is the one that broke.
        return taken_on and isinstance(error, Unavailable | Overloaded | AlreadyExists)


def _finish(message: inference.Finish) -> Finish:
    if message.reason == inference.FINISH_REASON_UNSPECIFIED:
        raise ServerError("an output ended without a reason")
    usage, timeline = message.usage, message.timeline
    return Finish(
        reason=FinishReason(message.reason),
        usage=Usage(**{name: getattr(usage, name) for name in Usage.__dataclass_fields__}),
        timeline=Timeline(**{name: getattr(timeline, name) for name in Timeline.__dataclass_fields__}),
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        retries=message.retries,
        stop=message.stop,
        connector=message.connector,
    )


def _wrapped(seed: int) -> int:
    """The seed as a signed 64-bit number, as the router counts it."""
    return (seed + 2**63) % 2**64 - 2**63
