"""An ASGI application on a port of the running event loop.

Owns: the socket and the server's start and end. Refuses to know: what the application does.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75
START_S = 10.0


class _Server(uvicorn.Server):
    """A server that tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


class HttpServer:
    """Serves one application; `open` once, `close` once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int, patience_s: float = 0.0) -> str:
        """Binds, starts, and returns host:port. Raises OSError if the port stays taken for `patience_s`."""
        listener = await _bound(host, port, patience_s)
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=64 << 10,
            server_header=False,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._serve(listener))
        async with asyncio.timeout(START_S):
            await self._server.listens.wait()
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{listener.getsockname()[1]}"

    async def close(self, grace_s: float = 0.5) -> None:
        """Ends connections: at once those at rest, after `grace_s` those that answer somebody."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._task)
                return
        self._server.force_exit = True
        self._task.cancel()
        await asyncio.wait([self._task], timeout=START_S)

    async def _serve(self, listener: socket.socket) -> None:
        assert self._server is not None
        # `serve` would take over the signal handlers of the process, which hosts the router too.
        await self._server._serve([listener])


async def _bound(host: str, port: int, patience_s: float) -> socket.socket:
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            return listener
        except OSError:
            listener.close()
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(0.1)
