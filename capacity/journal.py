"""Finished points, kept as they come: a sweep that was broken off goes on where it stopped.

Owns: the file, one JSON object a line, written whole or not at all. A point's key names everything that its result
depends on. Refuses to know: what points and results are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class JournalError(OSError):
    """The file cannot be written or read; what it already holds is kept."""


class Journal:
    """The points of one output directory. A last line that is cut short, as by a full disk or a kill, is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes() if path.exists() else b""
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(path, whole)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise JournalError(f"{path}: cannot be used: {error.strerror}") from error
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                entry = json.loads(line)
                self._found[entry["key"]] = entry["result"]
            except (ValueError, KeyError, TypeError):
                os.close(self._file)
                raise JournalError(f"{path}:{number}: is no finished point: move the file away to start anew") from None

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Any | None:
        return self._found.get(key)

    def add(self, key: str, point: Any, result: Any) -> None:
        """Writes a line through to the disk. On failure the file is as it was before."""
        line = json.dumps({"key": key, "point": point, "result": result}, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            kept = f"{len(self)} finished points are kept"
            message = f"{self._path}: cannot be written: {error.strerror}; {kept}: the same command goes on with them"
            raise JournalError(message) from error
        self._found[key] = result

    def close(self) -> None:
        os.close(self._file)
