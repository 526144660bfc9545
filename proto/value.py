"""Values: dataclasses that are made by the thousand a second and that nobody writes to.

Owns: `value`. Refuses to know: what they say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A dataclass with slots that is frozen to the type checker: it lets nobody assign to a field.

    Where it runs, nothing checks that: `frozen=True` sets each field by a call, and takes five times as long to make
    one. For what a step, a leg or a placement makes several of; all others are frozen dataclasses.
    """
    return dataclass(slots=True)(cls)
