"""Log lines of one process, for people or for machines.

Owns: their form, which loggers are heard, and where lines go. Refuses to know: who logs what.

    text   2026-11-30 12:00:00,123 INFO router@10.0.0.7#5f1c baton.router.request_log: request ended request_id=a1 ...
    json   {"ts": "2026-11-30T12:00:00.123456+00:00", "level": "info", "process": "router", "host": "10.0.0.7",
            "incarnation": "5f1c", "logger": ..., "message": ..., "request_id": "a1", ...}

    logger --> stderr; this process's file (`log_file`), if log_dir names a place; the last lines in memory (`log_tail`)

Values beside the message go in by `extra=fields(request_id=..., ...)`: keys of the JSON object, key=value in text.
No key of a client may be in any line, nor a prompt or an output, unless `log_prompts` says so, and then only in the
line of the request that ended. What quotes a client's values, as refusals do, goes to that client only.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from baton.proto.settings import ObservabilitySettings
from baton.telemetry.log_file import LogFile, Origin
from baton.telemetry.log_tail import Tail

FIELDS = "baton_fields"

Field = str | bool | int | float | list[str] | None

_PLAIN = re.compile(r"[^\s\"'=\\]+")

log = logging.getLogger(__name__)


def configure(settings: ObservabilitySettings, process: str, stream: TextIO | None = None, host: str = "") -> None:
    """Sends the log of this process, which calls itself `process`, to stderr or `stream`, and to its file if any.

    Without a place for the file the process goes on, and says so.
    """
    origin = Origin(process, host)
    out = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handlers: list[logging.Handler] = [out, Tail(origin)]
    trouble: OSError | None = None
    if settings.log_dir:
        try:
            handlers.append(LogFile(Path(settings.log_dir), origin))
        except OSError as error:
            trouble = error
    for handler in handlers:
        handler.setFormatter(JsonFormatter(origin) if settings.log_format == "json" else TextFormatter(origin))
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    # What libraries say for their own developers stays out, and with it whatever they would quote.
    logging.basicConfig(level=max(level, logging.INFO), handlers=handlers, force=True)
    logging.getLogger("baton").setLevel(level)
    if trouble is not None:
        log.warning("this process keeps no log in log_dir: %s", trouble)


def identify(incarnation: str) -> None:
    """All further lines of this process are those of this incarnation, and so is its file."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            handler.formatter.origin.incarnation = incarnation
        if isinstance(handler, LogFile):
            handler.follow()


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """Values for a log call's `extra`."""
    return {FIELDS: values}


class TextFormatter(logging.Formatter):
    """One line a record, and the traceback below it."""

    def __init__(self, origin: Origin) -> None:
        super().__init__("%(asctime)s %(levelname)s %(origin)s %(name)s: %(message)s")
        self.origin = origin

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.origin = self.origin
        pairs = (f" {name}={_shown(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + "".join(pairs)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. `exc` is the traceback, of a record that has one."""

    def __init__(self, origin: Origin) -> None:
        super().__init__()
        self.origin = origin

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Field] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "process": self.origin.process,
            **({"host": self.origin.host} if self.origin.host else {}),
            **({"incarnation": self.origin.incarnation} if self.origin.incarnation else {}),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exc"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        # A field never takes the place of what every line has.
        return json.dumps({**entry, **_fields(record), **entry}, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, Field]:
    found: Mapping[str, Field] = getattr(record, FIELDS, {})
    return found


def _shown(value: Field) -> str:
    """As it is where that is one word, in JSON otherwise: a line stays a line, whatever a client's name for itself."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ",".join(_shown(entry) for entry in value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
