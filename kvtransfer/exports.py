"""What every connector keeps beside its transport: which blocks are lent under which id, and checksums at both ends.

Owns: the book of exports, and the check of what has arrived. Refuses to know: transports. A reader can reach the whole
registered pool, so the book guards no memory: it is what a worker has promised.
"""

from __future__ import annotations

import itertools
import threading

from baton.kvtransfer.connector import ConnectorError, KvPool, Pull
from baton.kvtransfer.layout import checksum, head_checksums, joined

_SAMPLE_EVERY = 16


class Exports:
    """Exports of one pool. `checksums`: off, always, or sampled: every 16th export, the first one included."""

    def __init__(self, checksums: str) -> None:
        self._checksums = checksums
        self._lock = threading.Lock()
        self._calls = itertools.count()
        self._blocks: dict[str, tuple[int, ...]] = {}

    def add(self, pool: KvPool, export_id: str, block_ids: tuple[int, ...]) -> int:
        """Returns the checksum of these blocks, 0 if none is computed. Raises ConnectorError on a block not there."""
        pool.require_blocks(block_ids)
        with self._lock:
            self._blocks[export_id] = self._blocks.get(export_id, ()) + block_ids
            call = next(self._calls)
        wanted = self._checksums == "always" or (self._checksums == "sampled" and call % _SAMPLE_EVERY == 0)
        return checksum(pool.tensor, block_ids, pool.first_head) if wanted else 0

    def release(self, export_id: str) -> bool:
        """False if there is no such export: release may race with the end of a peer."""
        with self._lock:
            return self._blocks.pop(export_id, None) is not None

    def __len__(self) -> int:
        return len(self._blocks)


def verify_checksum(pool: KvPool, pull: Pull) -> tuple[int, ...]:
    """Raises ConnectorError if what has landed is not what the source exported; a pull without checksum passes.

    Of a pull of some heads it returns what it finds, for somebody who knows what has become of the others.
    """
    if not pull.checksum:
        return ()
    landed = head_checksums(pool.tensor, pull.destination_blocks, pool.first_head)
    if pull.heads is not None:
        return landed[pull.heads.start - pool.first_head : pull.heads.stop - pool.first_head]
    if joined(landed) != pull.checksum:
        raise ConnectorError(
            f"checksum {joined(landed):#010x} over {len(pull.destination_blocks)} blocks, "
            f"the source has {pull.checksum:#010x}"
        )
    return ()
