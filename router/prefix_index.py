"""Which worker probably has which prefix in its cache, as far as this router sent it there.

Owns: one bounded set of block hashes a worker, least recently used out first.
Refuses to know: tokens, how hashes are made, and what the worker has evicted meanwhile: an answer is a guess that costs
only time when it is wrong.

A hash chains all tokens before it, so a block is worth nothing without its ancestors. `record` touches a chain from its
end to its start, hence an ancestor is always younger than its descendants, eviction takes the deepest first, and what
is left of a chain is a prefix of it:

    chain   h0 h1 h2 h3 h4
    held     x  x  x  .  .      -> match 3, found by bisection
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from baton.scheduler.recency import Recency

DEFAULT_BLOCKS_PER_WORKER = 65_536


class PrefixIndex:
    """`blocks_per_worker` bounds what is remembered of a worker whose pool's size was not told by `expect`."""

    def __init__(self, blocks_per_worker: int = DEFAULT_BLOCKS_PER_WORKER) -> None:
        self._blocks_per_worker = blocks_per_worker
        self._num_blocks: dict[str, int] = {}
        self._held: dict[str, Recency[Hashable]] = {}

    def expect(self, worker_id: str, num_blocks: int) -> None:
        """The worker's pool has this many blocks: it cannot have cached more."""
        self._num_blocks[worker_id] = min(num_blocks, self._blocks_per_worker)

    def record(self, worker_id: str, hashes: Sequence[Hashable]) -> None:
        """The worker is about to have these blocks, the chain from its first block on."""
        if not hashes:
            return
        held = self._held.get(worker_id)
        if held is None:
            held = self._held[worker_id] = Recency()
        most = self._num_blocks.get(worker_id, self._blocks_per_worker)
        held.touch(hashes[:most][::-1])
        if len(held) > most:
            held.pop_oldest(len(held) - most)

    def match(self, worker_id: str, hashes: Sequence[Hashable]) -> int:
        """Number of leading blocks of the chain that the worker probably has."""
        recency = self._held.get(worker_id)
        if recency is None or not hashes or hashes[0] not in recency.batch_of:
            return 0
        held = recency.batch_of
        low, high = 1, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def uncached_tokens(self, worker_id: str, hashes: Sequence[Hashable], num_tokens: int, block_size: int) -> int:
        """Tokens that the worker would have to compute: the last one always is."""
        return max(1, num_tokens - self.match(worker_id, hashes) * block_size)

    def drop(self, worker_id: str) -> None:
        """The worker is gone, and its cache with it."""
        self._held.pop(worker_id, None)
        self._num_blocks.pop(worker_id, None)

    def size(self, worker_id: str) -> int:
        return len(self._held.get(worker_id, ()))
