"""Code on the event loop that a worker cannot live without.

Owns: that its death is heard. A task or callback that dies there leaves everything behind it waiting for ever, and
asyncio says so only in a log; the worker must end instead, and be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Failed = Callable[[BaseException], None]
"""Told of a bug or a broken device after which the worker must not go on; may be called from any thread."""


@contextmanager
def vital(failed: Failed) -> Iterator[None]:
    """An exception inside is a bug: `failed` hears of it, and what is inside ends there. Cancellation is none."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - handed over whole: nothing goes on as if it had not been
        failed(error)
