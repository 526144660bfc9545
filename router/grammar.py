"""What a client asks of an output's form, in the grammar library's notation.

Owns: the translation of JSON schemas, expressions, Lark grammars and choices, their bounds, and the check that the
library can follow them. Refuses to know: tokens, models, and where the grammar is applied (`engine.grammar`).

    Grammar message --> size --> notation --> the library's validation --> str          for Sampling.grammar
                                                                           BadGrammar   what is wrong with it
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache

from llguidance import LLMatcher

from baton.proto import inference_pb2 as inference
from baton.proto.grammar import deep_thread, parser_limits

MAX_SCHEMA_BYTES = 65536
MAX_RULES_BYTES = 16384
"""Of an expression or a Lark grammar: their cost may grow with the square of their size."""

MAX_NESTED_REPEATS = 10_000
"""Of a repetition within a repetition, both counts multiplied: (x{1000}){1000} takes seconds for its first token, in
which a worker does nothing else. A single count may be larger."""

# Between two parts of a JSON text. Without a bound, a model that is lost can fill its whole output with blanks.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_VALIDATION_S = 30.0
_MAX_REASON_CHARS = 240
_REMEMBERED = 128

_COUNT = re.compile(r"\{(?=,?\d)(\d{1,9})?(?:,(\d{1,9})?)?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_IN_LARK = re.compile(r"/((?:\\.|[^/\\\n])+)/")


@dataclass(frozen=True, slots=True)
class BadGrammar:
    """Why a grammar cannot be followed: what it holds and what it may hold."""

    value: str
    bound: str


def translate(message: inference.Grammar) -> str | BadGrammar:
    """The grammar of a message whose kind is set. Safe from several threads; the same grammar is validated once.

    Takes about a millisecond, and up to half a second for the worst that a client can write.
    """
    match message.WhichOneof("kind"):
        case "json_schema":
            return _of_schema(message.json_schema)
        case "json_object" if message.json_object:
            return _of_schema('{"type":"object"}')
        case "json_object":
            return BadGrammar("false", "true, or absent")
        case "regex":
            return _of_rules(message.regex, LLMatcher.grammar_from_regex(message.regex), [message.regex])
        case "lark":
            expressions = _IN_LARK.findall(message.lark)
            return _of_rules(message.lark, LLMatcher.grammar_from_lark(message.lark), expressions)
        case "choices":
            return _of_choices(message.choices.texts)
    return BadGrammar("empty", "one of json_schema, json_object, regex, lark and choices")


def _of_schema(text: str) -> str | BadGrammar:
    if (size := len(text.encode())) > MAX_SCHEMA_BYTES:
        return BadGrammar(f"{size} bytes", f"at most {MAX_SCHEMA_BYTES} bytes")
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return BadGrammar(repr(text), f"a JSON Schema, as JSON ({error})")
    if not isinstance(schema, dict):
        return BadGrammar(repr(text), "a JSON object that holds a JSON Schema")
    if (repeats := max(map(nested_repeats, _patterns(schema)), default=1)) > MAX_NESTED_REPEATS:
        return _too_many(repeats)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
    except ValueError as error:
        return BadGrammar(repr(text), f"a JSON Schema that can be followed ({_reason(str(error))})")
    return _validated(text, grammar, "a JSON Schema that can be followed")


def nested_repeats(expression: str) -> int:
    """How often the innermost part of nested counted repetitions may come: 1000000 of (x{1000}){1000}, 1 of x{1000}.

    Reads the expression as far as that needs: groups, classes, escapes and counts.
    """
    deepest = 1
    groups = [1]  # the largest product of counts in each group that is open
    atom, position = 1, 0
    while position < len(expression):
        character = expression[position]
        count = _COUNT.match(expression, position) if character == "{" else None
        if count is not None:
            times = max(int(number) for number in count.groups() if number)
            if atom > 1:
                deepest = max(deepest, atom * times)
            atom *= times
            groups[-1] = max(groups[-1], atom)
            position = count.end()
            continue
        atom = 1
        if character == "(":
            groups.append(1)
        elif character == ")" and len(groups) > 1:
            atom = groups.pop()
            groups[-1] = max(groups[-1], atom)
        elif character == "[":
            # A bracket that comes first in a class stands for itself.
            end = _CLASS.match(expression, position)
            position = end.end() if end is not None else position + 1
            continue
        position += 2 if character == "\\" else 1
    return deepest


def _patterns(schema: object) -> Iterator[str]:
    """Every expression that a schema asks for, wherever it stands."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
            pattern, properties = part.get("pattern"), part.get("patternProperties")
            if isinstance(pattern, str):
                yield pattern
            if isinstance(properties, dict):
                yield from properties


def _too_many(repeats: int) -> BadGrammar:
    return BadGrammar(f"{repeats} repetitions within one another", f"at most {MAX_NESTED_REPEATS}, counts multiplied")


def _of_rules(text: str, grammar: str, expressions: Sequence[str]) -> str | BadGrammar:
    if not text:
        return BadGrammar(repr(text), "at least one character")
    if (size := len(text.encode())) > MAX_RULES_BYTES:
        return BadGrammar(f"{size} bytes", f"at most {MAX_RULES_BYTES} bytes")
    if (repeats := max(map(nested_repeats, expressions), default=1)) > MAX_NESTED_REPEATS:
        return _too_many(repeats)
    return _validated(text, grammar, "a grammar that can be followed")


def _of_choices(texts: Sequence[str]) -> str | BadGrammar:
    if not texts:
        return BadGrammar("empty", "at least one text")
    if (size := sum(len(text.encode()) for text in texts)) > MAX_SCHEMA_BYTES:
        return BadGrammar(f"{size} bytes", f"at most {MAX_SCHEMA_BYTES} bytes")
    # One terminal: as rules of their own, each text would be a lexeme, and none could be the beginning of another.
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    grammar = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
    return _validated(f"{len(texts)} texts", grammar, "texts that can be followed")


def _validated(text: str, grammar: str, bound: str) -> str | BadGrammar:
    fault = _fault(grammar)
    return BadGrammar(repr(text), f"{bound} ({fault})") if fault else grammar


@lru_cache(maxsize=_REMEMBERED)
def _fault(grammar: str) -> str:
    """What the library finds wrong; empty if it can follow the grammar."""
    task = _library().submit(LLMatcher.validate_grammar_with_warnings, grammar, limits=parser_limits())
    is_error, messages = task.result(_VALIDATION_S)
    return _reason(messages[0]) if is_error else ""


@cache
def _library() -> ThreadPoolExecutor:
    """The process's one thread for the library, made when it is first needed."""
    return deep_thread("grammar")


def _reason(message: str) -> str:
    """One line of what may be many; the library quotes the grammar."""
    line = " ".join(message.split())
    return line if len(line) <= _MAX_REASON_CHARS else line[: _MAX_REASON_CHARS - 3] + "..."


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
