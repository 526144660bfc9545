"""Errors in the form that OpenAI clients read: a status, and {"error": {"message", "type", "param", "code"}}.

Owns: which status, type and code a refusal has, and what a field of `GenerateRequest` is called in the OpenAI API.
Refuses to know: what caused it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from baton.router.gateway import Refused
from baton.router.journey import Trouble

MAX_SHOWN_CHARS = 80
MAX_SHOWN_FAULTS = 8

_STATUS = {
    Trouble.INVALID: 400,
    Trouble.NOT_FOUND: 404,
    Trouble.DEADLINE: 408,
    Trouble.EXISTS: 409,
    Trouble.OVERLOADED: 429,
    Trouble.INTERNAL: 500,
    Trouble.UNAVAILABLE: 503,
}
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "deadline_exceeded",
    409: "request_in_progress",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "service_unavailable",
}


@dataclass
class ApiError(Exception):
    """What a client is told instead of an answer. `param` is the field at fault, in the client's words."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        server = self.status >= 500
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error" if server else "invalid_request_error"),
                "param": self.param,
                "code": self.code or _CODES.get(self.status),
            }
        }

    def response(self) -> Response:
        content = json.dumps(self.body(), ensure_ascii=False).encode()
        return Response(content, self.status, self.headers, media_type="application/json")


def retry_after(seconds: float | None) -> dict[str, str]:
    """The header, in whole seconds: less than one would be none."""
    return {"Retry-After": str(max(1, math.ceil(seconds or 0.0)))}


def from_refused(refused: Refused, request_id: str, names: dict[str, str]) -> ApiError:
    """`names`: what fields of GenerateRequest are called here, where that is not their last name."""
    status = _STATUS[refused.trouble]
    if refused.violations:
        faults = [(_named(violation.field, names), violation) for violation in refused.violations]
        message = "; ".join(f"{name} is {fault.value}, must be {fault.bound}" for name, fault in faults)
        return ApiError(status, message, param=faults[0][0])
    if refused.trouble is Trouble.INTERNAL:
        return ApiError(status, f"request {request_id}: {refused.message}")
    if refused.trouble in (Trouble.OVERLOADED, Trouble.UNAVAILABLE):
        return ApiError(status, refused.message, headers=retry_after(refused.retry_after_s))
    return ApiError(status, refused.message)


def from_validation(error: ValidationError) -> ApiError:
    """The faults of a body, each with its field, bound and value; the first names `param`."""
    faults = error.errors(include_url=False, include_context=False)[:MAX_SHOWN_FAULTS]
    shown = []
    for fault in faults:
        path = _path(fault["loc"])
        text = fault["msg"]
        if fault["type"] == "missing" and path:
            text = "is missing"
        elif path:
            text = f"is {_shown(fault['input'])}, {_bound(text)}"
        shown.append(f"{path} {text}" if path else text)
    first = faults[0]
    # A rule about several fields begins with the name of the one that it is about.
    param = _path(first["loc"]) or (first["msg"].split(" ", 1)[0] if first["type"] in _RULES else None)
    return ApiError(400, "; ".join(shown), param=param)


_RULES = ("together", "unserved")


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`, without the marks of which type of a union, or that a key, was meant."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<") and part != "[key]":
            path += f".{part}" if path else part
    return path


def _bound(message: str) -> str:
    """`Input should be less than 3` as `must be less than 3`."""
    text = message.removeprefix("Input should ").removeprefix("Value should ")
    return f"must {text}" if text != message else text[:1].lower() + text[1:]


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def _named(path: str, names: dict[str, str]) -> str:
    """The OpenAI name of a field: the longest name that is known, then the rest of the path."""
    for known in sorted(names, key=len, reverse=True):
        if path == known or path.startswith((known + ".", known + "[")):
            return names[known] + path[len(known) :]
    return path.removeprefix("sampling.").removeprefix("chat.")
