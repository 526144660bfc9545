"""The front door for gRPC clients: the Inference service.

Owns: a request from its first byte to its last message: admission, the journeys of its outputs, text, stop strings.
Refuses to know: workers, placement, retries (`journey`), and what is a valid request (`admission`).

    GenerateRequest -> admit -> Journey x n -> Detokenizer -> GenerateResponse ...
    Leaving the handler by any way (client gone, Abort, deadline, stop string) closes the journeys and so their legs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict

import grpc

from baton.proto import inference_pb2 as inference
from baton.proto import inference_pb2_grpc
from baton.proto.context import Context
from baton.proto.messages import FinishReason
from baton.router.admission import Admitted, FieldViolation, NotFound, admit
from baton.router.detokenizer import Detokenizer
from baton.router.journey import Ended, Errand, Failed, Journey, Tokens, Trouble
from baton.router.router import Router
from baton.router.status import refuse, refuse_failed, refuse_fields
from baton.router.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LONG_TEXT_CHARS = 4096

_Message = inference.GenerateResponse | Failed | None


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Serves `Inference` for one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def Generate(
        self, request: inference.GenerateRequest, context: Context
    ) -> AsyncIterator[inference.GenerateResponse]:
        arrived_s = time.monotonic()
        router = self._router
        if router.draining:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "the router is draining")
        admitted = await self._admit(request)
        if isinstance(admitted, NotFound):
            await refuse(context, grpc.StatusCode.NOT_FOUND, admitted.description)
        if not isinstance(admitted, Admitted):
            await refuse_fields(context, admitted)
        await self._take_over(admitted, context)
        finished = finished_before(admitted, router.tokenizer)
        if finished is not None:
            yield finished
            return
        deadline_s = self._deadline(context, arrived_s)
        outputs = [_Output(router, admitted, index, deadline_s, arrived_s) for index in range(admitted.n)]
        # Unbounded, so that the end always finds room; it holds no more than the outputs' tokens.
        queue: asyncio.Queue[_Message] = asyncio.Queue()
        task = asyncio.create_task(self._run(admitted.request_id, outputs, queue))
        task.add_done_callback(lambda task: self._close(task, outputs, queue))
        self._tasks[admitted.request_id] = task
        router.begin()
        try:
            while (message := await queue.get()) is not None:
                if isinstance(message, Failed):
                    await refuse_failed(context, message, admitted.request_id)
                yield message
        finally:
            task.cancel()
            if self._tasks.get(admitted.request_id) is task:
                del self._tasks[admitted.request_id]

    async def Abort(self, request: inference.AbortRequest, context: Context) -> inference.AbortResponse:
        task = self._tasks.get(request.request_id)
        if task is not None:
            task.cancel()
        return inference.AbortResponse(found=task is not None)

    async def GetModel(self, request: inference.GetModelRequest, context: Context) -> inference.ModelInfo:
        router, limits = self._router, self._router.limits()
        return inference.ModelInfo(
            name=router.config.model,
            max_model_len=limits.max_tokens,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            block_size=router.config.pools[0].engine.block_size,
            dtype=router.config.pools[0].engine.dtype,
            pools=[
                inference.PoolInfo(name=pool.name, role=pool.role.value, size=pool.size) for pool in router.config.pools
            ],
        )

    # --- one request ------------------------------------------------------------------------------------------------

    async def _admit(self, request: inference.GenerateRequest) -> Admitted | list[FieldViolation] | NotFound:
        """Checks and tokenizes; long texts in a thread, so that they hold nobody up."""
        limits, tokenizer = self._router.limits(), self._router.tokenizer
        if request.ByteSize() <= LONG_TEXT_CHARS:
            return admit(request, limits, tokenizer)
        return await asyncio.to_thread(admit, request, limits, tokenizer)

    async def _take_over(self, admitted: Admitted, context: Context) -> None:
        """A request that resumes replaces its own former self, whose client has lost the stream."""
        task = self._tasks.get(admitted.request_id)
        if task is None:
            return
        if not admitted.resume_token_ids:
            await refuse(context, grpc.StatusCode.ALREADY_EXISTS, f"request_id {admitted.request_id!r} is in progress")
        task.cancel()

    def _deadline(self, context: Context, arrived_s: float) -> float:
        """The client's deadline, at most the router's own bound, as a time of the router's clock."""
        left_s, bound_s = context.time_remaining(), self._router.config.router.request_timeout_s
        return arrived_s + (bound_s if left_s is None else min(left_s, bound_s))

    async def _run(self, request_id: str, outputs: list[_Output], queue: asyncio.Queue[_Message]) -> None:
        """All outputs of one request."""
        try:
            async with asyncio.TaskGroup() as group:
                for output in outputs:
                    group.create_task(output.run(queue))
        except Exception:
            # A bug in one request must end that request, and be seen, but not the router.
            log.exception("request %s failed", request_id)
            queue.put_nowait(Failed(Trouble.INTERNAL, "an unexpected error; the router's log has more"))

    def _close(self, task: asyncio.Task[None], outputs: list[_Output], queue: asyncio.Queue[_Message]) -> None:
        """Ends the queue, whatever ended the task: an Abort may come before it has run at all.

        After an Abort, or to a client that is gone, each output that has no end yet says that it was aborted.
        """
        if task.cancelled():
            for output in outputs:
                if not output.ended:
                    queue.put_nowait(output.end(FinishReason.ABORTED))
        queue.put_nowait(None)
        self._router.end(sum(output.journey.ledger.retries for output in outputs))


class _Output:
    """One of a request's outputs: a journey, its text, its last message."""

    def __init__(self, router: Router, admitted: Admitted, index: int, deadline_s: float, arrived_s: float) -> None:
        self._admitted = admitted
        self._index = index
        self._sampling = admitted.sampling_of(index)
        self._num_tokens = len(admitted.resume_token_ids)
        self._detokenizer = _detokenizer(admitted, router.tokenizer)
        self.ended = False
        self.journey: Journey = router.journey(
            Errand(
                journey_id=router.new_journey_id(),
                prompt_token_ids=admitted.prompt_token_ids,
                sampling=self._sampling,
                arrived_s=arrived_s,
                deadline_s=deadline_s,
                resume_token_ids=admitted.resume_token_ids,
                priority=admitted.priority,
                cache_salt=admitted.cache_salt,
            )
        )

    async def run(self, queue: asyncio.Queue[_Message]) -> None:
        """Puts the output's messages on the queue, `finish` last."""
        async with aclosing(self.journey.run()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Failed):
                    self.ended = True
                    queue.put_nowait(piece)
                    return
                if isinstance(piece, Ended):
                    queue.put_nowait(self.end(piece.reason))
                    return
                delta = self._detokenizer.push(piece.token_ids)
                message = self._message(piece, delta.text, delta.num_tokens)
                if delta.stopped is not None:
                    self.ended = True
                    message.finish.CopyFrom(self._finish(FinishReason.STOP, delta.stopped))
                    queue.put_nowait(message)
                    return
                queue.put_nowait(message)

    def end(self, reason: FinishReason) -> inference.GenerateResponse:
        """The last message, with the text that was held back."""
        self.ended = True
        rest = self._detokenizer.flush()
        if rest.stopped is not None:
            reason = FinishReason.STOP
        return inference.GenerateResponse(
            request_id=self._admitted.request_id,
            index=self._index,
            first_token_index=self._num_tokens,
            text=rest.text,
            finish=self._finish(reason, rest.stopped or ""),
        )

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
