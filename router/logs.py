"""What a process of the cluster has logged, wherever it runs, for an operator.

Owns: how a process is asked, and for how long. Refuses to know: what is kept (`baton.telemetry.log_tail`), which
workers there are, and the operator's side (`cluster`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.credentials import ClusterWire
from baton.proto.messages import WorkerDescription
from baton.router.link import CHANNEL_OPTIONS
from baton.telemetry.log_tail import NoFormerLog, own_tail

ANSWER_S = 5.0
RAY_LOGS = "/tmp/ray/session_latest/logs"


class NoLog(Exception):
    """A process has nothing to tell, or does not answer; the message is for a person."""


async def router_tail(asked: wire.TailRequest) -> wire.LogTail:
    """Of this process. Raises NoLog."""
    try:
        return await asyncio.to_thread(own_tail, asked.lines, asked.previous)
    except NoFormerLog as error:
        raise NoLog(str(error)) from None


async def worker_tail(
    worker: WorkerDescription, asked: wire.TailRequest, log_dir: str, connections: ClusterWire
) -> wire.LogTail:
    """Of a worker's process. `log_dir`: where to look on its machine if it does not answer. Raises NoLog."""
    try:
        async with connections.channel(worker.address, CHANNEL_OPTIONS) as channel:
            stub: Any = worker_pb2_grpc.LogsStub(channel)
            told: wire.LogTail = await stub.Tail(asked, timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise NoLog(error.details() or error.code().name) from None
        host, where = worker.address.rpartition(":")[0], log_dir or RAY_LOGS
        why = f"{worker.worker_id} at {worker.address} does not answer ({error.code().name})"
        raise NoLog(f"{why}: its log is on {host} in {where}") from None
    return told
