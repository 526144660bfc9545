"""Reads from a prefill worker for the sake of measuring: into free blocks that are taken out of use meanwhile.

Owns: the reads of one measurement and the blocks under them. Refuses to know: what the figures mean (`lanes`), and when
to measure (`receiver`).

    blocks borrowed -> one block read: that makes the connection -> all read once, twice at a time, 4 times .., until a
                       read takes 5 ms or the bytes are spent -> all settled -> blocks given back

What is read is whatever lies in the peer's first blocks. It is never looked at, and the blocks here have no name.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from baton.decode_worker.lanes import MIN_BYTES, SURE_S, LaneBook
from baton.decode_worker.peer import PeerLink
from baton.engine.clock import Clock
from baton.kvtransfer.connector import Connector, Pull, PullEvent, PullState

log = logging.getLogger(__name__)

PROBE_S = 10.0
ROUND_BYTES = 2 << 20  # that are read at a time: blocks are held for no more
CLOSE_S = 5.0


class Lender(Protocol):
    """Who lends free blocks. May be called from the event loop; both are done in the order of the calls."""

    def borrow(self, name: str, num_blocks: int, answer: Callable[[list[int]], object]) -> None:
        """Takes at most so many free blocks out of use; `answer` hears which, on another thread."""
        ...

    def settle(self, name: str) -> None:
        """Gives back what was borrowed under this name."""
        ...


@dataclass(slots=True)
class _Probe:
    """`over`: nothing more will be read. Its blocks go back when that is so and no read is unsettled."""

    name: str
    blocks: list[int] = field(default_factory=list)
    undecided: int = 0
    unsettled: int = 0
    num_bytes: int = 0
    failure: str = ""
    over: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class Prober:
    """Measures one lane at a time. `started` hears that there are reads to poll for."""

    def __init__(
        self,
        connector: Connector,
        lender: Lender,
        lanes: LaneBook,
        block_bytes: int,
        pull_ids: Iterator[int],
        clock: Clock,
        started: Callable[[], None],
    ) -> None:
        self._connector = connector
        self._lender = lender
        self._lanes = lanes
        self._block_bytes = block_bytes
        self._pull_ids = pull_ids
        self._clock = clock
        self._started = started
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        self._reads: dict[int, _Probe] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = False

    @property
    def is_reading(self) -> bool:
        return bool(self._reads)

    async def measure(self, link: PeerLink, num_bytes: int) -> None:
        """Reads at most so many bytes from the peer, and tells the lanes how that went, within PROBE_S of its turn."""
        probe = _Probe(f"probe-{next(self._numbers)}")
        try:
            async with self._turn, asyncio.timeout(PROBE_S):
                most = min(-(-min(num_bytes // 4, ROUND_BYTES) // self._block_bytes), link.num_blocks)
                if most * self._block_bytes < MIN_BYTES or self._closed:
                    return
                probe.blocks = await self._borrow(probe.name, most)
                if len(probe.blocks) * self._block_bytes >= MIN_BYTES:
                    await self._read(probe, link, num_bytes)
        except TimeoutError:
            self._lanes.unmeasured(link.incarnation, f"not done within {PROBE_S:.0f} s")
        finally:
            probe.over = True
            self._give_back(probe)

    def take(self, event: PullEvent) -> bool:
        """Takes in what happened to a read, if it is one of a probe."""
        probe = self._reads.get(event.pull_id)
        if probe is None:
            return False
        if event.state is PullState.SETTLED:
            del self._reads[event.pull_id]
            if not self._reads:
                self._quiet.set()
            probe.unsettled -= 1
            self._give_back(probe)
            return True
        probe.undecided -= 1
        probe.num_bytes += event.num_bytes
        probe.failure = probe.failure or event.reason
        if not probe.undecided:
            probe.decided.set()
        return True

    async def close(self) -> None:
        """Begins no measurement any more; returns when the one under way is over and its reads have settled."""
        self._closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                async with self._turn:
                    await self._quiet.wait()

    async def _borrow(self, name: str, num_blocks: int) -> list[int]:
        loop = asyncio.get_running_loop()
        lent: asyncio.Future[list[int]] = loop.create_future()

        def hear(blocks: list[int]) -> None:
            if not lent.done():
                lent.set_result(blocks)
            else:
                self._lender.settle(name)

        self._lender.borrow(name, num_blocks, lambda blocks: loop.call_soon_threadsafe(hear, blocks))
        return await lent

    async def _read(self, probe: _Probe, link: PeerLink, num_bytes: int) -> None:
        blocks = probe.blocks
        await self._round(probe, link, blocks[:1], 1)
        left = num_bytes - self._block_bytes
        for count in (1, 2, 4, 8, 16, 32):
            round_bytes = count * len(blocks) * self._block_bytes
            if left < round_bytes or probe.failure or self._closed:
                break
            left -= round_bytes
            began_s = self._clock()
            await self._measured_round(probe, link, blocks, count)
            if count > 1 and self._clock() - began_s > SURE_S * count:
                break
        if probe.failure:
            self._lanes.unmeasured(link.incarnation, probe.failure)
        else:
            self._lanes.probed(link.incarnation)

    async def _measured_round(self, probe: _Probe, link: PeerLink, blocks: list[int], count: int) -> None:
        for _ in range(count):
            self._lanes.reading(link.incarnation)
        try:
            await self._round(probe, link, blocks, count)
        finally:
            transport = self._connector.transport(link.incarnation)
            for left in reversed(range(count)):
                counts = not left and not probe.undecided and not probe.failure
                self._lanes.read(link.incarnation, probe.num_bytes if counts else 0, transport)

    async def _round(self, probe: _Probe, link: PeerLink, blocks: list[int], count: int) -> None:
        """Reads the same blocks `count` times at once; returns when all of that is decided."""
        probe.undecided, probe.unsettled, probe.num_bytes = count, probe.unsettled + count, 0
        probe.decided.clear()
        self._quiet.clear()
        sources = tuple(range(len(blocks)))
        for _ in range(count):
            number = next(self._pull_ids)
            self._reads[number] = probe
            self._connector.pull(Pull(number, link.incarnation, link.kv_address, sources, tuple(blocks)))
        self._started()
        await probe.decided.wait()

    def _give_back(self, probe: _Probe) -> None:
        if probe.over and not probe.unsettled and probe.blocks:
            probe.blocks = []
            self._lender.settle(probe.name)
