"""The way on which bytes move between two connectors: a process group of two ranks, and the memory beside it.

Owns: all that is asked of torch.distributed, the store through which the two ranks meet, staging slots, and copies
between a pool and a slot. Refuses to know: pulls, requests, peers' names. The source is rank 0, the reader rank 1.

    pool --gather--> slot --send--> GlooLane | NcclLane --receive--> slot --scatter--> pool

A group belongs to one connection and ends with it: a group in which one operation has failed is of no use any more.
Bytes arrive in slots only, so whoever gives a transfer up need not wait for the wire: nothing is scattered any more.
One thread uses a lane. Its waits end with the peer's death or with a time limit, and with nothing else.

gloo moves host memory over TCP; a pool on a GPU is gathered into pinned memory for it. NCCL moves between two GPUs and
refuses one GPU twice. It does not see that a peer on the same machine has died, so waits here look at the channel.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from baton.kvtransfer.channel import MAX_REQUEST_BLOCKS, Channel, Entry
from baton.kvtransfer.connector import ConnectorError, KvPool, TransportUnavailable
from baton.kvtransfer.layout import coalesce, copy_runs, rows

SOURCE, READER = 0, 1
NUM_SLOTS = 4  # one fills at the source, two travel, one is emptied at the reader
_HOST_SLOT_BYTES = 4 << 20
_GPU_SLOT_BYTES = 16 << 20
_GLOO_OPEN_S = 5.0
_GLOO_OPEN_STEPS = 5  # gloo waits for the other end's connection for as many times the limit that it is given
_GLOO_WAIT_S = 10.0  # for one message; nothing else ends a wait in gloo, so the most that an exit may have to wait
_NCCL_OPEN_S = 30.0  # the first communicator of a process loads kernels and probes the machine
_NCCL_POLL_S = 0.0002
_EXIT_WAIT_S = 15.0
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch ends the process when an operation outlasts its time limit
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_torch_distributed: Any = torch.distributed  # its stubs lack the options of the groups
_cuda: Any = torch.cuda  # its streams and events are not typed
_Store: Any = getattr(torch.distributed, "Store", object)  # absent from a torch that `require_gloo` will refuse


@dataclass(frozen=True, slots=True)
class Slot:
    """Staging memory for some blocks, shaped like a small pool. `stream`: on which a GPU fills or empties it."""

    blocks: torch.Tensor
    stream: torch.cuda.Stream | None

    def gather(self, pool: KvPool, block_ids: Sequence[int]) -> None:
        """Copies blocks of the pool into the slot; on a GPU the stream does, afterwards."""
        if self.blocks.is_cuda:
            with torch.cuda.stream(self.stream):
                index = torch.tensor(block_ids, dtype=torch.int64, device=self.blocks.device)
                torch.index_select(rows(pool.tensor), 0, index, out=rows(self.blocks)[: len(block_ids)])
        else:
            with self._current():
                copy_runs(pool.tensor, self.blocks, coalesce(block_ids, range(len(block_ids))))

    def scatter(self, pool: KvPool, block_ids: Sequence[int]) -> None:
        """Copies the slot's first blocks into the pool. When it returns nothing writes to the pool any more."""
        if self.blocks.is_cuda:
            with torch.cuda.stream(self.stream):
                index = torch.tensor(block_ids, dtype=torch.int64, device=self.blocks.device)
                rows(pool.tensor).index_copy_(0, index, rows(self.blocks)[: len(block_ids)])
            assert self.stream is not None
            self.stream.synchronize()
        else:
            with self._current():
                copy_runs(self.blocks, pool.tensor, coalesce(range(len(block_ids)), block_ids))

    def piece(self, num_blocks: int) -> torch.Tensor:
        """The slot's first blocks as bytes."""
        return self.blocks[:num_blocks].view(-1).view(torch.uint8)

    def _current(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


@dataclass(frozen=True, slots=True)
class Moving:
    """A message under way. `arrived`: where a GPU's stream has it behind it."""

    work: Any
    arrived: Any = None


class Lane(Protocol):
    """Messages from the source to the reader, in order. Every call raises ConnectorError if the group has failed."""

    @property
    def slots(self) -> list[Slot]:
        """NUM_SLOTS pieces of staging memory, each of `slot_blocks` blocks; theirs until `close`."""
        ...

    @property
    def receives_ahead(self) -> bool:
        """Whether `receive` is best called before the message is under way, and not when it is."""
        ...

    def send(self, slot: Slot, num_blocks: int) -> Moving: ...

    def receive(self, slot: Slot, num_blocks: int) -> Moving: ...

    def wait(self, moving: Moving) -> None:
        """Returns when the message has left its slot, or is there."""
        ...

    def close(self) -> None:
        """Ends the group. No `Moving` of it may be kept."""
        ...


def gpu_of(pool: KvPool) -> str:
    """Names the GPU that holds the pool, empty if NCCL cannot reach the pool."""
    if not (pool.tensor.is_cuda and _torch_distributed.is_nccl_available()):
        return ""
    return str(torch.cuda.get_device_properties(pool.tensor.device).uuid)


def choose_lane(source_gpu: str, reader_gpu: str) -> str:
    return "nccl" if source_gpu and reader_gpu and source_gpu != reader_gpu else "gloo"


def slot_blocks(lane: str, pool: KvPool) -> int:
    """The most blocks that one message carries; both ends come to the same number."""
    slot_bytes = _GPU_SLOT_BYTES if lane == "nccl" else _HOST_SLOT_BYTES
    return min(max(1, slot_bytes // pool.block_bytes), MAX_REQUEST_BLOCKS)


def opening_s(lane: str, timeout_s: float) -> float:
    """How long a lane may take to open."""
    return max(timeout_s, _NCCL_OPEN_S) if lane == "nccl" else min(timeout_s, _GLOO_OPEN_S)


def require_gloo() -> None:
    """Raises TransportUnavailable if this build of torch has no gloo."""
    if not (_torch_distributed.is_available() and _torch_distributed.is_gloo_available()):
        raise TransportUnavailable(f"torch {torch.__version__} was built without gloo")


def open_lane(kind: str, channel: Channel, rank: int, pool: KvPool, timeout_s: float, interface: str) -> Lane:
    """Both ends call it at once. Returns when a message has passed: what has opened works."""
    meeting = _Meeting(channel, opening_s(kind, timeout_s))
    lane: Lane
    if kind == "nccl":
        lane = NcclLane(meeting, channel, rank, pool, timeout_s, interface)
    else:
        lane = GlooLane(meeting, channel, rank, pool, timeout_s)
    try:
        lane.wait(lane.send(lane.slots[0], 1) if rank == SOURCE else lane.receive(lane.slots[0], 1))
    except ConnectorError:
        lane.close()
        raise
    return lane


class GlooLane:
    """See `Lane`."""

    def __init__(self, meeting: _Meeting, channel: Channel, rank: int, pool: KvPool, timeout_s: float) -> None:
        on_gpu = pool.tensor.is_cuda
        self._limit = timedelta(seconds=min(timeout_s, _GLOO_WAIT_S))
        with _translated("opening gloo"):
            options = _torch_distributed.ProcessGroupGloo._Options()
            options._devices = [_torch_distributed.ProcessGroupGloo.create_device(hostname=channel.own_host)]
            options._threads = 1  # for collectives, of which there are none
            options._timeout = timedelta(seconds=opening_s("gloo", timeout_s) / _GLOO_OPEN_STEPS)
            self._group: Any = _torch_distributed.ProcessGroupGloo(meeting, rank, 2, options)
            shape = (slot_blocks("gloo", pool), *pool.tensor.shape[1:])
            self._slots = [
                Slot(
                    torch.zeros(shape, dtype=pool.tensor.dtype, pin_memory=on_gpu),
                    _cuda.Stream(pool.tensor.device) if on_gpu else None,
                )
                for _ in range(NUM_SLOTS)
            ]

    @property
    def slots(self) -> list[Slot]:
        return self._slots

    @property
    def receives_ahead(self) -> bool:
        """The sender then writes at once, else it first has to hear that the receiver is ready."""
        return True

    def send(self, slot: Slot, num_blocks: int) -> Moving:
        with _translated("sending over gloo"):
            return Moving(self._group.send([slot.piece(num_blocks)], READER, 0))

    def receive(self, slot: Slot, num_blocks: int) -> Moving:
        with _translated("receiving over gloo"):
            return Moving(self._group.recv([slot.piece(num_blocks)], SOURCE, 0))

    def wait(self, moving: Moving) -> None:
        with _translated("gloo"):
            moving.work.wait(self._limit)

    def close(self) -> None:
        with _translated("ending gloo"):
            self._group = None  # the last reference: the group's own end closes its connection
        self._slots = []  # after the group, whose thread may be reading or writing them until then


class NcclLane:
    """See `Lane`. Has not been run: no machine with two GPUs was at hand."""

    def __init__(
        self, meeting: _Meeting, channel: Channel, rank: int, pool: KvPool, timeout_s: float, interface: str
    ) -> None:
        device = pool.tensor.device
        self._channel = channel
        self._timeout_s = timeout_s
        self._opened = False
        for key, value in _NCCL_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        if interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        with _translated("opening NCCL"):
            torch.cuda.set_device(device)  # of this thread, which is the lane's
            options = _torch_distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=opening_s("nccl", timeout_s))
            self._group: Any = _torch_distributed.ProcessGroupNCCL(meeting, rank, 2, options)
            shape = (slot_blocks("nccl", pool), *pool.tensor.shape[1:])
            self._slots = [
                Slot(torch.zeros(shape, dtype=pool.tensor.dtype, device=device), _cuda.Stream(device))
                for _ in range(NUM_SLOTS)
            ]
            torch.cuda.current_stream(device).synchronize()  # the zeros, before other streams write over them

    @property
    def slots(self) -> list[Slot]:
        return self._slots

    @property
    def receives_ahead(self) -> bool:
        """A receive without a sender is a kernel that waits on the GPU and keeps others from it."""
        return False

    def send(self, slot: Slot, num_blocks: int) -> Moving:
        return self._start(self._group.send, slot, num_blocks, READER)

    def receive(self, slot: Slot, num_blocks: int) -> Moving:
        return self._start(self._group.recv, slot, num_blocks, SOURCE)

    def wait(self, moving: Moving) -> None:
        assert moving.arrived is not None
        limit_s = self._timeout_s if self._opened else opening_s("nccl", self._timeout_s)
        deadline = time.monotonic() + limit_s
        with _translated("NCCL"):
            while not moving.arrived.query():
                if self._channel.hung_up:
                    raise ConnectorError("NCCL: the peer has hung up")
                if time.monotonic() > deadline:
                    raise ConnectorError(f"NCCL: no message within {limit_s:.1f} s")
                time.sleep(_NCCL_POLL_S)
        self._opened = True

    def close(self) -> None:
        """Aborts: an orderly end would wait for the peer."""
        with _translated("ending NCCL"):
            self._group.abort()
            self._group = None
        self._slots = []

    def _start(self, move: Any, slot: Slot, num_blocks: int, peer: int) -> Moving:
        """NCCL waits for what the slot's stream was given before, and the stream for NCCL; this thread for neither.

        One message is one ncclSend with one ncclRecv: a slot is one piece, so there is nothing to group.
        """
        with _translated("NCCL"), torch.cuda.stream(slot.stream):
            work = move([slot.piece(num_blocks)], peer, 0)
            work.wait()
            arrived = _cuda.Event()
            arrived.record()
            return Moving(work, arrived)


class _Meeting(_Store):  # type: ignore[misc]
    """The two-rank store that a group forms by, kept in step through the channel: what one end sets both can get.

    So a group needs no port and no server of its own for that, and nobody meets who has not been let in.
    """

    def __init__(self, channel: Channel, wait_s: float) -> None:
        super().__init__()
        self._channel = channel
        self._deadline = time.monotonic() + wait_s
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._entries[key] = value
        self._channel.send(Entry(key, value))

    def get(self, key: str) -> bytes:
        while key not in self._entries:
            message = self._channel.receive(max(0.0, self._deadline - time.monotonic()))
            if message is None:
                raise ConnectorError(f"the peer has not set {key} in time")
            if not isinstance(message, Entry):
                raise ConnectorError(f"{type(message).__name__} while the lane opens")
            self._entries[message.key] = message.value
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._entries.pop(key, None) is not None

    def clone(self) -> _Meeting:
        return self


class _Calls:
    """Which threads are inside torch.distributed.

    A thread that comes back from there while the interpreter ends takes the process down with an abort. So they are
    waited for at exit, when each has a time limit, and no other is let in.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._ended = False
        atexit.register(self._end)

    def __enter__(self) -> None:
        with self._changed:
            while self._ended:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._inside, _EXIT_WAIT_S)


_CALLS = _Calls()


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Around every call of torch.distributed. It reports each failure as a RuntimeError of one kind or another."""
    try:
        with _CALLS:
            yield
    except RuntimeError as error:
        raise ConnectorError(f"{doing}: {str(error).splitlines()[0]}") from error
