"""What the tests of several hosts measured, for a person to read.

Owns: the rows, and their two forms. Refuses to know: how anything is measured; there is no bar here that fails a test.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """A duration after an event, and what of it was waited for."""

    event: str
    what: str
    seconds: float


@dataclass
class Table:
    rows: list[Row] = field(default_factory=list)

    def note(self, event: str, what: str, seconds: float) -> None:
        self.rows.append(Row(event, what, round(seconds, 3)))

    def lines(self) -> list[str]:
        return [f"{row.event:34} {row.what:36} {row.seconds:8.2f} s" for row in self.rows]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1) + "\n", encoding="utf-8")
