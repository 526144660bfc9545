"""From untrusted mappings to frozen dataclasses, by the types and bounds that their fields declare.

Owns: every check of a single value, and the wording of a complaint: the key's full path, the value, the bound, and the
key that was probably meant.
Refuses to know: which settings there are, and which of them go together (`router.config`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

Settings = TypeVar("Settings")


class ConfigError(Exception):
    """What is wrong with the configuration. `key` is the full path, `problem` names the value and the bound."""

    def __init__(self, key: str, problem: str, source: str = "") -> None:
        self.key = key
        self.problem = problem
        self.source = source
        place = " ".join(part for part in (f"{source}:" if source else "", key) if part)
        super().__init__(f"{place} {problem}".strip())


def read_yaml(path: Path) -> object:
    """The contents of a YAML file; a key given twice is an error, not the last one's victory."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError("", f"cannot be read: {error.strerror}", str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("", f"is not YAML: {error}", str(path)) from error


def as_section(data: object, path: str) -> Mapping[str, Any]:
    """A mapping whose keys are strings; an empty section is one without keys."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(path, f"is {_shown(data)}, must be a mapping")
    for key in data:
        if not isinstance(key, str):
            raise ConfigError(path, f"has the key {_shown(key)}, which must be a string: write it in quotes")
    return data


def subsection(data: object, key: str, path: str) -> Mapping[str, Any]:
    """The mapping under a key that must be there. `path` is that of the key."""
    if not isinstance(data, Mapping) or key not in data:
        close = close_to(key, data) if isinstance(data, Mapping) else None
        raise ConfigError(path, "is missing" + (f"; was {close} meant to be it?" if close else ""))
    return as_section(data[key], path)


def refuse_unknown(section: Iterable[str], known: Collection[str], path: str) -> None:
    for key in section:
        if key not in known:
            hint = suggestion(key, known) or f"; known are {', '.join(known)}"
            raise ConfigError(f"{path}.{key}", f"is not a setting{hint}")


def filled(base: Settings, data: object, path: str) -> Settings:
    """`base` with the values of a section, each checked. `base` is a dataclass instance: it holds the defaults."""
    section = as_section(data, path)
    cls: Any = type(base)
    refuse_unknown(section, [each.name for each in fields(cls)], path)
    changed = {key: checked_field(cls, key, value, f"{path}.{key}") for key, value in section.items()}
    result: Settings = replace(base, **changed)  # type: ignore[type-var]
    return result


def checked_field(cls: type, name: str, value: object, path: str) -> Any:
    """The value, if the dataclass's field of that name may hold it. A whole number is good where a float is due."""
    (declared,) = (each for each in fields(cls) if each.name == name)
    expected = get_type_hints(cls)[name]
    if expected in (int, float):
        return checked_number(value, expected, path, declared.metadata.get("minimum"), declared.metadata.get("maximum"))
    if type(value) is not expected:
        raise ConfigError(path, f"is {_shown(value)}, must be {_KINDS[expected]}")
    choices = declared.metadata.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(path, f"is {_shown(value)}, must be one of {', '.join(choices)}{suggestion(value, choices)}")
    if value == "" and _required_text(declared):
        raise ConfigError(path, "is empty")
    return value


def checked_number(
    value: object, kind: type, path: str, minimum: float | None = None, maximum: float | None = None
) -> Any:
    """An `int` or a `float` within bounds, both ends included. True and False are no numbers."""
    whole = type(value) is int
    if not whole and not (kind is float and isinstance(value, float)):
        raise ConfigError(path, f"is {_shown(value)}, must be {_KINDS[kind]}")
    number: int | float = value if kind is int else float(value)  # type: ignore[assignment, arg-type]
    if not math.isfinite(number):
        raise ConfigError(path, f"is {_shown(value)}, must be finite")
    if minimum is not None and number < minimum:
        raise ConfigError(path, f"is {_shown(value)}, must be at least {minimum:g}")
    if maximum is not None and number > maximum:
        raise ConfigError(path, f"is {_shown(value)}, must be at most {maximum:g}")
    return number


def suggestion(given: object, known: Iterable[object]) -> str:
    """'; did you mean ...?', or nothing."""
    close = close_to(given, known)
    return f"; did you mean {close}?" if close else ""


def close_to(given: object, known: Iterable[object]) -> str | None:
    """The known name that is spelled most like the given one, if any is."""
    spelled = {str(name).casefold(): str(name) for name in known}
    close = difflib.get_close_matches(str(given).casefold(), spelled, n=1, cutoff=0.6)
    return spelled[close[0]] if close else None


_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_MAX_SHOWN = 60


def _required_text(declared: Field[Any]) -> bool:
    return declared.default is not MISSING and declared.default != ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)
