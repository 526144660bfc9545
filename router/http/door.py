"""What every HTTP request passes before its route: its id, the client's key, the client's share of the router.

Owns: who may come in and under what name. Refuses to know: routes, but for those that are open to all.

Open without a key are health, version, metrics and the API's description: machines read them, and they tell nothing of
requests. The cluster page needs one, as it shows requests and addresses; a browser asks for it as a password.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.router.admission import MAX_NAME_CHARS, is_name, random_request_id
from baton.router.allowance import Allowance
from baton.router.http.errors import ApiError, retry_after
from baton.router.keys import Keyring
from baton.router.observe import Call, Face

OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/openapi.json"})
# Ids of a request's parts are made from its own, which therefore leaves room.
MAX_ID_CHARS = MAX_NAME_CHARS - 8

_VISIT = "baton.visit"


@dataclass(frozen=True, slots=True)
class Visit:
    """One HTTP request that was let in. `client`: its key's name, empty where none is needed."""

    request_id: str
    client: str


class Door:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keys: Keyring | None, allowance: Allowance) -> None:
        self._app = app
        self._keys = keys
        self._allowance = allowance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not 0 < len(request_id) <= MAX_ID_CHARS or not is_name(request_id):
            request_id = random_request_id()
        scope[_VISIT] = Visit(request_id, "")
        shown = (b"x-request-id", request_id.encode())

        def send_with_id(message: Message):  # type: ignore[no-untyped-def] # a frame less for each token
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), shown]
            return send(message)

        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send_with_id)
            return
        try:
            client = self._client(headers.get(b"authorization", b"").decode("latin-1"), scope["path"])
            counted = client or (scope.get("client") or ("",))[0]
            self._let_in(counted, scope["method"])
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
            return
        scope[_VISIT] = Visit(request_id, client)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._allowance.leave(counted)

    def _client(self, authorization: str, path: str) -> str:
        if self._keys is None:
            return ""
        name = self._keys.name_of(authorization)
        if name is None:
            fault = "is not one of this server's" if authorization else "is missing"
            scheme = "Basic" if path.startswith("/cluster") else "Bearer"
            message = f"the API key {fault}: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, headers={"WWW-Authenticate": f'{scheme} realm="baton"'})
        return name

    def _let_in(self, client: str, method: str) -> None:
        """Counts the client in. Raises ApiError if it has too much already; then it is not."""
        excess = self._allowance.ask(client, time.monotonic()) if method == "POST" else None
        excess = excess or self._allowance.enter(client)
        if excess is not None:
            raise ApiError(429, excess.message, headers=retry_after(excess.wait_s))


def visit_of(request: Request) -> Visit:
    visit = request.scope[_VISIT]
    assert isinstance(visit, Visit)
    return visit


def call_of(request: Request) -> Call:
    """What came around the request. Raises ApiError for a deadline that is none."""
    headers = request.headers
    timeout = headers.get("x-request-timeout")
    left_s: float | None = None
    if timeout is not None:
        try:
            left_s = float(timeout)
        except ValueError:
            left_s = -1.0
        # NaN compares false with everything.
        if not left_s > 0.0:
            raise ApiError(400, f"X-Request-Timeout is {timeout!r:.80}, must be seconds above 0", "X-Request-Timeout")
    return Call(
        Face.HTTP,
        left_s=left_s,
        traceparent=headers.get("traceparent", ""),
        tracestate=headers.get("tracestate", ""),
        client=visit_of(request).client,
    )
