"""An OpenAI request in the words of `GenerateRequest`.

Owns: which field becomes which. Refuses to know: defaults and bounds (`router.admission`), and responses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from baton.proto import inference_pb2 as inference
from baton.router.http.errors import ApiError
from baton.router.http.schema import GenerationRequest, Json, Message

_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
    "n",
)

_GRAMMAR_NAMES = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "response_format",
)


def sampling_of(body: GenerationRequest) -> inference.SamplingParams:
    """All but `max_tokens` and `logprobs`, which the endpoints read differently."""
    sampling = inference.SamplingParams(
        **{name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None},
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
    )
    if body.logit_bias:
        for token_id, bias in body.logit_bias.items():
            sampling.logit_bias[int(token_id)] = bias
    grammar = _grammar_of(body)
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar)
    return sampling


def grammar_name(body: GenerationRequest) -> str:
    """The field of the body that says what the output must look like; admission's faults are its own."""
    return next((name for name in _GRAMMAR_NAMES if getattr(body, name) is not None), "response_format")


def chat_of(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    arguments: dict[str, Any] | None,
    continues: bool,
) -> inference.Chat:
    chat = inference.Chat(
        messages=[
            inference.ChatMessage(
                role=message.role,
                content=message.text,
                name=message.name or "",
                tool_call_id=message.tool_call_id or "",
                tool_calls=json.dumps(message.tool_calls) if message.tool_calls else "",
            )
            for message in messages
        ],
        tools=json.dumps(tools) if tools else "",
        template_arguments=json.dumps(arguments) if arguments else "",
    )
    if continues:
        chat.add_generation_prompt = False
    return chat


def _grammar_of(body: GenerationRequest) -> inference.Grammar | None:
    grammars = [grammar for grammar in (_of_format(body), _of_structured(body), *_of_guided(body)) if grammar]
    if len(grammars) > 1:
        name = grammar_name(body)
        raise ApiError(400, f"{name} is given, must be the only one of {', '.join(_GRAMMAR_NAMES)}", name)
    return grammars[0] if grammars else None


def _of_format(body: GenerationRequest) -> inference.Grammar | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return inference.Grammar(json_object=True)
    return inference.Grammar(json_schema=json.dumps(wanted.json_schema.schema_))


def _of_structured(body: GenerationRequest) -> inference.Grammar | None:
    wanted = body.structured_outputs
    if wanted is None:
        return None
    if wanted.json_ is not None:
        return inference.Grammar(json_schema=_text(wanted.json_))
    if wanted.regex is not None:
        return inference.Grammar(regex=wanted.regex)
    if wanted.choice is not None:
        return inference.Grammar(choices=inference.Choices(texts=wanted.choice))
    if wanted.grammar is not None:
        return inference.Grammar(lark=wanted.grammar)
    return inference.Grammar(json_object=True)


def _of_guided(body: GenerationRequest) -> list[inference.Grammar]:
    """vLLM's older form."""
    grammars: list[inference.Grammar] = []
    if body.guided_json is not None:
        grammars.append(inference.Grammar(json_schema=_text(body.guided_json)))
    if body.guided_regex is not None:
        grammars.append(inference.Grammar(regex=body.guided_regex))
    if body.guided_choice is not None:
        grammars.append(inference.Grammar(choices=inference.Choices(texts=body.guided_choice)))
    if body.guided_grammar is not None:
        grammars.append(inference.Grammar(lark=body.guided_grammar))
    return grammars


def _text(schema: Json) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
