"""Grammars for tests, each with an oracle that does not know the grammar library: jsonschema, re, or a list."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import jsonschema

from baton.proto import inference_pb2 as inference

# Bounded, so that a model with random weights, which ends nothing by itself, comes to an end within some 200 tokens.
_NAME = {"type": "string", "maxLength": 6}


def _closed(**properties: dict) -> dict:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict] = {
    "object": _closed(name=_NAME, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"const": "x"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": _closed(o=_closed(p=_closed(q=_NAME, r={"type": "boolean"}))),
    "enum": {"enum": ["red", "green", 3, None, {"blue": [1, 2]}, "gr\u00fcn", "\U0001f600"]},
    "array": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, _NAME], "items": False, "minItems": 2},
    "ref": {
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "maximum": 99}, "y": {"$ref": "#/$defs/unit"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
            "unit": {"enum": ["mm", "cm"]},
        },
        "type": "array",
        "items": {"$ref": "#/$defs/point"},
        "minItems": 1,
        "maxItems": 2,
    },
    "recursive": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/leaf"}}},
                "required": ["v"],
                "additionalProperties": False,
            },
            "leaf": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        },
        "$ref": "#/$defs/tree",
    },
    "any of": {"anyOf": [{"type": "integer", "minimum": 100, "maximum": 200}, {"type": "boolean"}, _NAME]},
    "unicode": {
        "type": "object",
        "properties": {
            "\u00e9t\u00e9 \u2603": {"const": "\u4f60\u597d \U0001f44b\U0001f3fd"},
            'q"\\\n': {"type": "boolean"},
        },
        "required": ["\u00e9t\u00e9 \u2603", 'q"\\\n'],
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[a-f0-9]{4}(-[A-Z]{2}){1,2}$"},
    "format": _closed(d={"type": "string", "format": "date"}),
}
REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no|maybe)!{0,3}",
    r"[\u4e00-\u4e20]{2,5}",
    r"(ab|a)(c|bcd)?",
    r"-?[1-9][0-9]{0,5}",
]
CHOICES = ["a", "ab", "abc", 'say "hi"', "back\\slash", "two\nlines", "\u00fcber \U0001f680", "/slash/"]
LARK = 'start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{1,4}/'


@dataclass(frozen=True)
class Case:
    """`check` raises unless a text is what was asked for."""

    name: str
    grammar: inference.Grammar
    check: Callable[[str], None]


def _schema(name: str, schema: dict) -> Case:
    def check(text: str) -> None:
        jsonschema.validate(json.loads(text), schema)

    return Case(name, inference.Grammar(json_schema=json.dumps(schema)), check)


def _regex(pattern: str) -> Case:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text)

    return Case(pattern, inference.Grammar(regex=pattern), check)


def _chosen(text: str) -> None:
    assert text in CHOICES


def _listed(text: str) -> None:
    assert re.fullmatch(r"<[a-z]{1,4}(,[a-z]{1,4}){0,3}>", text)


CASES = [
    *(_schema(name, schema) for name, schema in SCHEMAS.items()),
    *(_regex(pattern) for pattern in REGEXES),
    Case("choices", inference.Grammar(choices=inference.Choices(texts=CHOICES)), _chosen),
    Case("lark", inference.Grammar(lark=LARK), _listed),
]
