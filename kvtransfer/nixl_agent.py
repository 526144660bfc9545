"""One NIXL agent over UCX, reduced to what reading blocks from a peer's pool needs.

Owns: the import of NIXL and the environment that it reads, the agent, its registration, descriptor lists and handles.
Refuses to know: pulls, queues, deadlines. All calls come from the one thread that made the agent. NIXL's exceptions
leave as ConnectorError.

    NixlAgent() -> register(pool) -> metadata -> link(peer) -> read(...) -> finished? ... -> unlink(peer) -> shutdown()

It speaks to the bindings and not to NIXL's Python wrapper, which fixes the delay of the progress thread at zero: such a
thread polls without rest and takes a core. The delay is the longest sleep of a thread that otherwise wakes for traffic,
so a long one costs no speed (20 ms: 0.3 % of a core when idle; 1 ms: 2 %). There has to be such a thread: a peer's
first contact, and every read over TCP, wait for the source to make progress.

What measurements say and the callers rely on:
- `read` on one host copies within the call; over TCP it returns at once.
- A read that has been posted cannot be taken back: neither releasing its handle nor unlinking its peer stops the bytes.
  Only a read that has finished or has raised writes no more; or the end of the whole agent.
- The death of a peer raises in milliseconds; a peer that is stopped or cut off looks like a slow one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.kvtransfer.address import PoolAddress
from baton.kvtransfer.connector import AddressRefused, ConnectorError, KvPool, TransportUnavailable
from baton.proto.settings import TransferSettings

Indices = npt.NDArray[np.int32]

_PROGRESS_DELAY_US = 20_000
_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",  # else a line for each failed call; failures are told by exceptions
    "UCX_LOG_LEVEL": "fatal",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_TCP_USER_TIMEOUT": "30s",
    "UCX_TCP_SYN_CNT": "2",
}


@dataclass(frozen=True, slots=True)
class Link:
    """A loaded peer: its agent's name, its pool, and the descriptor lists of that, by the bytes of an entry."""

    agent_name: str
    place: PoolAddress
    lists: dict[int, int]


