"""A request as a Python call, and the message that it becomes.

Owns: the names that a caller may give, and the id and seed that every attempt at one request shares.
Refuses to know: which values are allowed. The router names each fault, and it alone knows the model.
"""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from baton.client.errors import InvalidRequest, Violation
from baton.proto import inference_pb2 as inference


class RequestOptions(TypedDict, total=False):
    """What may be said about a request besides its prompt.

    `ttft_ms` and `tpot_ms` are its service-level objectives. From `temperature` on these are the fields of
    SamplingParams; what is absent takes the default documented in inference.proto. The last five say what the output
    must look like, and at most one of them may be given; a JSON schema is JSON or what becomes it.
    """

    request_id: str
    priority: int
    ttft_ms: float
    tpot_ms: float
    session_id: str
    cache_salt: str
    adapter: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int
    logprobs: int
    prompt_logprobs: int
    logit_bias: Mapping[int, float]
    n: int
    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    lark: str
    choices: Sequence[str]


_REQUEST_FIELDS = frozenset({"request_id", "priority", "session_id", "cache_salt", "adapter"})
_SLO_FIELDS = frozenset({"ttft_ms", "tpot_ms"})
_GRAMMAR_FIELDS = frozenset({"json_schema", "json_object", "regex", "lark", "choices"})


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[Mapping[str, str]] | None,
    options: RequestOptions,
) -> inference.GenerateRequest:
    """The message for exactly one of a text, token ids and chat messages.

    Raises InvalidRequest, with the name, for a value that no message can carry.
    """
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise TypeError("a request takes exactly one of prompt, token_ids and messages")
    if len(_GRAMMAR_FIELDS.intersection(options)) > 1:
        raise TypeError(f"a request takes at most one of {', '.join(sorted(_GRAMMAR_FIELDS))}")
    request = inference.GenerateRequest()
    with _named("prompt"):
        if prompt is not None:
            request.text = prompt
        if token_ids is not None:
            request.token_ids.CopyFrom(inference.TokenIds(ids=token_ids))
        if messages is not None:
            turns = [inference.ChatMessage(role=message["role"], content=message["content"]) for message in messages]
            request.chat.CopyFrom(inference.Chat(messages=turns))
    for name, value in options.items():
        with _named(name):
            if name in _REQUEST_FIELDS:
                setattr(request, name, value)
            elif name in _SLO_FIELDS:
                setattr(request.slo, name, value)
            elif name in _GRAMMAR_FIELDS:
                request.sampling.grammar.CopyFrom(_grammar(name, value))
            else:
                field: dict[str, Any] = {name: value}
                request.sampling.MergeFrom(inference.SamplingParams(**field))
    if not request.request_id:
        request.request_id = str(uuid.uuid4())
    if not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(63)
    return request


def _grammar(name: str, value: Any) -> inference.Grammar:
    if name == "choices":
        return inference.Grammar(choices=inference.Choices(texts=value))
    if name == "json_schema" and not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    field: dict[str, Any] = {name: value}
    return inference.Grammar(**field)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Names the argument whose value is of the wrong type, out of range, or text that is not Unicode."""
    try:
        yield
    except (ValueError, TypeError) as error:
        problem = "is not valid Unicode" if isinstance(error, UnicodeError) else str(error)
        raise InvalidRequest(f"{name}: {problem}", (Violation(name, f"{name}: {problem}"),)) from error
