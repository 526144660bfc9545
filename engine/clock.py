"""The clock that a worker's loops are given: seconds that only go up, without meaning outside the process."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