class NixlAgent:
    """Raises TransportUnavailable if NIXL is not installed or its UCX backend does not start."""

    def __init__(self, name: str, settings: TransferSettings) -> None:
        self.name = name
        self._nixl = _import_bindings(settings)
        self._errors = tuple(
            value for key, value in vars(self._nixl).items() if key.startswith("nixl") and key.endswith("Error")
        )
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = False
        try:
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
        except self._errors as error:
            raise TransportUnavailable(f"NIXL's UCX backend does not start: {error} ({_choice()})") from error
        self.means = _means()
        self._registered: Any = None
        self._place: PoolAddress | None = None
        self._own_lists: dict[int, int] = {}

    def register(self, pool: KvPool) -> PoolAddress:
        """Registers the pool; returns its address. The memory must stay mapped until `shutdown`."""
        place = PoolAddress.of(pool, "nixl", self.name)
        kind = self._memory_kind(place)
        region = (place.base, place.block_bytes * place.num_blocks, place.device_index, "")
        with self._translated(f"registering {pool.num_blocks} blocks of {pool.block_bytes} bytes"):
            self._registered = self._nixl.nixlRegDList(kind, [region])
            self._agent.registerMem(self._registered, [])
            self._own_lists[place.block_bytes] = self._own_list(place, place.block_bytes)
            self._place = place
            return PoolAddress.of(pool, "nixl", self.name, self._agent.getLocalMD())

    def link(self, address: PoolAddress) -> Link:
        """Loads a peer and connects to it. The address has been checked."""
        with self._translated(f"connecting to {address.name}"):
            loaded = self._agent.loadRemoteMD(address.metadata).decode()
        if loaded != address.name:
            raise AddressRefused(f"address of {address.name} carries the connection of {loaded}")
        link = Link(loaded, address, {})
        try:
            with self._translated(f"describing {address.num_blocks} blocks of {address.name}"):
                self._list_of(link, address.block_bytes)
        except ConnectorError:
            self._agent.invalidateRemoteMD(loaded)
            raise
        return link

    def unlink(self, link: Link) -> None:
        """Drops a peer, dead or alive. None of its reads may be under way."""
        for blocks in link.lists.values():
            with suppress(*self._errors):
                self._agent.releasedDlistH(blocks)
        with suppress(*self._errors):
            self._agent.invalidateRemoteMD(link.agent_name)

    def read(self, link: Link, source: Indices, destination: Indices, piece_bytes: int) -> int | None:
        """Posts a read of the peer's piece `source[i]` into our `destination[i]`; consecutive ones are merged.

        Both pools count in pieces of `piece_bytes`: blocks, or equal parts of them where the two have other blocks.
        Returns a handle for `finished`, None if it has finished already. If it raises, nothing writes any more.
        """
        with self._translated(f"reading {len(source)} pieces of {link.agent_name}"):
            if piece_bytes not in self._own_lists:
                assert self._place is not None
                self._own_lists[piece_bytes] = self._own_list(self._place, piece_bytes)
            handle: int = self._agent.makeXferReq(
                self._nixl.NIXL_READ,
                self._own_lists[piece_bytes],
                destination,
                self._list_of(link, piece_bytes),
                source,
                "",
                [],
                False,
            )
            try:
                under_way = self._agent.postXferReq(handle, "") == self._nixl.NIXL_IN_PROG
            except self._errors:
                self._free(handle)
                raise
        if under_way:
            return handle
        self._free(handle)
        return None

    def finished(self, handle: int, link: Link) -> bool:
        """Whether a read has ended; raises if it has failed. In both cases its handle is freed."""
        try:
            with self._translated(f"a read of {link.agent_name}"):
                under_way = self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG
        except ConnectorError:
            self._free(handle)
            raise
        if not under_way:
            self._free(handle)
        return not under_way

    def shutdown(self, links: list[Link], handles: list[int]) -> None:
        """Ends the agent. Reads of `handles` that are still under way write no more afterwards."""
        for handle in handles:
            self._free(handle)
        for link in links:
            self.unlink(link)
        with suppress(*self._errors):
            if self._registered is not None:
                for blocks in self._own_lists.values():
                    self._agent.releasedDlistH(blocks)
                self._agent.deregisterMem(self._registered, [])
        self._agent = None  # the last reference: the agent's own end closes its connections

    def _free(self, handle: int) -> None:
        with suppress(*self._errors):
            self._agent.releaseXferReq(handle)

    def _own_list(self, place: PoolAddress, piece_bytes: int) -> int:
        kind = self._memory_kind(place)
        made: int = self._agent.prepXferDlist(self._nixl.NIXL_INIT_AGENT, kind, _strided(place, piece_bytes), [])
        return made

    def _list_of(self, link: Link, piece_bytes: int) -> int:
        if piece_bytes not in link.lists:
            row = _strided(link.place, piece_bytes)
            kind = self._memory_kind(link.place)
            link.lists[piece_bytes] = self._agent.prepXferDlist(link.agent_name, kind, row, [])
        return link.lists[piece_bytes]

    def _memory_kind(self, address: PoolAddress) -> Any:
        return self._nixl.VRAM_SEG if address.on_gpu else self._nixl.DRAM_SEG

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise ConnectorError(f"{doing}: {error}") from error


def _strided(address: PoolAddress, piece_bytes: int) -> npt.NDArray[np.uint64]:
    """All pieces of a pool in one row (base, length, device, stride, count): a dense list, whose neighbours merge."""
    count = address.num_blocks * (address.block_bytes // piece_bytes)
    return np.array([[address.base, piece_bytes, address.device_index, piece_bytes, count]], np.uint64)


def _import_bindings(settings: TransferSettings) -> ModuleType:
    """Sets what UCX and NIXL read from the environment, then loads them: they look only then.

    What the operator has set stays, except where the settings say otherwise.
    """
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if settings.transport:
        os.environ["UCX_TLS"] = settings.transport
    if settings.network_device:
        os.environ["UCX_NET_DEVICES"] = settings.network_device
    reasons = []
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(str(error))
    raise TransportUnavailable(f"NIXL is not installed (pip install nixl): {'; '.join(reasons)}")


def _means() -> str:
    """What UCX may use. Which of it an endpoint uses, NIXL does not tell."""
    transports, devices = os.environ.get("UCX_TLS"), os.environ.get("UCX_NET_DEVICES")
    means = f"UCX by {transports}" if transports else "UCX by its own choice"
    return f"{means} on {devices}" if devices else means


def _choice() -> str:
    return ", ".join(f"{key}={os.environ.get(key, '')!r}" for key in ("UCX_TLS", "UCX_NET_DEVICES"))
