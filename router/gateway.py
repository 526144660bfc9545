"""The front door behind both faces: a client's request from its first byte to its last message.

Owns: admission, the journeys of a request's outputs, text, stop strings, and what observers hear of it.
Refuses to know: workers, placement, retries (`journey`), what is a valid request (`admission`), and how a face writes
messages and refusals (`service` for gRPC, `http` for HTTP).

    GenerateRequest -> open: admit -> Generation: Journey x n -> Detokenizer -> Outbox -> GenerateResponse ...
    Closing a generation by any way (client gone, Abort, deadline, stop string) closes the journeys and so their legs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass

from baton.proto import inference_pb2 as inference
from baton.proto.messages import FinishReason
from baton.router.admission import Admitted, FieldViolation, NotFound, admit
from baton.router.detokenizer import Detokenizer
from baton.router.fork import Fork
from baton.router.journey import Ended, Errand, Failed, Journey, Tokens, Trouble
from baton.router.observe import Call, OutputRecord, RequestRecord
from baton.router.outbox import Outbox
from baton.router.router import Router
from baton.router.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LONG_TEXT_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Refused:
    """Why there is no answer, or no more of it. `violations`: the fields that are at fault, of Trouble.INVALID."""

    trouble: Trouble
    message: str
    retry_after_s: float | None = None
    violations: tuple[FieldViolation, ...] = ()


class Gateway:
    """Takes requests in for one router, whichever face they came to."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._running: dict[str, Generation] = {}
        self._hunts: set[asyncio.Task[bool]] = set()

    async def open(self, request: inference.GenerateRequest, call: Call) -> Generation | Refused:
        """Admits a request. Nothing runs until the generation's messages are asked for."""
        arrived_s = time.monotonic()
        outcome = await self._open(request, call, arrived_s)
        if isinstance(outcome, Refused):
            fields = [violation.field for violation in outcome.violations]
            self.router.observers.refused(outcome.trouble.value, call, fields)
        return outcome

    def abort(self, request_id: str, resumed_tokens: int | None = None) -> bool:
        """Ends a request that is in progress here; False if there is none of that name.

        With `resumed_tokens`, one that resumes after as many tokens or more is not meant: it is the later self.
        """
        running = self._running.get(request_id)
        if running is None:
            return False
        if resumed_tokens is not None and len(running.admitted.resume_token_ids) >= resumed_tokens:
            return False
        running.abort()
        return True

    async def _open(self, request: inference.GenerateRequest, call: Call, arrived_s: float) -> Generation | Refused:
        if self.router.draining:
            return Refused(Trouble.UNAVAILABLE, "the router is draining")
        admitted = await self._admit(request)
        if isinstance(admitted, NotFound):
            return Refused(Trouble.NOT_FOUND, admitted.description)
        if not isinstance(admitted, Admitted):
            message = "; ".join(violation.description for violation in admitted)
            return Refused(Trouble.INVALID, message, violations=tuple(admitted))
        request_id, num_resumed = admitted.request_id, len(admitted.resume_token_ids)
        former = self._running.get(request_id)
        if former is not None and not num_resumed:
            return Refused(Trouble.EXISTS, f"request_id {request_id!r} is in progress")
        # A request that resumes replaces its own former self, whose client has lost the stream, wherever that runs.
        if former is not None:
            former.abort()
        elif num_resumed:
            self._hunt(request_id, num_resumed)
        chat = request.WhichOneof("prompt") == "chat"
        return Generation(self.router, self._running, admitted, call, arrived_s, chat)

    def _hunt(self, request_id: str, num_resumed: int) -> None:
        """Has the other replicas end a request's former self; nothing waits for it."""
        if self.router.replicas.others:
            hunt = asyncio.create_task(self.router.replicas.abort(request_id, num_resumed))
            self._hunts.add(hunt)
            hunt.add_done_callback(self._hunts.discard)

    async def _admit(self, request: inference.GenerateRequest) -> Admitted | list[FieldViolation] | NotFound:
        """Checks and tokenizes; long texts and grammars in a thread, so that they hold nobody up."""
        limits, tokenizer = self.router.limits(), self.router.tokenizer
        if request.ByteSize() <= LONG_TEXT_CHARS and not request.sampling.HasField("grammar"):
            return admit(request, limits, tokenizer)
        return await asyncio.to_thread(admit, request, limits, tokenizer)


