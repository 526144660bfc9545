"""What a check has to say.

Owns: the form of a finding, and how quantities read in one. Refuses to know: the checks, and how findings are shown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """`problem` says what is wrong, the value and the bound; `remedy` what to do. `is_fault`: it is wrong, and not only
    worth knowing."""

    check: str
    subject: str
    problem: str
    remedy: str
    is_fault: bool = True


def gib(num_bytes: float) -> str:
    """Bytes as a person reads them."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
