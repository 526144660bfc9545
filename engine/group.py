"""What the ranks of one worker do together while they compute: sums, maxima, and scores gathered on rank 0.

Owns: `Group`, alone and over torch.distributed (nccl on a GPU, gloo on a CPU). Refuses to know: who started the ranks,
what they compute, and what to do when one is lost: a collective then raises, within its timeout.

The process groups are made directly, not as the process's default one: a process may hold ranks of several workers.
All ranks of a worker are on one machine, so nothing here leaves the loopback interface or the GPUs' own links.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch.nn import functional

LOOPBACK = "127.0.0.1"

_dist: Any = torch.distributed  # its stubs leave out much of what it documents


class Group(Protocol):
    """All ranks call the same operations in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in x's place."""
        ...

    def largest_(self, x: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' numbers, in x's place."""
        ...

    def gathered(self, x_RV: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """On rank 0 the columns of all ranks, of which rank r has `widths[r]`, side by side; on others x."""
        ...


class Alone:
    """The group of a worker that is one process."""

    rank = 0
    size = 1

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def largest_(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gathered(self, x_RV: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return x_RV


class ProcessGroup:
    """A group over torch.distributed. Construction waits, up to `timeout_s`, until every rank has come."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._group = _open(store, rank, size, device, timedelta(seconds=timeout_s))
        self.sum_(torch.zeros(1, device=device))

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, _dist.ReduceOp.SUM)

    def largest_(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, _dist.ReduceOp.MAX)

    def gathered(self, x_RV: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        if not len(x_RV):
            return x_RV.new_empty(0, sum(widths)) if self.rank == 0 else x_RV
        padded = functional.pad(x_RV, (0, max(widths) - x_RV.shape[1])).contiguous()
        options = _dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else []
        self._group.gather([parts] if parts else [], [padded], options).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1) if parts else x_RV

    def _reduced(self, x: torch.Tensor, operation: Any) -> torch.Tensor:
        if x.numel():
            options = _dist.AllreduceOptions()
            options.reduceOp = operation
            self._group.allreduce([x], options).wait()
        return x


def open_store(door: socket.socket, timeout_s: float) -> Any:
    """Rank 0's store, in which the ranks of a process group find one another; it takes over the listening socket."""
    port = door.getsockname()[1]
    return _dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=door.detach(),
    )


def join_store(port: int, timeout_s: float) -> Any:
    """The same store, for another rank."""
    return _dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _open(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cuda":
        nccl = _dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return _dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = _dist.ProcessGroupGloo._Options()
    gloo._devices = [_dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo._timeout = timeout
    return _dist.ProcessGroupGloo(store, rank, size, gloo)
