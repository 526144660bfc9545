"""Where Prometheus finds every endpoint of the cluster, in the form that its service discovery reads.

Owns: the labels of a target, and the file that names all of them for a Prometheus that reads files.
Refuses to know: what is counted and who there is to scrape (`metrics`), and HTTP (`http.metrics_route`).

    targets --look, LOOK_S apart--> other than before --> a file beside it --rename--> the file        closed: no target
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from baton.router.metrics import ENGINE, Target

log = logging.getLogger(__name__)

LOOK_S = 1.0

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def group(target: Target, by_tls: bool = False) -> dict[str, Any]:
    """One target with its labels. `by_tls`: routers are to be asked by HTTPS; workers' endpoints are plain HTTP.

    The incarnation is a label that Prometheus drops after relabelling: kept, it would end a worker's series at every
    restart, and hide the label of that name which `baton_worker_info` has.
    """
    labels = {
        "host": target.host,
        "role": target.role,
        "pool": target.pool,
        "worker_id": target.worker_id,
        "__meta_baton_incarnation": target.incarnation,
    }
    if by_tls and target.role == ENGINE:
        labels["__scheme__"] = "https"
    return {"targets": [target.address], "labels": labels}


def reachable(address: str) -> str:
    """How a process on the same machine reaches a server that may listen on all of its addresses."""
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


class TargetsFile:
    """Keeps the file as the targets are. Belongs to one event loop."""

    def __init__(self, file: Path, targets: Callable[[], Sequence[Target]], by_tls: bool = False) -> None:
        self._file = file
        self._by_tls = by_tls
        self._targets = targets
        self._written: Sequence[Target] | None = None
        self._failing = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Leaves a file without targets: those that it named are ending."""
        if self._task is not None:
            self._closing.set()
            await self._task
            await self._write([])

    async def _keep(self) -> None:
        while not self._closing.is_set():
            targets = self._targets()
            if targets != self._written:
                await self._write(targets)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._closing.wait()

    async def _write(self, targets: Sequence[Target]) -> None:
        """A failure is told once and tried again: a disk may be full for a while."""
        text = json.dumps([group(target, self._by_tls) for target in targets], indent=1) + "\n"
        try:
            await asyncio.to_thread(_replace, self._file, text)
        except OSError as error:
            if not self._failing:
                log.warning("the targets for Prometheus cannot be written to %s: %s", self._file, error.strerror)
            self._failing = True
        else:
            self._written, self._failing = targets, False


def _replace(file: Path, text: str) -> None:
    """A reader meets the old file or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
