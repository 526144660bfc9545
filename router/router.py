"""What one router process knows and shares between its gateway and its fleet.

Owns: the workers' paces, the requests in progress, whether it is ready or draining. What it decides with is its core's.
Refuses to know: faces (`service`, `http`), a client's request (`gateway`), processes (`baton.fleet`), one output's
steps (`journey`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Hashable
from contextlib import aclosing
from random import Random

from baton.proto.credentials import ClusterWire
from baton.proto.messages import LoadReport, Role, Sampling
from baton.router.admission import ModelLimits
from baton.router.config import ClusterConfig
from baton.router.core import RouterCore
from baton.router.fork import Fork
from baton.router.journey import Ended, Errand
from baton.router.link import WorkerLink
from baton.router.load import LoadBook
from baton.router.observe import Observers
from baton.router.pace import Paces
from baton.router.recent import RecentRequests
from baton.router.replicas import Replicas
from baton.router.tokenizer import Tokenizer
from baton.scheduler.blocks import prefix_hashes

log = logging.getLogger(__name__)


class Router(RouterCore[WorkerLink]):
    """One router's state; belongs to one event loop."""

    def __init__(self, config: ClusterConfig, tokenizer: Tokenizer, number: int = 0) -> None:
        """`number`: of this replica, where there are several."""
        block_size = config.pools[0].engine.block_size

        def hashes(token_ids: tuple[int, ...], errand: Errand) -> tuple[Hashable, ...]:
            return tuple(prefix_hashes(token_ids, block_size, errand.cache_salt, errand.adapter))

        book = LoadBook(config.router.credit_steps, config.router.replicas)
        super().__init__(config.router, book, hashes, time.monotonic, Random())
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.started_s = time.monotonic()
        self.tokenizer = tokenizer
        self.wire = ClusterWire(config.security.cluster_tls)
        self.replicas = Replicas(number, config.router.replicas, self.wire)
        self.observers = Observers()
        self.recent = RecentRequests()
        self.observers.add(self.recent)
        self.paces = Paces()
        self.draining = False
        self.closing = asyncio.Event()
        self.ready = asyncio.Event()
        self.num_running = 0
        self.num_requests = 0
        self.num_retries = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._journey_numbers = itertools.count(1)

    # --- workers ----------------------------------------------------------------------------------------------------

    def disconnect(self, link: WorkerLink) -> bool:
        if not super().disconnect(link):
            return False
        self.paces.drop(link.worker_id)
        return True

    def reported(self, report: LoadReport) -> bool:
        if not super().reported(report):
            return False
        self.paces.report(report, time.monotonic())
        return True

    def limits(self) -> ModelLimits:
        """What a request may ask for, given the workers that are there."""
        descriptions = [link.description for link in self.links.values()]
        lengths = [description.max_model_len for description in descriptions]
        pools = [description.num_blocks * description.block_size for description in descriptions]
        return ModelLimits(
            vocab_size=min((description.vocab_size for description in descriptions), default=self.tokenizer.vocab_size),
            max_model_len=min(lengths, default=self.tokenizer.max_position_embeddings or 2048),
            eos_token_ids=tuple(self.tokenizer.eos_token_ids),
            max_pool_tokens=min(pools, default=None),
            max_request_tokens=self.config.router.max_request_tokens or None,
        )

    # --- requests ---------------------------------------------------------------------------------------------------

    def fork(self, n: int) -> Fork | None:
        """What n outputs of a request share; None for one, or where their worker would not find their prompt again."""
        pools = [pool for pool in self.config.pools if pool.role is not Role.PREFILL]
        return Fork() if n > 1 and all(pool.scheduler.prefix_cache for pool in pools) else None

    @property
    def model_name(self) -> str:
        """What HTTP clients and metrics call the model."""
        return self.config.router.served_model_name or self.config.model

    def new_journey_id(self) -> str:
        """Unique in the cluster: the router's incarnation and a number."""
        return f"{self.incarnation[:8]}-{next(self._journey_numbers)}"

    def begin(self) -> None:
        """Counts a client's request in."""
        self.num_requests += 1
        self.num_running += 1
        self._idle.clear()

    def end(self, num_retries: int) -> None:
        """Counts it out, on every way."""
        self.num_retries += num_retries
        self.num_running -= 1
        if self.num_running == 0:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Takes no more requests; returns whether those in progress ended in time."""
        self.draining = True
        self.closing.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def prove_ready(self) -> None:
        """Sends small requests of its own, as many as the largest pool has workers, one after the other.

        Ready means that transfers have worked. Raises RuntimeError with the reason if one does not.
        """
        token_ids = tuple(self.tokenizer.encode("ready")) or (0,)
        for _ in range(self._num_proofs()):
            errand = Errand(
                journey_id=self.new_journey_id(),
                prompt_token_ids=token_ids,
                sampling=Sampling(temperature=0.0, max_tokens=2),
                arrived_s=time.monotonic(),
                deadline_s=time.monotonic() + self.config.router.worker_start_timeout_s,
                cache_salt="ready",
            )
            last = None
            async with aclosing(self.journey(errand).run()) as pieces:
                async for piece in pieces:
                    last = piece
            if not isinstance(last, Ended):
                raise RuntimeError(f"the first request did not go through: {last}")
        self.ready.set()

    def _num_proofs(self) -> int:
        sizes = {role: sum(pool.size for pool in self.config.pools if pool.role is role) for role in Role}
        return max(1, sizes[Role.PREFILL], sizes[Role.DECODE], sizes[Role.COLOCATED])
