"""An ASGI application on a port of the running event loop.

Owns: the socket and the server's start and end. Refuses to know: what the application does.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

KEEP_ALIVE_S = 75
# From the connection, or from a later request's first bytes, to the end of the request's head.
HEAD_S = 60.0
MAX_HEAD_BYTES = 64 << 10
HANDSHAKE_S = 10.0
# One more is closed at once: with its buffers a connection at rest takes some 30 KiB, by TLS some 100.
MAX_CONNECTIONS = 4096
START_S = 10.0
# What the kernel keeps of one connection for a client that does not read. Left to itself it takes megabytes, which hide
# for minutes that nobody reads. The server's own buffer is as large; then the answer's writer has to wait.
SEND_BUFFER_BYTES = 64 << 10
# A connection whose client takes nothing of what is buffered for so long is reset.
UNREAD_MS = 900_000


CHUNKS = "baton.chunks"
"""The member of a request's scope that holds its `Chunks`."""


class Chunks:
    """Parts of a response's body past all that lies between an application and its connection, which costs a streamed
    token more than the rest of the server."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether a part would go out at once: the response has begun, has no known length, and its client reads."""
        cycle = self._cycle
        return (
            bool(cycle.chunked_encoding)
            and cycle.response_started
            and not (cycle.flow.write_paused or cycle.response_complete or cycle.disconnected)
        )

    def write(self, part: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class _Protocol(HttpToolsProtocol):
    """One connection, with three gaps closed: a request's head without end would be gathered without end, one that does
    not go on would be waited for without end, and of several requests sent in one go only the last would hear that the
    client is gone."""

    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _num_turns = 0
    _cycles: tuple[RequestResponseCycle, ...] = ()
    _fault = ""
    max_head_bytes = MAX_HEAD_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # By TLS it would be eight times as much, and hide as long that nobody reads.
        transport.set_write_buffer_limits(SEND_BUFFER_BYTES)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._await_head()

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.max_head_bytes:
            # A head that has come in one go was never counted. The parser passes this on as a request that is no HTTP.
            self._fault = self._too_large
            raise ValueError(self._fault)
        self._in_head, self._head_bytes = False, 0
        self._stop_waiting()
        self._num_turns += 1
        super().on_headers_complete()
        self._cycles = (*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle)
        self.scope[CHUNKS] = Chunks(self.cycle)  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        self._in_head = True
        self._num_turns += 1
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        num_turns = self._num_turns
        super().data_received(data)
        # Only bytes between which nothing began or ended are all of one head.
        if self._in_head and num_turns == self._num_turns and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self.send_400_response(self._too_large)
            elif self._head_timer is None:
                self._await_head()

    @property
    def _too_large(self) -> str:
        return f"The request's head is larger than {self.max_head_bytes} bytes."

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._fault or msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()

    def _await_head(self) -> None:
        """Gives a head the time that it has from its first bytes on, however they drip."""
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if all(cycle.response_complete for cycle in self._cycles):
            self.transport.close()
        else:
            # The requests before this one are still being answered.
            self._await_head()


class _Server(uvicorn.Server):
    """A server that tells when it listens, and that waits for a TLS handshake no longer than for a greeting."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None, max_head_bytes: int) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()
        self._context = context
        self._max_head_bytes = max_head_bytes

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """What the base class does with sockets, in which a handshake has a minute."""
        loop, handshake_s = asyncio.get_running_loop(), HANDSHAKE_S if self._context is not None else None
        self.servers = [
            await loop.create_server(
                self._connection,
                sock=listener,
                ssl=self._context,
                ssl_handshake_timeout=handshake_s,
                backlog=self.config.backlog,
            )
            for listener in sockets or ()
        ]
        self.started = True
        self.listens.set()

    def _connection(self) -> _Protocol:
        protocol = _Protocol(self.config, self.server_state, self.lifespan.state)
        protocol.max_head_bytes = self._max_head_bytes
        return protocol


class HttpServer:
    """Serves one application, with a context by TLS alone; `open` once, `close` once."""

    def __init__(
        self, app: ASGIApp, context: ssl.SSLContext | None = None, max_head_bytes: int = MAX_HEAD_BYTES
    ) -> None:
        self._app = app
        self._context = context
        self._max_head_bytes = max_head_bytes
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int, patience_s: float = 0.0, *, shared: bool = False) -> list[str]:
        """Binds, starts, and returns host:port. Raises OSError if the port stays taken for `patience_s`.

        `shared`: other processes of ours may listen on the port too; then a free port of its own comes second.
        """
        listeners = [await _bound(host, port, patience_s, shared)]
        if shared:
            listeners.append(await _bound(host, 0, patience_s, shared=False))
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            # A warning for each malformed request would let anybody fill the log.
            log_level="error",
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            http=_Protocol,
            ws="none",
            server_header=False,
            proxy_headers=False,
        )
        self._server = _Server(config, self._context, self._max_head_bytes)
        self._task = asyncio.create_task(self._serve(listeners))
        async with asyncio.timeout(START_S):
            await self._server.listens.wait()
        shown = f"[{host}]" if ":" in host else host
        return [f"{shown}:{listener.getsockname()[1]}" for listener in listeners]

    async def close(self, grace_s: float = 0.5) -> None:
        """Ends connections: at once those at rest, after `grace_s` those that answer somebody."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._task)
                return
        # Whoever answers somebody hears that the client is gone, and ends as for any that goes.
        state = self._server.server_state
        answers = list(state.tasks)
        for connection in list(state.connections):
            connection.transport.abort()
        self._server.force_exit = True
        await asyncio.wait([self._task, *answers], timeout=START_S)

    async def _serve(self, listeners: list[socket.socket]) -> None:
        assert self._server is not None
        # `serve` would take over the signal handlers of the process, which hosts the router too.
        await self._server._serve(listeners)


async def _bound(host: str, port: int, patience_s: float, shared: bool) -> socket.socket:
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            # The kernel spreads connections over all who listen.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        try:
            listener.bind((host, port))
            return listener
        except OSError:
            listener.close()
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(0.1)
