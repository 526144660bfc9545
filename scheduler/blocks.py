"""The blocks of one worker's KV cache: who holds each, and what content it can be found by.

Owns: `BlockPool` (reference counts, the prefix cache, its eviction order) and the hashes that name a block's content.
Refuses to know: requests and sequences, bytes and devices; it is asked for counts and hands out numbers.

    free ---allocate---> held <--lend / reclaim--> lent       lent: every holder of the block has lent it
     ^                   |  ^                      |
     |   no name: release|  | hold (a prefix hit)  | hold: held by one more, who has not lent it
     +-------------------+  |                      |
     |                   |  |                      |
     +--allocate evicts--+--+--- cached <----------+          cached: nobody holds it, but its content has a name
     |
     +<---settle--- quarantined <---quarantine--- held        quarantined: nobody holds it, but somebody may write to it
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b

from baton.scheduler.recency import BlockRecency

HASH_BYTES = 16


def prefix_hashes(token_ids: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> list[Hashable]:
    """Names of the full blocks of `token_ids`: the i-th stands for all tokens [0, (i + 1) * block_size).

    Equal tokens under equal salt, adapter and block size have equal names in every process. Names are 128 bits of
    BLAKE2b, so that no request can be made to meet another's blocks by a collision.
    """
    hashes: list[Hashable] = []
    extend_prefix_hashes(hashes, token_ids, block_size, salt, adapter)
    return hashes


def extend_prefix_hashes(
    hashes: list[Hashable], token_ids: Sequence[int], block_size: int, salt: str = "", adapter: str = ""
) -> None:
    """Appends the names of those full blocks of `token_ids` that `hashes` lacks."""
    known = len(hashes)
    full = len(token_ids) // block_size
    if known >= full:
        return
    parent = hashes[-1] if hashes else _root(salt, adapter)
    assert isinstance(parent, bytes)
    content = array("i", token_ids[known * block_size : full * block_size]).tobytes()
    stride = len(content) // (full - known)
    for offset in range(0, len(content), stride):
        parent = blake2b(parent + content[offset : offset + stride], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def _root(salt: str, adapter: str) -> bytes:
    salt_bytes = salt.encode()
    framed = len(salt_bytes).to_bytes(8, "little") + salt_bytes + adapter.encode()
    return blake2b(framed, digest_size=HASH_BYTES).digest()


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each in exactly one of free, held, cached, lent, quarantined.

    A block may be held several times over; it goes back when the last holder releases it: to the cached ones if its
    content is registered under a name, else to the free ones. Cached blocks are evicted, least recently released first
    and of one release the deepest first, only when no free block is left.
    """

    __slots__ = (
        "_evictable",
        "_free",
        "_lend_counts",
        "_names",
        "_quarantined",
        "_ref_counts",
        "_registered",
        "num_blocks",
        "num_lent",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack, so that fresh blocks come in ascending runs
        self._evictable = BlockRecency(num_blocks)
        self._ref_counts = [0] * num_blocks
        self._lend_counts = [0] * num_blocks  # how many of the holders have lent it
        self.num_lent = 0
        self._quarantined: set[int] = set()
        self._names: list[Hashable | None] = [None] * num_blocks
        self._registered: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._evictable.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + self._evictable.num_blocks

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available - self.num_lent - len(self._quarantined)

    def match(self, hashes: Iterable[Hashable]) -> list[int]:
        """The blocks of the longest run of `hashes`, from the first on, that is registered. Holds none of them."""
        registered = self._registered
        found: list[int] = []
        for name in hashes:
            block_id = registered.get(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_cached(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are cached now: holding them takes as many from `num_available`."""
        ref_counts = self._ref_counts
        return sum(1 for block_id in block_ids if not ref_counts[block_id])

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one holds it, so that one release would not give it back."""
        return self._ref_counts[block_id] > 1

    def hold(self, block_ids: Iterable[int]) -> None:
        """One more holder for each of these blocks, which must be held, lent or cached."""
        ref_counts, lend_counts = self._ref_counts, self._lend_counts
        for block_id in block_ids:
            refs = ref_counts[block_id]
            if not refs:
                self._evictable.remove(block_id)
            elif refs == lend_counts[block_id]:
                self.num_lent -= 1
            ref_counts[block_id] = refs + 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks for new content, held once, ascending. There must be `num_blocks` available."""
        taken = self.allocate_singly(num_blocks)
        taken.sort()
        return taken

    def allocate_singly(self, num_blocks: int) -> list[int]:
        """The blocks that so many calls would get that ask for one each."""
        free, ref_counts = self._free, self._ref_counts
        taken = free[: -num_blocks - 1 : -1]
        del free[len(free) - len(taken) :]
        if len(taken) < num_blocks:
            taken += self._evict(num_blocks - len(taken))
        for block_id in taken:
            ref_counts[block_id] = 1
        return taken

    def release(self, block_ids: list[int]) -> None:
        """One holder less for each of these blocks, which are one sequence's in order, the deepest last."""
        ref_counts, lend_counts = self._ref_counts, self._lend_counts
        names, free = self._names, self._free
        evictable: list[int] = []
        for block_id in reversed(block_ids):
            refs = ref_counts[block_id] - 1
            ref_counts[block_id] = refs
            if refs:
                assert refs >= lend_counts[block_id], f"block {block_id} is released by one who has lent it"
                if refs == lend_counts[block_id]:
                    self.num_lent += 1
            elif names[block_id] is not None:
                evictable.append(block_id)
            else:
                free.append(block_id)
        if evictable:
            self._evictable.touch(evictable)

    def lend(self, block_ids: Iterable[int]) -> None:
        """One holder of each of these blocks will only keep it for somebody elsewhere, until `reclaim`."""
        ref_counts, lend_counts = self._ref_counts, self._lend_counts
        for block_id in block_ids:
            lenders = lend_counts[block_id] + 1
            lend_counts[block_id] = lenders
            if lenders == ref_counts[block_id]:
                self.num_lent += 1

    def reclaim(self, block_ids: Iterable[int]) -> None:
        """Undoes one `lend`; the blocks are still held."""
        ref_counts, lend_counts = self._ref_counts, self._lend_counts
        for block_id in block_ids:
            lenders = lend_counts[block_id]
            if lenders == ref_counts[block_id]:
                self.num_lent -= 1
            lend_counts[block_id] = lenders - 1

    def quarantine(self, block_ids: Iterable[int]) -> None:
        """Takes blocks from their only holder, to be used by nobody until `settle`. They must have no name."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] == 1, f"block {block_id} has {self._ref_counts[block_id]} holders"
            assert self._names[block_id] is None, f"block {block_id} is in the prefix cache"
            self._ref_counts[block_id] = 0
            self._quarantined.add(block_id)

    def settle(self, block_ids: list[int]) -> None:
        """Nobody writes to these quarantined blocks any more: they are free."""
        for block_id in reversed(block_ids):
            self._quarantined.remove(block_id)
            self._free.append(block_id)

    def register(self, block_ids: Iterable[int], names: Iterable[Hashable]) -> None:
        """Held blocks whose content is complete. Where another block has that content, that one keeps the name."""
        name_of, claim = self._names, self._registered.setdefault
        for block_id, name in zip(block_ids, names, strict=True):
            if claim(name, block_id) == block_id:
                name_of[block_id] = name

    def ref_counts(self) -> dict[int, int]:
        """Holders of each block that has any."""
        return {block_id: refs for block_id, refs in enumerate(self._ref_counts) if refs}

    def lend_counts(self) -> dict[int, int]:
        """Lenders of each block that has any."""
        return {block_id: lenders for block_id, lenders in enumerate(self._lend_counts) if lenders}

    def check(self) -> None:
        """Raises AssertionError unless each block is in exactly one of its five places and every count agrees."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        free, cached = set(self._free), set(self._evictable)
        assert len(cached) == len(self._evictable)
        lent = {b for b, refs in self.ref_counts().items() if refs == self._lend_counts[b]}
        held = self.ref_counts().keys() - lent
        places = (free, held, cached, lent, self._quarantined)
        assert set().union(*places) == set(range(self.num_blocks)), "a block is nowhere"
        assert sum(map(len, places)) == self.num_blocks, "a block is in two places"
        assert all(self._lend_counts[b] <= self._ref_counts[b] for b in range(self.num_blocks)), "lent by no holder"
        assert (len(lent), len(held)) == (self.num_lent, self.num_held)
        named = {block_id: name for block_id, name in enumerate(self._names) if name is not None}
        assert named == {block_id: name for name, block_id in self._registered.items()}, "names are not one to one"
        assert cached <= named.keys() <= cached | held | lent, "a name on a block without content"

    def _evict(self, num_blocks: int) -> list[int]:
        names, registered = self._names, self._registered
        evicted = self._evictable.pop_oldest(num_blocks)
        for block_id in evicted:
            name = names[block_id]
            assert name is not None
            del registered[name]
            names[block_id] = None
        return evicted
