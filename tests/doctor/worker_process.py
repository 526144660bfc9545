"""A worker with the paper model in a process of its own, and its seat in a small cluster.

Run as a script it prints its description as hex and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from paper_model import PaperRunner
from small_cluster import SmallCluster, make_worker

from baton.proto import worker_pb2 as wire
from baton.proto.messages import Role, WorkerDescription
from baton.proto.settings import TransferSettings, WorkerSettings
from baton.router.cluster import WorkerState
from baton.router.link import WorkerLink

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))


@dataclass
class FarSeat:
    """A worker in another process, as `SmallCluster` keeps it and the status shows it."""

    process: asyncio.subprocess.Process
    link: WorkerLink
    restarts: int = 0

    @property
    def description(self) -> WorkerDescription:
        return self.link.description

    @property
    def worker_id(self) -> str:
        return self.link.worker_id

    @property
    def pool(self) -> str:
        return self.role.value

    @property
    def role(self) -> Role:
        return self.description.role

    @property
    def state(self) -> WorkerState:
        return WorkerState.LOST if self.link.lost.done() else WorkerState.READY

    @property
    def note(self) -> str:
        return ""

    @property
    def worker(self) -> FarSeat:
        return self

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def add_far(small: SmallCluster, role: Role, worker_id: str, clock_ahead_s: float = 0.0) -> FarSeat:
    """Starts a worker in a process of its own whose clock is so far ahead, and has the router connect to it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        role.value,
        worker_id,
        str(clock_ahead_s),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = await process.stdout.readline()
    message = wire.WorkerDescription.FromString(bytes.fromhex(line.decode()))
    link = await small._connect(WorkerDescription.from_wire(message))
    seat = small.seats[worker_id] = FarSeat(process, link)
    return seat


async def _serve(role: Role, worker_id: str) -> None:
    settings = WorkerSettings(
        worker_id, role.value, role, transfer=TransferSettings(connector="local"), idle_report_s=0.05
    )
    worker = make_worker(settings, PaperRunner(), lambda error: sys.exit(repr(error)))
    description = await worker.start()
    print(description.to_wire().SerializeToString().hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


if __name__ == "__main__":
    ahead_s, true_time = float(sys.argv[3]), time.time
    time.time = lambda: true_time() + ahead_s
    asyncio.run(_serve(Role(sys.argv[1]), sys.argv[2]))
