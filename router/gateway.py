"""The front door behind both faces: a client's request from its first byte to its last message.

Owns: admission, the journeys of a request's outputs, text, stop strings, and what observers hear of it.
Refuses to know: workers, placement, retries (`journey`), what is a valid request (`admission`), and how a face writes
messages and refusals (`service` for gRPC, `http` for HTTP).

    GenerateRequest -> open: admit -> Generation: Journey x n -> Detokenizer -> GenerateResponse ...
    Closing a generation by any way (client gone, Abort, deadline, stop string) closes the journeys and so their legs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass

from baton.proto import inference_pb2 as inference
from baton.proto.messages import FinishReason
from baton.router.admission import Admitted, FieldViolation, NotFound, admit
from baton.router.detokenizer import Detokenizer
from baton.router.journey import Ended, Errand, Failed, Journey, Tokens, Trouble
from baton.router.observe import Call, OutputRecord, RequestRecord
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
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def open(self, request: inference.GenerateRequest, call: Call) -> Generation | Refused:
        """Admits a request. Nothing runs until the generation's messages are asked for."""
        arrived_s = time.monotonic()
        outcome = await self._open(request, call, arrived_s)
        if isinstance(outcome, Refused):
            self.router.observers.refused(outcome.trouble.value, call)
        return outcome

    def abort(self, request_id: str) -> bool:
        """Ends a request that is in progress; False if there is none of that name."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()
        return task is not None

    async def _open(self, request: inference.GenerateRequest, call: Call, arrived_s: float) -> Generation | Refused:
        if self.router.draining:
            return Refused(Trouble.UNAVAILABLE, "the router is draining")
        admitted = await self._admit(request)
        if isinstance(admitted, NotFound):
            return Refused(Trouble.NOT_FOUND, admitted.description)
        if not isinstance(admitted, Admitted):
            message = "; ".join(violation.description for violation in admitted)
            return Refused(Trouble.INVALID, message, violations=tuple(admitted))
        former = self._tasks.get(admitted.request_id)
        if former is not None:
            if not admitted.resume_token_ids:
                return Refused(Trouble.EXISTS, f"request_id {admitted.request_id!r} is in progress")
            # A request that resumes replaces its own former self, whose client has lost the stream.
            former.cancel()
        return Generation(self.router, self._tasks, admitted, call, arrived_s)

    async def _admit(self, request: inference.GenerateRequest) -> Admitted | list[FieldViolation] | NotFound:
        """Checks and tokenizes; long texts in a thread, so that they hold nobody up."""
        limits, tokenizer = self.router.limits(), self.router.tokenizer
        if request.ByteSize() <= LONG_TEXT_CHARS:
            return admit(request, limits, tokenizer)
        return await asyncio.to_thread(admit, request, limits, tokenizer)


class Generation:
    """One admitted request. Use `messages` once, and close it."""

    def __init__(
        self, router: Router, tasks: dict[str, asyncio.Task[None]], admitted: Admitted, call: Call, arrived_s: float
    ) -> None:
        self.admitted = admitted
        self._router = router
        self._tasks = tasks
        self._call = call
        self._arrived_s = arrived_s
        self._arrived_unix_s = time.time() - (time.monotonic() - arrived_s)
        self._traceparent = ""
        # Unbounded, so that the end always finds room; it holds no more than the outputs' tokens.
        self._queue: asyncio.Queue[inference.GenerateResponse | Refused | None] = asyncio.Queue()
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
        self._outputs = [_Output(self, index, deadline_s) for index in range(self.admitted.n)]
        task = asyncio.create_task(self._run())
        task.add_done_callback(self._close)
        self._tasks[request_id] = task
        self._router.begin()
        try:
            while (message := await self._queue.get()) is not None:
                yield message
                if isinstance(message, Refused):
                    return
        finally:
            task.cancel()
            if self._tasks.get(request_id) is task:
                del self._tasks[request_id]

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
        """Ends the queue, whatever ended the task: an Abort may come before it has run at all.

        After an Abort, or to a client that is gone, each output that has no end yet says that it was aborted.
        """
        if task.cancelled():
            for output in self._outputs:
                if not output.ended:
                    output.end(FinishReason.ABORTED)
        self._queue.put_nowait(None)
        self._router.end(sum(output.journey.ledger.retries for output in self._outputs))
        self._router.observers.ended(self._record())

    def _record(self) -> RequestRecord:
        admitted, outputs = self.admitted, self._outputs
        first = [output.first_s for output in outputs if output.first_s is not None]
        troubles = [output.trouble for output in outputs if output.trouble is not None]
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
        )


class _Output:
    """One of a request's outputs: a journey, its text, its last message."""

    def __init__(self, generation: Generation, index: int, deadline_s: float) -> None:
        admitted, router = generation.admitted, generation._router
        self._router = router
        self._admitted = admitted
        self._queue = generation._queue
        self._index = index
        self._num_tokens = len(admitted.resume_token_ids)
        self._detokenizer = _detokenizer(admitted, router.tokenizer)
        self._last_s: float | None = None
        self._finish_name = ""
        self._message_text = ""
        self.first_s: float | None = None
        self.trouble: Trouble | None = None
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
            )
        )

    async def run(self) -> None:
        """Puts the output's messages on the queue, `finish` last."""
        async with aclosing(self.journey.run()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Failed):
                    self.fail(piece)
                    return
                if isinstance(piece, Ended):
                    self.end(piece.reason)
                    return
                delta = self._detokenizer.push(piece.token_ids)
                message = self._message(piece, delta.text, delta.num_tokens)
                self._tell(delta.num_tokens)
                if delta.stopped is not None:
                    message.finish.CopyFrom(self._finish(FinishReason.STOP, delta.stopped))
                    self._queue.put_nowait(message)
                    return
                self._queue.put_nowait(message)

    def fail(self, failed: Failed) -> None:
        """Ends the output without a last message, and its request with it."""
        self.ended = True
        self.trouble, self._finish_name, self._message_text = failed.trouble, failed.trouble.value, failed.message
        self._queue.put_nowait(Refused(failed.trouble, failed.message, failed.retry_after_s))

    def end(self, reason: FinishReason) -> None:
        """Puts the last message, with the text that was held back."""
        rest = self._detokenizer.flush()
        if rest.stopped is not None:
            reason = FinishReason.STOP
        message = inference.GenerateResponse(
            request_id=self._admitted.request_id,
            index=self._index,
            first_token_index=self._num_tokens,
            text=rest.text,
            finish=self._finish(reason, rest.stopped or ""),
        )
        self._queue.put_nowait(message)

    def record(self) -> OutputRecord:
        ledger = self.journey.ledger
        return OutputRecord(
            index=self._index,
            finish=self._finish_name,
            message=self._message_text,
            completion_tokens=self._num_tokens - len(self._admitted.resume_token_ids),
            cached_tokens=ledger.cached_tokens,
            transferred_tokens=ledger.transferred_tokens,
            recomputed_tokens=ledger.recomputed_tokens,
            retries=ledger.retries,
            prefill_worker=ledger.prefill_worker,
            decode_worker=ledger.decode_worker,
            connector=ledger.connector,
            timeline=ledger.timeline(time.monotonic()),
        )

    def _tell(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self.first_s is None:
            self.first_s = now
        self._router.observers.tokens(num_tokens, None if self._last_s is None else now - self._last_s)
        self._last_s = now

    def _message(self, piece: Tokens, text: str, num_tokens: int) -> inference.GenerateResponse:
        self._num_tokens += num_tokens
        return inference.GenerateResponse(
            request_id=self._admitted.request_id,
            index=self._index,
            token_ids=piece.token_ids[:num_tokens],
            text=text,
            first_token_index=piece.first_index,
            logprobs=[entry.to_wire() for entry in piece.logprobs[:num_tokens]],
            prompt_logprobs=[entry.to_wire() for entry in piece.prompt_logprobs],
        )

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
