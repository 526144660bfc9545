"""How tests ask a cluster for tokens, wait for things to happen, and find a port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.proto import inference_pb2 as inference


@dataclass
class Answer:
    """What came back: every token once, in order, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: inference.Finish | None = None
    logprobs: list[inference.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[inference.TokenLogprobs] = field(default_factory=list)


def request(prompt: Sequence[int], max_tokens: int, **fields) -> inference.GenerateRequest:
    """A request for exactly `max_tokens` greedy tokens; `sampling_*` fields go into the sampling parameters."""
    sampling = {
        name.removeprefix("sampling_"): fields.pop(name) for name in list(fields) if name.startswith("sampling_")
    }
    return inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=prompt),
        sampling=inference.SamplingParams(
            **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling}
        ),
        **fields,
    )


async def answer(stub, message: inference.GenerateRequest, timeout: float = 60.0) -> Answer:
    """The whole answer; asserts that token indices have neither gap nor repeat and that there is one end."""
    result = Answer()
    start = len(message.resume_token_ids)
    async for part in stub.Generate(message, timeout=timeout):
        assert result.finish is None, "a message came after the last one"
        assert part.first_token_index == start + len(result.tokens)
        result.tokens += part.token_ids
        result.text += part.text
        result.logprobs += part.logprobs
        result.prompt_logprobs += part.prompt_logprobs
        if part.HasField("finish"):
            result.finish = part.finish
    assert result.finish is not None, "the stream ended without a last message"
    return result


async def until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> object:
    """Waits until a condition (a function or a coroutine function) is true; returns its value."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come within {timeout_s} s"
        await asyncio.sleep(0.002)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
