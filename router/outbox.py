"""What waits for the reader of one request's answer.

Owns: the order of messages, and that they take little room: a reader who is late finds fewer and larger ones.
Refuses to know: who reads, over what, and where the tokens come from.

    put --> [1 token][1 token] ... MAX_WAITING ... [MAX_MERGED_TOKENS tokens] ... [all since then] --> take

A reader who keeps up gets a message for each step of the worker. For one who does not, the messages of an output are
merged behind the first few; a merged one that is full is kept as bytes, about 8 for a token without log-probabilities.
So what waits is bounded by the length of the outputs, whatever the client does, and nothing waits for the client:
workers and other requests go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from baton.proto import inference_pb2 as inference
from baton.proto.messages import TokenLogprob

Direct = Callable[[int, Sequence[int], str], bool]
"""Takes an output's index, tokens and their text, or returns False."""

MAX_WAITING = 32
MAX_MERGED_TOKENS = 512


class Outbox:
    """See the module's drawing. Belongs to one event loop and has one reader."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._waiting: deque[inference.GenerateResponse | _Merged] = deque()
        self._growing: dict[int, _Merged] = {}
        self._reader: asyncio.Future[None] | None = None
        self._direct: Direct | None = None
        self._closed = False

    def put(
        self,
        index: int,
        first_index: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprob] = (),
        prompt_logprobs: Sequence[TokenLogprob] = (),
        finish: inference.Finish | None = None,
        goes_on: bool = False,
    ) -> None:
        """Adds what one output says next; its fields are those of `GenerateResponse`. After `close` it is dropped.

        `goes_on`: no end comes with it, which should be one message with the last tokens.
        """
        if self._closed:
            return
        if (
            goes_on
            and self._direct is not None
            # The reader waits in `take`: it has nothing in hand that would be overtaken, nor does anything wait here.
            and self._reader is not None
            and not self._reader.done()
            and not (logprobs or prompt_logprobs)
            and self._direct(index, token_ids, text)
        ):
            return
        if finish is not None and not token_ids and self._waiting:
            # An end right behind the last tokens joins them: who counts messages as tokens would count it as one.
            last = self._waiting[-1]
            if isinstance(last, inference.GenerateResponse) and last.index == index:
                last.text += text
                last.finish.CopyFrom(finish)
                return
        if len(self._waiting) < MAX_WAITING and index not in self._growing:
            message = inference.GenerateResponse(
                request_id=self._request_id,
                index=index,
                token_ids=token_ids,
                text=text,
                first_token_index=first_index,
            )
            if finish is not None:
                message.finish.CopyFrom(finish)
            if logprobs:
                message.logprobs.extend([entry.to_wire() for entry in logprobs])
            if prompt_logprobs:
                message.prompt_logprobs.extend([entry.to_wire() for entry in prompt_logprobs])
            self._waiting.append(message)
        else:
            self._merge(index, first_index).add(token_ids, text, logprobs, prompt_logprobs, finish)
        self._wake()

    def pass_by(self, direct: Direct) -> None:
        """From here on `direct` is offered what has only tokens and text whenever the reader has kept up, at once and
        without waking it: one who has passed it on by itself returns True."""
        self._direct = direct

    def close(self) -> None:
        """Nothing more comes. What waits can still be taken."""
        self._closed = True
        self._wake()

    async def take(self) -> inference.GenerateResponse | None:
        """The next message, or None at the end."""
        while not self._waiting:
            if self._closed:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        first = self._waiting.popleft()
        if not isinstance(first, _Merged):
            return first
        if self._growing.get(first.index) is first:
            del self._growing[first.index]
        return first.message()

    def __len__(self) -> int:
        return len(self._waiting)

    def _merge(self, index: int, first_index: int) -> _Merged:
        merged = self._growing.get(index)
        if merged is None or merged.is_full:
            merged = self._growing[index] = _Merged(self._request_id, index, first_index)
            self._waiting.append(merged)
        return merged

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Merged:
    """Several messages of one output as one."""

    def __init__(self, request_id: str, index: int, first_index: int) -> None:
        self.index = index
        self.is_full = False
        self._message = inference.GenerateResponse(request_id=request_id, index=index, first_token_index=first_index)
        # A string that grows within a message leaves all its earlier selves behind.
        self._texts: list[str] = []
        self._bytes = b""

    def add(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob],
        finish: inference.Finish | None,
    ) -> None:
        self._texts.append(text)
        self._message.token_ids.extend(token_ids)
        self._message.logprobs.extend([entry.to_wire() for entry in logprobs])
        self._message.prompt_logprobs.extend([entry.to_wire() for entry in prompt_logprobs])
        if finish is not None:
            self._message.finish.CopyFrom(finish)
        if len(self._message.token_ids) >= MAX_MERGED_TOKENS:
            self.is_full = True
            self._bytes = self.message().SerializeToString()
            self._message, self._texts = inference.GenerateResponse(), []

    def message(self) -> inference.GenerateResponse:
        if self._bytes:
            return inference.GenerateResponse.FromString(self._bytes)
        self._message.text = "".join(self._texts)
        return self._message
