"""What HTTP clients may send: the OpenAI API's requests, with the fields that vLLM has added.

Owns: types, bounds and the OpenAPI description of every request. Refuses to know: what becomes of a request. What
depends on the model (lengths, vocabulary) is checked by `router.admission`, for both faces alike.

Unknown fields are ignored: clients send what other servers know. Types are strict, so that `true` is no number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from baton.router.admission import MAX_LOGPROBS, MAX_OUTPUTS, MAX_STOP_CHARS, MAX_STOP_STRINGS

MAX_PROMPTS = 1024
MAX_MESSAGES = 65536
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _kind(value: object) -> str:
    """Which of several types a value means to be, so that a fault is reported once, for that type."""
    if isinstance(value, list):
        first = value[0] if value else None
        if isinstance(first, list):
            return "<token lists>"
        return "<tokens>" if isinstance(first, int) else "<list>"
    return "<text>"


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: str | None = Field(None, max_length=1024)


# --- what an output must look like ----------------------------------------------------------------------------------

Json = dict[str, Any] | str


class JsonSchemaFormat(BaseModel):
    """`schema` is a JSON Schema. `name`, `description` and `strict` are accepted and change nothing."""

    model_config = ConfigDict(strict=True)

    # `schema` is a method of BaseModel.
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "json_schema is missing, must be an object with the member schema")
        return self


class StructuredOutputs(BaseModel):
    """vLLM's form: exactly one of these."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    json_: Json | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, min_length=1, max_length=MAX_PROMPTS)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(value is not None for value in given) != 1:
            raise PydanticCustomError("one_of", "exactly one of json, regex, choice, grammar and json_object is needed")
        return self


# --- generation -----------------------------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Request):
    """What completions and chat completions have in common."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    min_tokens: Count | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag("<text>")]
            | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS), Tag("<list>")],
            Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>"),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), le=INT64_MAX)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    logit_bias: (
        dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
        | None
    ) = None
    n: int | None = Field(None, ge=1, le=MAX_OUTPUTS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), le=INT32_MAX)
    cache_salt: str | None = None
    session_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, min_length=1, max_length=MAX_PROMPTS
    )
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> GenerationRequest:
        if self.stream and self.prompt_logprobs is not None:
            raise PydanticCustomError("together", "prompt_logprobs cannot be streamed: leave stream out")
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("together", "stream_options is given, but stream is not true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


Prompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("<list>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("<token lists>")],
    Discriminator(_kind),
]


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    max_tokens: Count | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_OUTPUTS)
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _is_served(self) -> CompletionRequest:
        if self.suffix:
            raise PydanticCustomError("unserved", "suffix is given, must be absent: inserting text is not served")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError(
                "unserved", "best_of is {value}, must be n, which is {n}", {"value": self.best_of, "n": self.n or 1}
            )
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("together", "max_tokens is 0, must be at least 1 unless echo is true")
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(fail_fast=True, max_length=4096), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>"),
]


class Message(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    role: str = Field(max_length=64)
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class ChatCompletionRequest(GenerationRequest):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _is_served(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("together", "top_logprobs is given, but logprobs is not true")
        if self.tool_choice not in (None, "none", "auto"):
            raise PydanticCustomError(
                "unserved",
                "tool_choice must be none or auto: the model's template sees the tools, but no call is forced",
            )
        _check_turn(self.add_generation_prompt, self.continue_final_message)
        return self


def _check_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    if continue_final_message and add_generation_prompt:
        raise PydanticCustomError(
            "together", "add_generation_prompt and continue_final_message are both true, must be one of them"
        )
    if add_generation_prompt is False and not continue_final_message:
        raise PydanticCustomError(
            "together", "add_generation_prompt is false, must be true unless continue_final_message is true"
        )


# --- tokens ---------------------------------------------------------------------------------------------------------


class TokenizeRequest(_Request):
    """A prompt, or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_of", "exactly one of prompt and messages is needed")
        _check_turn(self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeRequest(_Request):
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
