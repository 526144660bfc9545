"""Moves KV blocks between pools of one process, by copying on a thread of its own.

Owns: the registry of the process's attached pools, and the thread that copies. Refuses to know: other processes.
It keeps every promise of the interface, so what runs on it runs on a wire.

    attach: pool -> registry          pull -> [queue] -> thread: registry -> copy -> checksum -> outcomes -> poll
    close:  pool out of the registry; later pulls of its address fail
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import deque

from baton.kvtransfer.address import PoolAddress
from baton.kvtransfer.connector import ConnectorError, KvPool, Pull, PullEvent
from baton.kvtransfer.exports import Exports, verify_checksum
from baton.kvtransfer.layout import coalesce, copy_heads, copy_runs
from baton.kvtransfer.outcomes import Outcomes
from baton.proto.settings import TransferSettings

_CLOSE_WAIT_S = 5.0

# Stands for the machine's wire: the one place where two connectors of a process meet, as two NIXL agents meet in the
# kernel. Written by attach and close only, one entry each.
_ATTACHED: dict[str, LocalConnector] = {}


class LocalConnector:
    """See `Connector`. The address of a pool is the process id and a random name."""

    def __init__(self, settings: TransferSettings) -> None:
        self._name = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._pool: KvPool | None = None
        self._exports = Exports(settings.checksums)
        self._outcomes = Outcomes()
        self._wake = threading.Condition()
        self._waiting: deque[Pull] = deque()
        self._closed = False
        self._peers: dict[str, bytes] = {}
        self._thread = threading.Thread(target=self._copy_loop, name="kv-local", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return "local"

    def attach(self, pool: KvPool) -> bytes:
        if self._pool is not None or self._closed:
            raise ConnectorError("a connector is attached to one pool, once")
        address = PoolAddress.of(pool, self.name, self._name).encode()
        self._pool = pool
        _ATTACHED[self._name] = self
        return address

    def export(self, export_id: str, block_ids: tuple[int, ...]) -> int:
        return self._exports.add(self._attached_pool(), export_id, block_ids)

    def pull(self, pull: Pull) -> None:
        self._outcomes.opened(pull.pull_id)
        with self._wake:
            if not self._closed:
                self._waiting.append(pull)
                self._wake.notify()
                return
        self._outcomes.failed(pull.pull_id, "the connector is closed", quiet=True)

    def poll(self) -> list[PullEvent]:
        return self._outcomes.drain()

    def transport(self, peer: str) -> str:
        return "local, a copy"

    def forget(self, peer: str) -> None:
        """Pulls of the peer that wait fail now; one that is being copied ends as it would."""
        with self._wake:
            self._peers.pop(peer, None)
            gone = [pull for pull in self._waiting if pull.peer == peer]
            self._waiting = deque(pull for pull in self._waiting if pull.peer != peer)
        for pull in gone:
            self._outcomes.failed(pull.pull_id, f"peer {peer}: given up", quiet=True)

    def release(self, export_id: str) -> None:
        self._exports.release(export_id)

    def close(self) -> None:
        _ATTACHED.pop(self._name, None)  # before the thread ends: nobody finds a pool that is going away
        with self._wake:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            self._wake.notify()
        for pull in waiting:
            self._outcomes.failed(pull.pull_id, "the connector is closed", quiet=True)
        self._thread.join(_CLOSE_WAIT_S)

    def _attached_pool(self) -> KvPool:
        if self._pool is None:
            raise ConnectorError("no pool is attached")
        return self._pool

    def _copy_loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                pull = self._waiting.popleft()
            try:
                num_bytes, checksums = self._copy(pull)
            except (ConnectorError, ValueError) as error:
                self._outcomes.failed(pull.pull_id, f"peer {pull.peer}: {error}", quiet=True)
            else:
                self._outcomes.finished(pull.pull_id, num_bytes, checksums)

    def _copy(self, pull: Pull) -> tuple[int, tuple[int, ...]]:
        mine = self._attached_pool()
        address = PoolAddress.decode(pull.address)
        cut = address.require_match(mine, self.name, pull.heads)
        with self._wake:
            if self._peers.setdefault(pull.peer, pull.address) != pull.address:
                raise ConnectorError("another address than before: an incarnation has one")
        peer = _ATTACHED.get(address.name)
        if peer is None or peer._pool is None:
            raise ConnectorError(f"{address.name} is not attached in process {os.getpid()}")
        address.require_blocks(pull.source_blocks)
        mine.require_blocks(pull.destination_blocks)
        source, destination = peer._pool.tensor, mine.tensor
        if cut.is_whole:
            copy_runs(source, destination, coalesce(pull.source_blocks, pull.destination_blocks))
        else:
            copy_heads(source, destination, pull.source_blocks, pull.destination_blocks, cut)
        num_bytes = len(pull.destination_blocks) * mine.block_bytes * cut.num_heads // cut.destination_heads
        return num_bytes, verify_checksum(mine, pull)
