"""The log file of one process, under a name that says whose it is.

Owns: whose lines a process's are, the file's name, its turning over, which old ones are removed, which is the latest.
Refuses to know: the form of a line (`logs`).

    router@10.0.0.7.pid-4711.log --incarnation known--> router@10.0.0.7.5f1c.log --full--> ...log.1, ...log.2, ...
                                                                 '--another incarnation--> router@10.0.0.7.b3d9.log
"""

from __future__ import annotations

import logging
import os
import re
import sys
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

FILE_BYTES = 64 << 20
FILES_A_LIFE = 4
FILES_KEPT = 24
"""Of one process's name on one host, whatever its incarnation: a worker that cannot start leaves no more behind."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass
class Origin:
    """Whose lines these are. The incarnation is known when the process has begun to serve, and may change."""

    process: str
    host: str = ""
    incarnation: str = ""

    def __str__(self) -> str:
        host = f"@{self.host}" if self.host else ""
        return self.process + host + (f"#{self.incarnation[:8]}" if self.incarnation else "")


class LogFile(RotatingFileHandler):
    """The file of this process, under a name that says whose it is; begun anew when the incarnation changes."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        """Raises OSError if the folder cannot be written to."""
        self._folder = folder
        self._origin = origin
        self._unnamed = True
        self._failing = False
        folder.mkdir(parents=True, exist_ok=True)
        self._forget_old_ones()
        super().__init__(self._file(), maxBytes=FILE_BYTES, backupCount=FILES_A_LIFE - 1, encoding="utf-8")

    def follow(self) -> None:
        """Goes on in the file of the origin's incarnation. What the process said before it had one moves along."""
        self.acquire()
        try:
            former, self.baseFilename = self.baseFilename, str(self._file())
            if self.baseFilename == former:
                return
            stream, self.stream = self.stream, None
            if self._unnamed:
                os.replace(former, self.baseFilename)
                self._unnamed = False
            if stream is not None:
                stream.close()
        except OSError:
            self._tell()
        finally:
            self.release()

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is told once, and not with a traceback for each line that it does not take."""
        self._tell()

    def _tell(self) -> None:
        if not self._failing:
            print(f"the log file {self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)
        self._failing = True

    def former(self) -> Path | None:
        """The file of this process's predecessor on this host, or of what it was before a change of role."""
        own = Path(self.baseFilename).name
        known = [file for file in self._folder.glob("*.log") if file.name.startswith(self._stem()) and file.name != own]
        return max(known, key=_changed_s, default=None)

    def _file(self) -> Path:
        life = self._origin.incarnation or f"pid-{os.getpid()}"
        return self._folder / f"{self._stem()}{_NOT_IN_NAMES.sub('-', life)}.log"

    def _stem(self) -> str:
        parts = (self._origin.process, self._origin.host)
        return "@".join(_NOT_IN_NAMES.sub("-", part) for part in parts if part) + "."

    def _forget_old_ones(self) -> None:
        known = [file for file in self._folder.iterdir() if file.name.startswith(self._stem())]
        for file in sorted(known, key=_changed_s)[: max(0, len(known) - FILES_KEPT + FILES_A_LIFE)]:
            file.unlink(missing_ok=True)


def _changed_s(file: Path) -> float:
    """When a file was last written to; 0 for one that somebody else has removed meanwhile."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
