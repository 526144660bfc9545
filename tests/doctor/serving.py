"""A cluster of the paper model that serves, and the doctor beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from paper_model import PaperRunner
from small_cluster import SmallCluster

from baton.client import doctor


@asynccontextmanager
async def serving(directory: Path, make_runner=PaperRunner, **shape) -> AsyncIterator[SmallCluster]:
    """A cluster whose first request has gone through, as after `baton serve`."""
    async with SmallCluster(directory, make_runner, **shape) as small:
        await small.router.prove_ready()
        await small.server.mark_ready()
        yield small


async def examined(small: SmallCluster, token: str | None = None, timeout_s: float = 10.0) -> doctor.Diagnosis:
    """What `baton doctor --target` finds out, while the cluster's loop runs on."""
    return await asyncio.to_thread(doctor.diagnose, None, small.address, token, timeout_s)


def faults(diagnosis: doctor.Diagnosis) -> list[tuple[str, str]]:
    """Check and subject of all that is wrong."""
    return [(finding.check, finding.subject) for finding in diagnosis.findings if finding.is_fault]
