"""The last lines that a process has logged, for who asks from another machine.

Owns: how many are kept, and the answer to `Logs.Tail`: those lines, or the end of the predecessor's file.
Refuses to know: the form of a line (`logs`), and who may ask.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from pathlib import Path

import grpc

from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.context import Context
from baton.telemetry.log_file import LogFile, Origin

TAIL_BYTES = 1 << 20
"""Kept in memory, and told at once; below what a message may have."""


class NoFormerLog(Exception):
    """There is nothing of a predecessor to tell; the message is for a person."""


class Tail(logging.Handler):
    """Keeps the last lines of this process."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self.origin = origin
        self._entries: deque[str] = deque()
        self._num_bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            entry = self.format(record)
        except (TypeError, ValueError):  # a message that does not go with its values
            self.handleError(record)
            return
        self._entries.append(entry)
        self._num_bytes += len(entry.encode(errors="replace"))
        while self._num_bytes > TAIL_BYTES:
            self._num_bytes -= len(self._entries.popleft().encode(errors="replace"))

    def lines(self, count: int) -> list[str]:
        """The last ones, oldest first. A traceback is several."""
        self.acquire()
        try:
            # An entry has a line at least, so no more entries than lines are wanted.
            text = "\n".join(list(self._entries)[-count:])
        finally:
            self.release()
        return text.splitlines()[-count:]


def own_tail(count: int, previous: bool) -> wire.LogTail:
    """What this process has logged of late, or its predecessor before it ended. Raises NoFormerLog; may read a file."""
    handlers = logging.getLogger().handlers
    tail = next((handler for handler in handlers if isinstance(handler, Tail)), None)
    file = next((handler for handler in handlers if isinstance(handler, LogFile)), None)
    origin = tail.origin if tail is not None else Origin("")
    told = wire.LogTail(process=origin.process, host=origin.host)
    if not previous:
        told.incarnation = origin.incarnation
        told.file = file.baseFilename if file is not None else ""
        told.lines.extend(tail.lines(count) if tail is not None else ())
        return told
    if file is None:
        raise NoFormerLog(f"{origin} keeps no log file, as observability.log_dir is empty or cannot be written to")
    former = file.former()
    if former is None:
        raise NoFormerLog(f"{origin} has had no predecessor on this machine")
    told.incarnation = former.name.removesuffix(".log").rpartition(".")[2]
    told.file = str(former)
    told.lines.extend(_end_of(former)[-count:])
    return told


class LogService(worker_pb2_grpc.LogsServicer):
    """Serves `Logs` for this process."""

    async def Tail(self, request: wire.TailRequest, context: Context) -> wire.LogTail:
        try:
            return await asyncio.to_thread(own_tail, max(request.lines, 1), request.previous)
        except NoFormerLog as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort returns never")


def _end_of(file: Path) -> list[str]:
    """Its last lines; the first of them may have lost its beginning, and is left out then."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    return lines[1:] if size > TAIL_BYTES else lines
