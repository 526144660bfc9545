"""Recorded traffic: files of the two public trace formats, replayed.

Owns: reading Mooncake's JSONL (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens,
of which equal ids are equal prefixes) and Azure's CSV (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`), and what a
line must be. A file is checked whole when it is opened, so that nothing runs on half a trace, and then read line by
line: memory does not grow with its length.
Refuses to know: synthetic traffic (`workload`), tokens, servers.

    Trace.open(path).arrivals(rate=2.0) -> Arrival, Arrival, ...
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.capacity.workload import Arrival

HASH_BLOCK_TOKENS = 512
MAX_TOKENS = 100_000_000
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A file that is no trace, or a line of it that is no request; the message says where and what."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request as the file has it."""

    number: int
    time_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """A file that has been checked from its first to its last line. `span_s` lies between their times."""

    path: Path
    num_requests: int
    span_s: float

    @classmethod
    def open(cls, path: Path) -> Trace:
        """Reads the whole file once; raises TraceError for the first line that is wrong."""
        first = last = None
        num_requests = 0
        for line in _lines(path):
            if last is not None and line.time_s < last.time_s:
                raise _wrong(path, line.number, _time_field(path), "is before that of the line above it")
            first, last = first or line, line
            num_requests += 1
        if first is None or last is None:
            raise TraceError(f"{path}: holds no request")
        return cls(path, num_requests, last.time_s - first.time_s)

    @property
    def rate(self) -> float:
        """Requests a second; infinite if all come at once."""
        return (self.num_requests - 1) / self.span_s if self.span_s > 0 else math.inf

    def arrivals(
        self, rate: float | None = None, scale_prompts: float = 1.0, scale_outputs: float = 1.0
    ) -> Iterator[Arrival]:
        """The requests in order, from time 0. `rate` stretches or compresses time; None leaves it as it was."""
        pace = 1.0
        if rate is not None:
            pace = 0.0 if math.isinf(rate) or self.span_s == 0 else self.rate / rate
        start_s: float | None = None
        for position, line in enumerate(_lines(self.path)):
            start_s = line.time_s if start_s is None else start_s
            yield Arrival(
                time_s=(line.time_s - start_s) * pace,
                prompt_tokens=max(round(line.input_length * scale_prompts), 1),
                output_tokens=max(round(line.output_length * scale_outputs), 1),
                session=position,
                blocks=line.hash_ids,
                block_tokens=max(round(HASH_BLOCK_TOKENS * scale_prompts), 1),
            )


def _lines(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        yield from _mooncake(path, file) if _is_json(path) else _azure(path, file)


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".json")


def _time_field(path: Path) -> str:
    return "timestamp" if _is_json(path) else _AZURE_COLUMNS[0]


def _mooncake(path: Path, file: Iterator[str]) -> Iterator[Line]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            raise TraceError(f"{path}:{number}: is not JSON: {_shown(text.strip())}") from None
        if not isinstance(entry, dict):
            raise TraceError(f"{path}:{number}: is {_shown(text.strip())}, must be an object")
        timestamp: Any = entry.get("timestamp")
        if type(timestamp) not in (int, float) or not 0 <= timestamp < math.inf:
            raise _wrong(path, number, "timestamp", _fault(timestamp, "milliseconds, at least 0"))
        input_length = _tokens(path, number, "input_length", entry.get("input_length"))
        output_length = _tokens(path, number, "output_length", entry.get("output_length"))
        hash_ids = entry.get("hash_ids", [])
        if not isinstance(hash_ids, list) or not all(type(each) is int for each in hash_ids):
            raise _wrong(path, number, "hash_ids", _fault(hash_ids, "a list of whole numbers"))
        if len(hash_ids) > (most := -(-input_length // HASH_BLOCK_TOKENS)):
            fault = f"are {len(hash_ids)}, but an input_length of {input_length} has {most} blocks"
            raise _wrong(path, number, "hash_ids", fault)
        yield Line(number, timestamp / 1e3, input_length, output_length, tuple(hash_ids))


def _azure(path: Path, file: Iterator[str]) -> Iterator[Line]:
    rows = csv.reader(file)
    try:
        header = [name.strip().lstrip("\ufeff") for name in next(rows, [])]
        missing = [name for name in _AZURE_COLUMNS if name not in header]
        if missing:
            raise TraceError(
                f"{path}:1: has no column {missing[0]}: a trace is a .jsonl file of objects, or a CSV file whose first "
                f"line names {', '.join(_AZURE_COLUMNS)}"
            )
        columns = [header.index(name) for name in _AZURE_COLUMNS]
        for row in rows:
            if not row:
                continue
            number = rows.line_num
            if len(row) <= max(columns):
                raise TraceError(f"{path}:{number}: has {len(row)} columns, must have {len(header)}")
            timestamp, context, generated = (row[column].strip() for column in columns)
            yield Line(
                number,
                _seconds(path, number, timestamp),
                _tokens(path, number, _AZURE_COLUMNS[1], _whole(context)),
                _tokens(path, number, _AZURE_COLUMNS[2], _whole(generated)),
            )
    except csv.Error as error:
        raise TraceError(f"{path}:{rows.line_num}: is not CSV: {error}") from None


def _seconds(path: Path, number: int, text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        fault = _fault(text, "a date and time like 2023-11-16 18:15:46.6805900")
        raise _wrong(path, number, _AZURE_COLUMNS[0], fault) from None


def _whole(text: str) -> Any:
    """The number, if it is one; else the text, to be complained about."""
    try:
        return int(text)
    except ValueError:
        return text


def _tokens(path: Path, number: int, field: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise _wrong(path, number, field, _fault(value, f"a whole number of tokens from 1 to {MAX_TOKENS:,}"))
    return value


def _fault(value: Any, bound: str) -> str:
    return f"is missing, must be {bound}" if value is None else f"is {_shown(value)}, must be {bound}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong(path: Path, number: int, field: str, fault: str) -> TraceError:
    return TraceError(f"{path}:{number}: {field} {fault}")
