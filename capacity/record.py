"""Frozen dataclasses as plain JSON and back.

Owns: the translation, by the types that the fields declare. What is not finite becomes a word, as JSON has no number
for it. Refuses to know: what the records mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RecordError(ValueError):
    """Data that is no such record."""


def to_plain(value: Any) -> Any:
    """What `json.dumps` takes. Fields that do not belong to equality are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value) if each.compare}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def from_plain(kind: type[Record], data: Any) -> Record:
    """The record; raises RecordError if a field is missing or of another kind."""
    try:
        found: Record = _read(kind, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"is no {kind.__name__}: {error!r}") from error
    return found


def digest(*values: Any) -> str:
    """A name for all of these values together: equal values, equal name."""
    text = json.dumps([to_plain(value) for value in values], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(kind: Any, data: Any) -> Any:
    origin = get_origin(kind)
    if origin is Union or origin is types.UnionType:
        (inner,) = (each for each in get_args(kind) if each is not type(None))
        return None if data is None else _read(inner, data)
    if origin is tuple:
        item = get_args(kind)[0]
        return tuple(_read(item, each) for each in data)
    if origin is dict:
        _, item = get_args(kind)
        return {key: _read(item, each) for key, each in data.items()}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        # What may be absent is, in records that are older than the field.
        names = [each.name for each in fields(kind) if each.init and (each.name in data or each.default is not None)]
        values = {name: _read(hints[name], data[name]) for name in names}
        make: Any = kind
        return make(**values)
    if kind is float:
        return _WORDS[data] if isinstance(data, str) else float(data)
    return kind(data)
