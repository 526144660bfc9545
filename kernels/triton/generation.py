"""Which kind of GPU a kernel is about to be launched on; the shapes of tiles depend on it."""

# mypy: allow-untyped-calls

from __future__ import annotations

import enum
import functools

from triton import knobs
from triton.runtime import driver


class Generation(enum.Enum):
    """As far as tile shapes tell them apart."""

    AMPERE = enum.auto()  # sm_80 to sm_89
    HOPPER = enum.auto()  # sm_90 and later
    CDNA = enum.auto()  # AMD Instinct: 64 threads a warp


def generation() -> Generation:
    """Of the current device; the interpreter passes for the latest."""
    return Generation.HOPPER if knobs.runtime.interpret else _of(driver.active.get_current_device())


@functools.cache
def _of(device: int) -> Generation:
    target = driver.active.get_current_target()
    if target.backend != "cuda":
        return Generation.CDNA
    return Generation.HOPPER if target.arch >= 90 else Generation.AMPERE
