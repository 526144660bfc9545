"""The part of a router that decides, on whatever clock it is given: the live router's half that a simulation runs too.

Owns: the load book, the prefix index, the dispatch queue, the links to workers, and what a worker's coming, going and
reports mean to these. Refuses to know: wires, processes, clients, what time it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from random import Random
from typing import Generic, TypeVar

from baton.proto.messages import LoadReport
from baton.router.config import RouterSettings
from baton.router.dispatch import Dispatcher, DispatchQueue
from baton.router.fork import Fork
from baton.router.journey import Errand, Journey, JourneySettings
from baton.router.legs import LegLink
from baton.router.load import LoadBook
from baton.router.placement import load_policy
from baton.router.prefix_index import PrefixIndex

Link = TypeVar("Link", bound=LegLink)
PrefixHashes = Callable[[tuple[int, ...], Errand], tuple[Hashable, ...]]


class RouterCore(Generic[Link]):
    """Belongs to one event loop. `prefix_hashes`: names of the full blocks of an errand's tokens so far. `book`: by the
    same settings."""

    def __init__(
        self,
        settings: RouterSettings,
        book: LoadBook,
        prefix_hashes: PrefixHashes,
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        self.book = book
        self.index = PrefixIndex()
        queue = DispatchQueue(self.book, self.index, load_policy(settings.policy, random), settings, clock())
        self.dispatcher = Dispatcher(queue, self.book, clock)
        self.links: dict[str, Link] = {}
        self._journey_settings = JourneySettings(settings.max_retries, settings.handoff_timeout_s)
        self._prefix_hashes = prefix_hashes
        self._clock = clock

    def connect(self, link: Link) -> None:
        """A worker is there: placement may use it."""
        description = link.description
        self.links[description.worker_id] = link
        self.book.add_worker(description)
        self.index.expect(description.worker_id, description.num_blocks)
        self.dispatcher.wake()

    def disconnect(self, link: Link) -> bool:
        """A worker is lost. Its legs have failed by now; what it had cached is gone. False if it was not connected."""
        worker_id = link.description.worker_id
        if self.links.get(worker_id) is not link:
            return False
        del self.links[worker_id]
        self.book.remove_worker(worker_id)
        self.index.drop(worker_id)
        self.dispatcher.wake()
        return True

    def reported(self, report: LoadReport) -> bool:
        """Takes in a load report; False if it is old, or nobody's."""
        if not self.book.report(report, self._clock()):
            return False
        self.dispatcher.wake()
        return True

    def journey(self, errand: Errand, fork: Fork | None = None) -> Journey:
        """`fork`: that of the request's outputs, if there are several."""
        return Journey(
            errand,
            self.dispatcher,
            self.links,
            self.book,
            lambda token_ids: self._prefix_hashes(token_ids, errand),
            self._journey_settings,
            self._clock,
            fork,
        )
