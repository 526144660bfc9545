"""The HTTP face: one ASGI application with the OpenAI API, health, metrics and the status page.

Owns: which route leads where, and its description in /openapi.json. Refuses to know: what becomes of a request
(`gateway`), who may come in (`door`), how answers are written (`writer`).
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from baton import __version__
from baton.router.allowance import Allowance
from baton.router.cluster import Workforce
from baton.router.gateway import Gateway
from baton.router.http import chat, completions, openapi, tokens
from baton.router.http.answer import answer
from baton.router.http.cluster_page import cluster_routes
from baton.router.http.door import Door, call_of, visit_of
from baton.router.http.errors import ApiError
from baton.router.http.health import Health
from baton.router.http.limits import BodyReader
from baton.router.http.logprobs import TokenWords
from baton.router.http.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from baton.router.keys import Keyring
from baton.router.router import Router


def create_app(
    router: Router, gateway: Gateway, workforce: Workforce, allowance: Allowance, keys: Keyring | None = None
) -> FastAPI:
    """The application of one router. Without `keys` it is open to all."""
    settings = router.config.router
    app = FastAPI(
        title="Baton",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Requests are traced by the router, which knows their stages.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    _add_api(app, router, gateway)
    _add_tokens(app, router)
    _add_health(app, router)
    app.include_router(cluster_routes(router, workforce))
    # Here /metrics is added.
    _add_errors(app)
    app.add_middleware(Door, keys=keys, allowance=allowance)
    origins = [origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()]
    if origins:
        # Outside the door, so that pages can read refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    openapi.describe(app)
    return app


def _add_api(app: FastAPI, router: Router, gateway: Gateway) -> None:
    bodies = BodyReader(router.config.router.max_message_mib << 20)
    words = TokenWords(router.tokenizer)

    @app.post(
        "/v1/completions", **openapi.route(CompletionRequest, "Completes prompts of text or tokens.", streamed=True)
    )
    async def complete(request: Request) -> Response:
        body = await bodies.read(request, CompletionRequest)
        _check_model(router, body.model)
        request_id = visit_of(request).request_id
        requests = await completions.requests_of(body, request_id, router.tokenizer, router.limits())
        writer = completions.CompletionWriter(request_id, router.model_name, body, words)
        return await answer(gateway, requests, call_of(request), writer, bool(body.stream))

    @app.post("/v1/chat/completions", **openapi.route(ChatCompletionRequest, "Answers a conversation.", streamed=True))
    async def converse(request: Request) -> Response:
        body = await bodies.read(request, ChatCompletionRequest)
        _check_model(router, body.model)
        request_id = visit_of(request).request_id
        writer = chat.ChatWriter(request_id, router.model_name, body, words)
        requests = [chat.request_of(body, request_id)]
        return await answer(gateway, requests, call_of(request), writer, bool(body.stream))

    created = int(time.time())

    @app.get("/v1/models", **openapi.route(None, "The models that are served: one."))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(router, created)]}

    @app.get("/v1/models/{name:path}", **openapi.route(None, "One model."))
    async def model(name: str) -> dict[str, Any]:
        _check_model(router, name)
        return _model(router, created)


def _add_tokens(app: FastAPI, router: Router) -> None:
    bodies = BodyReader(router.config.router.max_message_mib << 20)

    @app.post("/tokenize", **openapi.route(TokenizeRequest, "The tokens of a prompt or a conversation."))
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, TokenizeRequest)
        _check_model(router, body.model)
        return await tokens.tokenize(body, router.tokenizer, router.limits())

    @app.post("/detokenize", **openapi.route(DetokenizeRequest, "The text of tokens."))
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await bodies.read(request, DetokenizeRequest)
        _check_model(router, body.model)
        return await tokens.detokenize(body, router.tokenizer, router.limits())


def _add_health(app: FastAPI, router: Router) -> None:
    health_of_router = Health(router)
    router.observers.add(health_of_router)

    @app.get("/health", **openapi.route(None, "Whether a request that came now would be answered."))
    async def health() -> Response:
        faults = health_of_router.faults()
        return JSONResponse({"status": "unhealthy" if faults else "ok", "reasons": faults}, 503 if faults else 200)

    @app.get("/version", **openapi.route(None, "This server's version."))
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _check_model(router: Router, name: str | None) -> None:
    if name and name not in (router.model_name, router.config.model):
        message = f"model is {name!r:.200}, must be {router.model_name!r}, the one that is served here"
        raise ApiError(404, message, "model", "model_not_found")


def _model(router: Router, created: int) -> dict[str, Any]:
    return {
        "id": router.model_name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "root": router.config.model,
        "parent": None,
        "max_model_len": router.limits().max_tokens,
        "vocab_size": router.limits().vocab_size,
    }


def _add_errors(app: FastAPI) -> None:
    """Every error has the OpenAI form, also those of the framework."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def unserved(request: Request, error: HTTPException) -> Response:
        message = (
            f"{request.method} {request.url.path} is not served here"
            if error.status_code in (404, 405)
            else error.detail
        )
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][1:]))
        return ApiError(400, f"{name}: {first['msg']}", name or None).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # The server logs the error itself when it has been passed on.
        request_id = visit_of(request).request_id
        message = f"request {request_id}: an unexpected error; the router's log has more"
        return ApiError(500, message, headers={"X-Request-Id": request_id}).response()
