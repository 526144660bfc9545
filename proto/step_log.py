"""The file in which a worker notes every step and every hand-off, for whoever fits a cost model to it.

Owns: the form of its lines, and reading them. Refuses to know: who writes them when (`engine.step_log`) and what is
made of them (`capacity.calibrate`).

    {"format": "baton-step-log", "version": 1, "worker_id": ..., "role": "prefill", ...}    at the start of each role
    ["s", start_s, prefill_tokens, attention_pairs, decode_sequences, kv_tokens, preemptions, plan_s, run_s, commit_s,
     gap_s, cpu_s]
    ["h", landed_s, pulls, bytes, runs, reading_s, wait_s, transfer_s]

Times are seconds of the machine's monotonic clock, which all processes on it share. A file whose writer was killed may
end within a line: that line is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from baton.proto.messages import Role

FORMAT = "baton-step-log"
VERSION = 1
SUFFIX = ".steps.jsonl"


class StepLogError(ValueError):
    """A file that is no step log; the message names file and line."""


@dataclass(frozen=True, slots=True)
class StepLogHeader:
    """Who writes. `threads`: of the worker's computation."""

    worker_id: str
    role: Role
    model: str = ""
    dtype: str = ""
    device: str = ""
    threads: int = 0
    block_size: int = 0
    kv_bytes_per_token: int = 0
    baton_version: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. The counts are those of `scheduler.plan.StepWork`.

    `gap_s`: from the last step's end to this one's start, None where the worker had nothing to do meanwhile. `cpu_s`:
    for how much of all that the step loop's thread had a core; on an idle machine, of a worker with one thread, all.
    """

    start_s: float
    prefill_tokens: int
    attention_pairs: int
    decode_sequences: int
    kv_tokens: int
    preemptions: int
    plan_s: float
    run_s: float
    commit_s: float
    gap_s: float | None
    cpu_s: float

    @property
    def busy_s(self) -> float:
        """The whole turn of the loop."""
        return self.plan_s + self.run_s + self.commit_s + (self.gap_s or 0.0)


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """One hand-off that has landed, noted by the worker that pulled.

    `reading_s` sums the connector's times of its reads. `wait_s` is from the end of the prompt's computation to the
    last read's start, `transfer_s` from there to validated KV.
    """

    landed_s: float
    pulls: int
    bytes: int
    runs: int
    reading_s: float
    wait_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class StepLogFile:
    """What one worker noted while it had one role."""

    header: StepLogHeader
    steps: tuple[StepRecord, ...] = ()
    handoffs: tuple[HandoffRecord, ...] = ()


def header_line(header: StepLogHeader) -> str:
    return json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)}) + "\n"


def step_line(record: StepRecord) -> str:
    return _line("s", record)


def handoff_line(record: HandoffRecord) -> str:
    return _line("h", record)


def read(path: Path) -> list[StepLogFile]:
    """The parts of one file, one for each role that its writer had. Raises StepLogError, or OSError."""
    parts: list[StepLogFile] = []
    steps: list[StepRecord] = []
    handoffs: list[HandoffRecord] = []

    def end_part() -> None:
        if parts:
            parts[-1] = replace(parts[-1], steps=tuple(steps), handoffs=tuple(handoffs))
        steps.clear()
        handoffs.clear()

    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            match json.loads(line):
                case {"format": "baton-step-log", "version": 1} as header:
                    end_part()
                    parts.append(StepLogFile(_header(header)))
                case ["s", *values] if parts:
                    steps.append(_record(StepRecord, values))
                case ["h", *values] if parts:
                    handoffs.append(_record(HandoffRecord, values))
                case _:
                    raise ValueError("neither a header of this version nor, after one, a step or a hand-off")
        except (ValueError, TypeError) as error:
            raise StepLogError(f"{path}: line {number} is no line of a step log: {error}") from error
    end_part()
    return parts


def read_directory(directory: Path) -> list[StepLogFile]:
    """All step logs in a directory, by name."""
    return [part for path in sorted(directory.glob(f"*{SUFFIX}")) for part in read(path)]


def _line(kind: str, record: Any) -> str:
    values = (round(value, 6) if type(value) is float else value for value in astuple(record))
    return json.dumps([kind, *values], separators=(",", ":")) + "\n"


def _header(values: Mapping[str, Any]) -> StepLogHeader:
    rest = {name: value for name, value in values.items() if name not in ("format", "version", "role")}
    return StepLogHeader(role=Role(values.get("role", "")), **rest)


def _record(make: Callable[..., Any], values: list[object]) -> Any:
    if not all(value is None or type(value) in (int, float) for value in values):
        raise ValueError("a value that is no number")
    return make(*values)
