"""The API's own description at /openapi.json.

Owns: what it says of bodies, answers and errors. Refuses to know: what routes do.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from baton.router.http import schema

_REF = "#/components/schemas/{model}"
_REQUESTS: list[type[BaseModel]] = [
    schema.CompletionRequest,
    schema.ChatCompletionRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
]
_ERRORS = {
    400: "The request is malformed, or asks for what this model cannot do.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    408: "The request's deadline has passed.",
    409: "A request of this X-Request-Id is in progress.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many requests, or too many waiting ones: try again after Retry-After seconds.",
    500: "An unexpected error, with the request's id.",
    503: "Nobody is there to answer.",
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def route(body: type[BaseModel] | None, summary: str, *, streamed: bool = False) -> dict[str, Any]:
    """Arguments of a route's decorator, for one whose body is read by the route itself."""
    statuses = list(_ERRORS) if body is not None else [401, 404, 500, 503]
    good: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streamed:
        good["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    extra: dict[str, Any] = {}
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
        extra["requestBody"] = {"required": True, "content": content}
    return {
        "summary": summary,
        "response_model": None,
        "openapi_extra": extra,
        "responses": {
            200: {
                "description": "The answer, as events if the request says so." if streamed else "The answer.",
                "content": good,
            },
            **{status: {"description": _ERRORS[status], "content": error} for status in statuses},
        },
    }


def describe(app: FastAPI) -> None:
    """Makes the application serve the description, made when it is first asked for."""

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _description(app)
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign] # the framework's own way


def _description(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, models = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas |= models.get("$defs", {}) | {"Error": _ERROR}
    return document
