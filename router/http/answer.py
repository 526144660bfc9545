"""A request's generations as one HTTP response, streamed or whole; it ends with the client, whichever is first.

Owns: the order of opening, merging, sending and closing. Refuses to know: how a token or an answer is written
(`writer`) and what a generation does (`gateway`).

    GenerateRequest x prompts -> Gateway.open x prompts -> messages, merged -> Writer -> events, or one body
    The status waits for the first message, so a request that never ran is an error and not a broken stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.proto import inference_pb2 as inference
from baton.router.gateway import Gateway, Generation, Refused
from baton.router.http.errors import ApiError, from_refused
from baton.router.http.server import CHUNKS, Chunks
from baton.router.http.writer import Writer, event_of
from baton.router.observe import Call

# How long beyond its own deadline a request may take, of a client that does not read what it asked for.
STALL_S = 30.0
MERGED_MESSAGES = 256

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

# A message and the place of its prompt in the request.
Part = tuple[int, inference.GenerateResponse | Refused]
Parts = AsyncGenerator[Part, None]


async def answer(
    gateway: Gateway, requests: Sequence[inference.GenerateRequest], call: Call, writer: Writer, stream: bool
) -> Answer:
    """Admits all of them. Raises ApiError if one is refused: then none runs."""
    generations: list[Generation] = []
    for prompt, request in enumerate(requests):
        opened = await gateway.open(request, call)
        if isinstance(opened, Refused):
            raise from_refused(opened, request.request_id, writer.names(prompt))
        generations.append(opened)
    writer.open(generations)
    return Answer(generations, writer, stream, gateway.router.config.router.request_timeout_s + STALL_S)


class Answer(Response):
    """Runs the generations when the server asks for the response."""

    def __init__(self, generations: Sequence[Generation], writer: Writer, stream: bool, timeout_s: float) -> None:
        super().__init__()
        self._generations = generations
        self._writer = writer
        self._stream = stream
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all of it, or stops when the client is gone. The generations are closed on each way out."""
        work = asyncio.create_task(self._run(scope, receive, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s), aclosing(_merged(self._generations)) as parts:
                if self._stream:
                    await self._send_events(parts, scope, receive, send)
                else:
                    await (await self._whole(parts))(scope, receive, send)

    async def _whole(self, parts: Parts) -> Response:
        async for prompt, message in parts:
            if isinstance(message, Refused):
                return self._error(prompt, message).response()
            self._writer.take(prompt, message)
        return Response(json.dumps(self._writer.whole(), ensure_ascii=False), media_type="application/json")

    async def _send_events(self, parts: Parts, scope: Scope, receive: Receive, send: Send) -> None:
        writer, started, end = self._writer, False, b""
        async for prompt, message in parts:
            if isinstance(message, Refused):
                error = self._error(prompt, message)
                if not started:
                    await error.response()(scope, receive, send)
                    return
                end = event_of(json.dumps(error.body()))
                break
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                self._pass_by(scope.get(CHUNKS))
            await send({"type": "http.response.body", "body": writer.event(prompt, message), "more_body": True})
        else:
            end = writer.last_event()
        await send({"type": "http.response.body", "body": end + b"data: [DONE]\n\n"})

    def _pass_by(self, chunks: Chunks | None) -> None:
        """Has plain tokens go straight to the connection, as long as it takes them."""
        if chunks is None or len(self._generations) > 1:
            return
        writer = self._writer

        def direct(index: int, token_ids: Sequence[int], text: str) -> bool:
            event = writer.token_event(index, len(token_ids), text) if chunks.ready else None
            if event is None:
                return False
            chunks.write(event)
            return True

        self._generations[0].outbox.pass_by(direct)

    def _error(self, prompt: int, refused: Refused) -> ApiError:
        return from_refused(refused, self._generations[prompt].admitted.request_id, self._writer.names(prompt))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(generations: Sequence[Generation]) -> Parts:
    """The messages of all generations as they come. A refusal of one is the last: the others are closed."""
    if len(generations) == 1:
        async with aclosing(generations[0].messages()) as messages:
            async for message in messages:
                yield 0, message
        return
    queue: asyncio.Queue[Part | None] = asyncio.Queue(MERGED_MESSAGES)

    async def pump(prompt: int, generation: Generation) -> None:
        async with aclosing(generation.messages()) as messages:
            async for message in messages:
                await queue.put((prompt, message))
        await queue.put(None)

    pumps = [asyncio.create_task(pump(prompt, generation)) for prompt, generation in enumerate(generations)]
    try:
        running = len(pumps)
        while running:
            part = await queue.get()
            if part is None:
                running -= 1
                continue
            yield part
            if isinstance(part[1], Refused):
                return
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)