class Generation:
    """One admitted request. Use `messages` once, and close it."""

    def __init__(
        self,
        router: Router,
        running: dict[str, Generation],
        admitted: Admitted,
        call: Call,
        arrived_s: float,
        chat: bool,
    ) -> None:
        self.admitted = admitted
        self._chat = chat
        self._router = router
        self._running = running
        self._task: asyncio.Task[None] | None = None
        self._call = call
        self._arrived_s = arrived_s
        self._arrived_unix_s = time.time() - (time.monotonic() - arrived_s)
        self._traceparent = ""
        self.outbox = Outbox(admitted.request_id)
        self._outputs: list[_Output] = []

    async def messages(self) -> AsyncGenerator[inference.GenerateResponse | Refused, None]:
        """The outputs' messages as they come, `finish` last in each; or a refusal, after which nothing comes."""
        finished = finished_before(self.admitted, self._router.tokenizer)
        if finished is not None:
            yield finished
            return
        request_id = self.admitted.request_id
        self._traceparent = self._router.observers.began(request_id, self._call)
        deadline_s = self._deadline()
        fork = self._router.fork(self.admitted.n)
        self._outputs = [_Output(self, index, deadline_s, fork) for index in range(self.admitted.n)]
        self._task = task = asyncio.create_task(self._run())
        task.add_done_callback(self._close)
        self._running[request_id] = self
        self._router.begin()
        try:
            while (message := await self.outbox.take()) is not None:
                yield message
            for output in self._outputs:
                if output.failed is not None:
                    yield Refused(output.failed.trouble, output.failed.message, output.failed.retry_after_s)
                    return
        finally:
            task.cancel()
            if self._running.get(request_id) is self:
                del self._running[request_id]

    def abort(self) -> None:
        """Ends it from elsewhere: each output says so in its last message."""
        if self._task is not None:
            self._task.cancel()

    def _deadline(self) -> float:
        """The client's deadline, at most the router's own bound, as a time of the router's clock."""
        left_s, bound_s = self._call.left_s, self._router.config.router.request_timeout_s
        return self._arrived_s + (bound_s if left_s is None else min(left_s, bound_s))

    async def _run(self) -> None:
        """All outputs of one request."""
        try:
            async with asyncio.TaskGroup() as group:
                for output in self._outputs:
                    group.create_task(output.run())
        except Exception:
            # A bug in one request must end that request, and be seen, but not the router.
            log.exception("request %s failed", self.admitted.request_id)
            failed = Failed(Trouble.INTERNAL, "an unexpected error; the router's log has more")
            for output in self._outputs:
                if not output.ended:
                    output.fail(failed)

    def _close(self, task: asyncio.Task[None]) -> None:
        """Closes the outbox, whatever ended the task: an Abort may come before it has run at all.

        After an Abort, or to a client that is gone, each output that has no end yet says that it was aborted.
        """
        if task.cancelled():
            for output in self._outputs:
                if not output.ended:
                    output.end(FinishReason.ABORTED)
        self.outbox.close()
        self._router.end(sum(output.journey.ledger.retries for output in self._outputs))
        self._router.observers.ended(self._record())

    def _record(self) -> RequestRecord:
        admitted, outputs = self.admitted, self._outputs
        first = [output.first_s for output in outputs if output.first_s is not None]
        troubles = [output.failed.trouble for output in outputs if output.failed is not None]
        return RequestRecord(
            request_id=admitted.request_id,
            call=self._call,
            traceparent=self._traceparent,
            arrived_unix_s=self._arrived_unix_s,
            duration_s=time.monotonic() - self._arrived_s,
            ttft_s=min(first) - self._arrived_s if first else None,
            prompt_tokens=len(admitted.prompt_token_ids),
            max_tokens=admitted.sampling.max_tokens,
            temperature=admitted.sampling.temperature,
            top_p=admitted.sampling.top_p,
            outputs=tuple(output.record() for output in outputs),
            trouble=troubles[0].value if troubles else "",
            chat=self._chat,
            prompt=_text_for_logs(self._router, admitted.prompt_token_ids, len(admitted.prompt_token_ids)),
        )


