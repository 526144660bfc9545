"""Asks every worker how things are there, and has those that may hand over to one another meet.

Owns: the order of questions and the comparison of clocks. Refuses to know: what is good and what is bad, which
`baton doctor` does.

    all workers at once:  three short questions: machine, clock, version -> those that read KV meet those that lend it
    one after the other:  those that read KV measure their lanes: two at a time might share a link
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Protocol

from baton.proto import cluster_pb2 as cluster
from baton.proto import worker_pb2 as wire
from baton.proto.messages import Role, WorkerDescription
from baton.router.link import WorkerLink

QUESTIONS = 3
ANSWER_S = 3.0
MEETING_SHARE = 0.5  # of the time
PROBE_BYTES = 64 << 20
LEAST_S = 0.1


class Place(Protocol):
    """What of a `cluster.Member` is asked for here."""

    @property
    def worker_id(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def state(self) -> StrEnum: ...
    @property
    def restarts(self) -> int: ...
    @property
    def description(self) -> WorkerDescription | None: ...


async def examine(
    places: Iterable[Place], links: Mapping[str, WorkerLink], timeout_s: float
) -> list[cluster.ExaminedWorker]:
    """What is known of every worker when the time is over."""
    deadline = time.monotonic() + timeout_s
    sources = [
        wire.HandoffSource(worker_id=name, incarnation=link.description.incarnation, address=link.description.address)
        for name, link in links.items()
        if link.description.role is Role.PREFILL
    ]
    met_by = time.monotonic() + timeout_s * MEETING_SHARE
    found = await asyncio.gather(*(_examine(place, links.get(place.worker_id), sources, met_by) for place in places))
    for worker in found:
        if _reads(worker) and time.monotonic() < deadline:
            await _measure(worker, links.get(worker.worker_id), sources, deadline)
    return found


async def _examine(
    place: Place, link: WorkerLink | None, sources: list[wire.HandoffSource], deadline: float
) -> cluster.ExaminedWorker:
    found = cluster.ExaminedWorker(
        worker_id=place.worker_id,
        pool=place.pool,
        role=place.role.value,
        state=place.state.value,
        restarts=place.restarts,
        address=place.description.address if place.description is not None else "",
    )
    if link is None:
        found.silence = "the router has no connection to it"
        return found
    try:
        await _ask(link, found, deadline)
        if sources and _reads(found):
            await _meet(link, found, wire.ExamineRequest(sources=sources), deadline)
    except ConnectionError as error:
        found.silence = str(error)
    return found


async def _measure(
    found: cluster.ExaminedWorker, link: WorkerLink | None, sources: list[wire.HandoffSource], deadline: float
) -> None:
    """A worker that is gone meanwhile was well when it was asked."""
    is_open = {lane.source_incarnation for lane in found.examination.lanes if lane.state == "open"}
    met = [source for source in sources if source.incarnation in is_open]
    if link is not None and met:
        with suppress(ConnectionError):
            await _meet(link, found, wire.ExamineRequest(sources=met, probe_bytes=PROBE_BYTES), deadline)


async def _meet(link: WorkerLink, found: cluster.ExaminedWorker, request: wire.ExamineRequest, deadline: float) -> None:
    left_s = max(LEAST_S, deadline - time.monotonic())
    request.timeout_s = left_s * 0.9
    lanes = (await link.examine(request, left_s)).lanes
    del found.examination.lanes[:]
    found.examination.lanes.extend(lanes)


def _reads(found: cluster.ExaminedWorker) -> bool:
    return found.role == Role.DECODE and not found.silence


async def _ask(link: WorkerLink, found: cluster.ExaminedWorker, deadline: float) -> None:
    """Short questions: the one that was answered soonest tells most about the worker's clock."""
    for _ in range(QUESTIONS):
        asked_s, asked_unix_s = time.monotonic(), time.time()
        answer = await link.examine(wire.ExamineRequest(), min(ANSWER_S, max(LEAST_S, deadline - asked_s)))
        round_trip_s = time.monotonic() - asked_s
        if not found.HasField("examination") or round_trip_s < found.round_trip_s:
            found.examination.CopyFrom(answer)
            found.round_trip_s = round_trip_s
            found.clock_ahead_s = answer.machine.unix_s - (asked_unix_s + round_trip_s / 2)
