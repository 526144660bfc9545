"""A protocol message as the plain values that JSON is made of.

Owns: that field names stay as they are and that numbers stay numbers, also those of 64 bits.
Refuses to know: which messages there are.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Every field: those at their defaults included, absent messages and absent optional values as None."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            values[field.name] = None
        elif field.message_type is None:
            values[field.name] = list(value) if field.is_repeated else value
        else:
            values[field.name] = [plain(one) for one in value] if field.is_repeated else plain(value)
    return values
