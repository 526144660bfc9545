"""A TCP relay that a link can be led through, to be delayed or to be made half-open."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Wire:
    """`async with Wire(target)`: what connects to `address` reaches the target, `delay_s` later each way.

    `swallows`: bytes from the target are taken and not passed on, while the other direction works.
    """

    def __init__(self, target: str, delay_s: float = 0.0, swallows: bool = False) -> None:
        host, _, port = target.rpartition(":")
        self._host, self._port = host, int(port)
        self._delay_s = delay_s
        self._swallows = swallows
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink, swallows in ((reader, target_writer, False), (target_reader, writer, self._swallows)):
            task = asyncio.create_task(self._pass(source, sink, swallows))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, swallows: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                if swallows:
                    continue
                await asyncio.sleep(self._delay_s)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()