class _Output:
    """One of a request's outputs: a journey, its text, its last message."""

    def __init__(self, generation: Generation, index: int, deadline_s: float, fork: Fork | None) -> None:
        admitted, router = generation.admitted, generation._router
        self._router = router
        self._admitted = admitted
        self._outbox = generation.outbox
        self._index = index
        self._num_tokens = len(admitted.resume_token_ids)
        self._detokenizer = _detokenizer(admitted, router.tokenizer)
        self._last_s: float | None = None
        self._finish_name = ""
        self.first_s: float | None = None
        self.failed: Failed | None = None
        self.ended = False
        self.journey: Journey = router.journey(
            Errand(
                journey_id=router.new_journey_id(),
                prompt_token_ids=admitted.prompt_token_ids,
                sampling=admitted.sampling_of(index),
                arrived_s=generation._arrived_s,
                deadline_s=deadline_s,
                resume_token_ids=admitted.resume_token_ids,
                priority=admitted.priority,
                cache_salt=admitted.cache_salt,
                traceparent=generation._traceparent,
            ),
            fork,
        )

    async def run(self) -> None:
        """Puts the output's messages into the outbox, `finish` last."""
        async with aclosing(self.journey.run(self._hear)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Failed):
                    self.fail(piece)
                    return
                if isinstance(piece, Ended):
                    self.end(piece.reason)
                    return
                if self._say(piece):
                    return

    def fail(self, failed: Failed) -> None:
        """Ends the output without a last message, and its request with it."""
        self.ended, self.failed, self._finish_name = True, failed, failed.trouble.value
        self._outbox.close()

    def end(self, reason: FinishReason) -> None:
        """Puts the last message, with the text that was held back."""
        rest = self._detokenizer.flush()
        if rest.stopped is not None:
            reason = FinishReason.STOP
        finish = self._finish(reason, rest.stopped or "")
        self._outbox.put(self._index, self._num_tokens, (), rest.text, finish=finish)

    def _hear(self, tokens: Tokens) -> bool:
        return self._say(tokens, goes_on=True)

    def _say(self, piece: Tokens, goes_on: bool = False) -> bool:
        """Puts a message with tokens; returns whether a stop string was completed by them and ended the output."""
        delta = self._detokenizer.push(piece.token_ids)
        token_ids, logprobs = piece.token_ids, piece.logprobs
        if delta.num_tokens < len(token_ids):
            token_ids, logprobs = token_ids[: delta.num_tokens], logprobs[: delta.num_tokens]
        self._num_tokens += delta.num_tokens
        self._tell(delta.num_tokens)
        finish = None if delta.stopped is None else self._finish(FinishReason.STOP, delta.stopped)
        self._outbox.put(
            self._index,
            piece.first_index,
            token_ids,
            delta.text,
            logprobs,
            piece.prompt_logprobs,
            finish,
            goes_on=goes_on and finish is None,
        )
        return finish is not None

    def record(self) -> OutputRecord:
        ledger = self.journey.ledger
        return OutputRecord(
            index=self._index,
            finish=self._finish_name,
            message=self.failed.message if self.failed is not None else "",
            completion_tokens=self._num_tokens - len(self._admitted.resume_token_ids),
            cached_tokens=ledger.cached_tokens,
            transferred_tokens=ledger.transferred_tokens,
            recomputed_tokens=ledger.recomputed_tokens,
            retries=ledger.retries,
            prefill_worker=ledger.prefill_worker,
            decode_worker=ledger.decode_worker,
            connector=ledger.connector,
            timeline=ledger.timeline(time.monotonic()),
            text=_text_for_logs(self._router, self.journey.output, self._num_tokens),
        )

    def _tell(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self.first_s is None:
            self.first_s = now
        self._router.observers.tokens(num_tokens, None if self._last_s is None else now - self._last_s)
        self._last_s = now

    def _finish(self, reason: FinishReason, stop: str) -> inference.Finish:
        """The account in the last message: from here on the output has ended."""
        self.ended, self._finish_name = True, reason.name.lower()
        ledger = self.journey.ledger
        return inference.Finish(
            reason=reason.value,
            usage=inference.Usage(
                prompt_tokens=len(self._admitted.prompt_token_ids),
                completion_tokens=self._num_tokens,
                cached_tokens=ledger.cached_tokens,
                recomputed_tokens=ledger.recomputed_tokens,
                transferred_tokens=ledger.transferred_tokens,
            ),
            timeline=inference.Timeline(**asdict(ledger.timeline(time.monotonic()))),
            prefill_worker=ledger.prefill_worker,
            decode_worker=ledger.decode_worker,
            retries=ledger.retries,
            stop=stop,
            connector=ledger.connector,
        )


def finished_before(admitted: Admitted, tokenizer: Tokenizer) -> inference.GenerateResponse | None:
    """The last message of a request whose client already has the last token and lost only this."""
    tokens, sampling = admitted.resume_token_ids, admitted.sampling
    if not tokens:
        return None
    detokenizer = _detokenizer(admitted, tokenizer)
    stopped = tokens[-1] in sampling.stop_token_ids and len(tokens) >= sampling.min_tokens
    if not stopped and detokenizer.stopped is None and len(tokens) < sampling.max_tokens:
        return None
    rest = detokenizer.flush()
    reason = FinishReason.STOP if stopped or rest.stopped is not None else FinishReason.LENGTH
    usage = inference.Usage(prompt_tokens=len(admitted.prompt_token_ids), completion_tokens=len(tokens))
    return inference.GenerateResponse(
        request_id=admitted.request_id,
        text=rest.text,
        first_token_index=len(tokens),
        finish=inference.Finish(reason=reason.value, usage=usage, stop=rest.stopped or ""),
    )


def _text_for_logs(router: Router, token_ids: Sequence[int], num_tokens: int) -> str:
    """What the model read or wrote, of the first tokens; empty unless `log_prompts` allows it in logs and traces."""
    if not router.config.observability.log_prompts:
        return ""
    return router.tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=False)


def _detokenizer(admitted: Admitted, tokenizer: Tokenizer) -> Detokenizer:
    """That of one output, in the state after the tokens that the client has."""
    return Detokenizer(
        tokenizer,
        admitted.prompt_token_ids,
        admitted.stop,
        stop_token_ids=admitted.sampling.stop_token_ids,
        min_tokens=admitted.sampling.min_tokens,
        delivered_ids=admitted.resume_token_ids,
    )
