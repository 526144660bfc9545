"""Text to token ids and back, by the files that lie beside a model's weights.

Owns: reading `tokenizer.json`, `tokenizer_config.json`, the chat template and the two config files; the sandbox that a
template runs in; the ids that end a sequence.
Refuses to know: requests, streams (`router.detokenizer`) and what a prompt may contain (`router.admission`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Names that a template is given anyway, which a client's own arguments may not replace.
RESERVED_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})
# Stands behind a message that is to be continued: what the template writes after it is cut off.
_END_OF_MESSAGE = "\ue0f1\ue0f2\ue0f3"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A model directory whose tokenizer cannot be used; the message names the file."""


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`tool_calls`: what the assistant wanted to be called, as the OpenAI API has it."""

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()

    def for_template(self) -> dict[str, Any]:
        """What a template reads: members that are empty are not there, for templates ask whether they are."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("name", "tool_call_id"):
            if value := getattr(self, name):
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given. `continues`: the model goes on with the last message, and begins none."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads.

    `vocab_size` is the width of the model's output, which may exceed the number of ids that have text.
    `max_position_embeddings` is None where the model's files do not tell.
    """

    def __init__(self, model_dir: Path) -> None:
        file = model_dir / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{file} does not exist: a model directory needs a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            # The library raises nothing narrower for a malformed file.
            raise TokenizerError(f"{file} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _read_json(model_dir / "tokenizer_config.json")
        config = _read_json(model_dir / "config.json")
        text_config = config.get("text_config", config)
        generation_config = _read_json(model_dir / "generation_config.json")

        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = int(text_config.get("vocab_size") or max(vocabulary.values()) + 1)
        self.max_position_embeddings: int | None = text_config.get("max_position_embeddings")
        self._named_tokens = {name: _content(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name)}
        eos = _ids(generation_config.get("eos_token_id"))
        eos = eos or _ids(config.get("eos_token_id")) or _ids(text_config.get("eos_token_id"))
        named_eos = vocabulary.get(self._named_tokens.get("eos_token", ""))
        self.eos_token_ids = tuple(sorted({*eos, *([named_eos] if named_eos is not None else [])}))
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._text_ids = frozenset(vocabulary.values()) - self._special_ids
        self._texts: dict[int, str] = {}
        self._longest_token_chars = max(map(len, vocabulary))
        self.is_byte_level = _is_byte_level(json.loads(self._tokenizer.to_str())["decoder"])
        self._template = _template(model_dir, settings)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text prompt, with the special tokens that the model puts around one."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids. Ids that have no text, because the model's output is wider, add nothing."""
        if any(token_id < 0 for token_id in token_ids):
            raise ValueError(f"a token id is negative: {min(token_ids)}")
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token, special or not, adds to a text. It may be part of a character; nothing for an unknown id."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self.is_byte_level:
            return bytes(_BYTES[character] for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def text_of(self, token_id: int) -> str:
        """The text of one token by itself, kept for the next time it is asked for; empty if it has none."""
        text = self._texts.get(token_id)
        if text is None:
            if token_id not in self._text_ids:
                return ""
            text = self._texts[token_id] = self.decode((token_id,))
        return text

    def has_text(self, token_id: int) -> bool:
        """Whether `decode`, skipping special tokens, gives this id a say in the text."""
        return token_id in self._text_ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on `len(encode(text))` that costs nothing: no token has more characters than the longest.
        Characters that the vocabulary cannot write at all are the exception."""
        return len(text) // self._longest_token_chars

    def render(self, conversation: Conversation) -> str:
        """The prompt text that the model's template makes of a conversation, ready for the assistant's words."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: send text or token ids")
        messages = list(conversation.messages)
        if conversation.continues:
            messages[-1] = replace(messages[-1], content=messages[-1].content + _END_OF_MESSAGE)
        names = {
            "documents": None,
            **self._named_tokens,
            **conversation.arguments,
            "messages": [message.for_template() for message in messages],
            "tools": conversation.tools,
            "add_generation_prompt": not conversation.continues,
        }
        try:
            text = self._template.render(names)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error.message}") from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template fails on these messages: {error}") from error
        if not conversation.continues:
            return text
        text, mark, _ = text.rpartition(_END_OF_MESSAGE)
        if not mark:
            raise ChatTemplateError("the model's chat template hides the last message, which therefore cannot go on")
        return text

    def encode_chat(self, text: str) -> list[int]:
        """The ids of what a template has rendered. It writes its own special tokens, so none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def render_chat(self, messages: Iterable[ChatMessage]) -> str:
        """The prompt text of a plain conversation."""
        return self.render(Conversation(tuple(messages)))

    def apply_chat_template(self, messages: Iterable[ChatMessage]) -> list[int]:
        """The ids of a plain conversation."""
        return self.encode_chat(self.render_chat(messages))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold a JSON object")
    return content


def _content(token: str | Mapping[str, Any]) -> str:
    """A special token is written as its text, or as an object that describes it."""
    return token if isinstance(token, str) else str(token["content"])


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """Whether tokens are byte strings that are joined and read as UTF-8, and nothing else is done to them."""
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for: bytes that print stand for themselves, the
    others, in order, for the characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call whose arguments, which travel as JSON in a text, are the object that templates expect."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _template(model_dir: Path, settings: Mapping[str, Any]) -> jinja2.Template | None:
    """The file comes before the settings; of several named templates, the one named `default`."""
    file = model_dir / "chat_template.jinja"
    source: Any = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    try:
        return _sandbox().from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template of {model_dir} is not valid Jinja: {error.message}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardedNamespace(Namespace):
    """A namespace without underscore attributes: templates come with models and are not trusted."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sandbox() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_GuardedNamespace
    )
    return environment
