"""Messages of generations as an OpenAI response: one body, or one server-sent event for each message.

Owns: what completions and chat completions have in common: ids, choices in order, usage, metrics, the end of a stream.
Refuses to know: what a choice looks like (`completions`, `chat`), sockets, and where messages come from.

A token's event is joined from parts that were made before: at a few thousand tokens a second nothing else would do.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.proto import inference_pb2 as inference
from baton.router.gateway import Generation
from baton.router.http.account import FINISH_REASONS, Account
from baton.router.http.logprobs import TokenWords
from baton.router.http.schema import GenerationRequest

quote = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_TOKEN_END = ',"finish_reason":null,"stop_reason":null}]'


@dataclass
class Choice:
    """One output of one prompt, as far as it has come."""

    index: int
    generation: Generation
    began: bool = False
    texts: list[str] = field(default_factory=list)
    logprobs: list[inference.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[inference.TokenLogprobs] = field(default_factory=list)
    finish: inference.Finish | None = None

    @property
    def stop_reason(self) -> str | None:
        return (self.finish.stop or None) if self.finish is not None else None


class Writer(ABC):
    """Of one request. `open` once, then `event` for each message and `last_event`, or `take` for each and `whole`."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, request_id: str, model: str, body: GenerationRequest, words: TokenWords) -> None:
        self.words = words
        self._body = body
        self._n = body.n or 1
        self._opening = {
            "id": f"{self.id_prefix}-{request_id}",
            "object": self.object_name,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        chunk_opening = quote({**self._opening, "object": self.chunk_name})
        self._head = f'data: {chunk_opening[:-1]},"choices":[{{"index":'
        self._continuous_usage = body.continuous_usage
        self._no_usage = ',"usage":null' if body.include_usage else ""
        self._choices: list[Choice] = []
        self._account = Account(())

    @abstractmethod
    def names(self, prompt: int) -> dict[str, str]:
        """What fields of GenerateRequest are called in this request, where that is not their last name."""

    @abstractmethod
    def part(self, choice: Choice, message: inference.GenerateResponse) -> str:
        """The JSON members with a message's text and log-probabilities."""

    @abstractmethod
    def plain(self, text: str) -> str | None:
        """`part` of a message with tokens and their text alone, of a choice that has begun; None where there is more
        to say."""

    @abstractmethod
    def members(self, choice: Choice) -> dict[str, Any]:
        """The same of a whole choice."""

    def finish_reason(self, choice: Choice) -> str | None:
        return FINISH_REASONS.get(choice.finish.reason) if choice.finish is not None else None

    def open(self, generations: Sequence[Generation]) -> None:
        """All prompts are admitted."""
        self._account = Account(generations, scored_only=getattr(self._body, "max_tokens", None) == 0)
        self._choices = [
            Choice(prompt * self._n + output, generation)
            for prompt, generation in enumerate(generations)
            for output in range(self._n)
        ]

    def event(self, prompt: int, message: inference.GenerateResponse) -> bytes:
        choice = self._choices[prompt * self._n + message.index]
        self._account.count(message)
        part = self.part(choice, message)
        choice.began = True
        end = _TOKEN_END
        if message.HasField("finish"):
            choice.finish = message.finish
            reason, stop = quote(self.finish_reason(choice)), quote(choice.stop_reason)
            end = f',"finish_reason":{reason},"stop_reason":{stop}}}]'
        return f"{self._head}{choice.index},{part}{end}{self._usage()}}}\n\n".encode()

    def token_event(self, index: int, num_tokens: int, text: str) -> bytes | None:
        """`event` of a message with these alone, of the only prompt; None if it has to be made by `event`."""
        choice = self._choices[index]
        part = self.plain(text) if choice.began else None
        if part is None:
            return None
        self._account.count_tokens(num_tokens)
        return f"{self._head}{choice.index},{part}{_TOKEN_END}{self._usage()}}}\n\n".encode()

    def _usage(self) -> str:
        """The member of each event, as far as it was asked for."""
        return ',"usage":' + self._account.running_usage if self._continuous_usage else self._no_usage

    def last_event(self) -> bytes:
        if not self._body.include_usage:
            return b""
        return event_of(quote({**self._opening, "object": self.chunk_name, "choices": [], **self._ending()}))

    def take(self, prompt: int, message: inference.GenerateResponse) -> None:
        choice = self._choices[prompt * self._n + message.index]
        self._account.count(message)
        choice.texts.append(message.text)
        choice.logprobs += message.logprobs
        choice.prompt_logprobs += message.prompt_logprobs
        if message.HasField("finish"):
            choice.finish = message.finish

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                **self.members(choice),
                "finish_reason": self.finish_reason(choice),
                "stop_reason": choice.stop_reason,
                "prompt_logprobs": self._prompt_logprobs(choice),
            }
            for choice in self._choices
        ]
        return {**self._opening, "choices": choices, **self._ending()}

    def _ending(self) -> dict[str, Any]:
        return {"usage": self._account.usage(), "metrics": self._account.metrics()}

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None] | None:
        if self._body.prompt_logprobs is None:
            return None
        return [None, *map(self.words.by_id, choice.prompt_logprobs)]


def event_of(data: str) -> bytes:
    """A server-sent event of one line of data."""
    return f"data: {data}\n\n".encode()
