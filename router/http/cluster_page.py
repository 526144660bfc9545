"""The status page: its files, the picture as JSON, and the same as a stream for as long as somebody looks.

Owns: the stream's rhythm, who shares it and when it ends, and what the page may load.
Refuses to know: what is in the picture (`cluster`), and how it is drawn (`page/cluster.js`).

    nobody looks -> first viewer: a picture a second, for all of them -> last one gone, or the router closes
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from fastapi import APIRouter, Response
from starlette.types import Receive, Scope, Send

from baton.proto.plain import plain
from baton.router.cluster import Picture, Workforce
from baton.router.http.errors import ApiError, retry_after
from baton.router.router import Router

INTERVAL_S = 1.0
RECONNECT_MS = 1000
MAX_VIEWERS = 32
SEND_S = 10.0

_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/cluster": ("cluster.html", "text/html"),
    "/cluster/page.css": ("cluster.css", "text/css"),
    "/cluster/page.js": ("cluster.js", "text/javascript"),
    "/cluster/icon.svg": ("icon.svg", "image/svg+xml"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def cluster_routes(router: Router, workforce: Workforce) -> APIRouter:
    """The routes of one router's page."""
    picture = Picture(router, workforce)
    feed = StatusFeed(lambda: _as_json(picture), router.closing)
    routes = APIRouter(include_in_schema=False)

    for path, (name, media_type) in _FILES.items():
        routes.add_api_route(path, _file((_PAGE / name).read_bytes(), media_type))

    @routes.get("/cluster/status")
    async def status() -> Response:
        return Response(_as_json(picture), media_type="application/json", headers=_HEADERS)

    @routes.get("/cluster/events")
    async def events() -> Response:
        return EventStream(feed)

    return routes


class StatusFeed:
    """Pictures for all who look, one an interval however many they are. Who is slow gets the next one, not each.

    A picture a second is also the sign of life by which the page knows that its connection stands.
    """

    def __init__(
        self,
        take: Callable[[], bytes],
        closing: asyncio.Event,
        interval_s: float = INTERVAL_S,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        self.num_viewers = 0
        self.max_viewers = max_viewers
        self._take = take
        self._closing = closing
        self._interval_s = interval_s
        self._newest = b""
        self._news = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    def enter(self) -> bool:
        """Takes a viewer's place; False if all are taken. Each that was taken has to be left."""
        if self.num_viewers >= self.max_viewers:
            return False
        self.num_viewers += 1
        return True

    def leave(self) -> None:
        self.num_viewers -= 1
        if self.num_viewers == 0 and self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    async def pictures(self) -> AsyncIterator[bytes]:
        """The newest one at once, then each that comes, until the router closes. For who has a place."""
        if self._ticker is None:
            self._newest = self._take()
            self._ticker = asyncio.create_task(self._tick())
        ticker = self._ticker
        while True:
            if ticker.done():
                ticker.result()
            yield self._newest
            if self._closing.is_set():
                return
            await self._news.wait()

    async def _tick(self) -> None:
        try:
            while not self._closing.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._closing.wait()
                self._newest = self._take()
                self._tell()
        finally:
            self._tell()

    def _tell(self) -> None:
        """Wakes those who wait now; who comes later waits for the next time."""
        news, self._news = self._news, asyncio.Event()
        news.set()


class EventStream(Response):
    """A feed as server-sent events, until the feed or the connection ends, or the viewer does not read for `SEND_S`."""

    media_type = "text/event-stream"

    def __init__(self, feed: StatusFeed) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._feed.enter():
            await _no_place(self._feed.max_viewers)(scope, receive, send)
            return
        try:
            async with asyncio.TaskGroup() as group:
                ends = (group.create_task(self._send_all(send)), group.create_task(_disconnected(receive)))
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.cancel()
        finally:
            self._feed.leave()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body = f"retry: {RECONNECT_MS}\n\n".encode()
        async for picture in self._feed.pictures():
            body += b"data: " + picture + b"\n\n"
            with suppress(TimeoutError):
                async with asyncio.timeout(SEND_S):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    body = b""
            if body:
                return  # not read for too long: the server closes what is not complete
        await send({"type": "http.response.body", "body": b""})


def _no_place(max_viewers: int) -> Response:
    message = f"{max_viewers} viewers watch already, the most allowed is {max_viewers}"
    return ApiError(503, message, code="too_many_viewers", headers={**_HEADERS, **retry_after(5.0)}).response()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _file(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def respond() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return respond


def _as_json(picture: Picture) -> bytes:
    return json.dumps(plain(picture.take()), separators=(",", ":"), allow_nan=False).encode()
