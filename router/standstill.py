"""A request at the head of the line that nobody could take, and whose change could end that.

Owns: the rule that nothing but a change of a worker that it lacks helps it, so that the many reports of all others need
not be weighed. Refuses to know: the line, and who is chosen when somebody can take it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from baton.proto.messages import Role
from baton.router.placement import Candidate, PlacementQuery, WorkerView, able_to_decode, able_to_prefill

SOURCES = frozenset({Role.PREFILL, Role.COLOCATED})
SINKS = frozenset({Role.DECODE, Role.COLOCATED})


def lacking(query: PlacementQuery, prefill: Collection[Candidate], decode: Collection[Candidate]) -> frozenset[Role]:
    """The roles of which one must change before a pair, or one co-located worker, can take what none can take now."""
    if all(candidate.view.draining for candidate in decode):
        return SOURCES | SINKS
    return SINKS if able_to_prefill(query, prefill) else SOURCES


@dataclass(slots=True)
class Standstill:
    """`views`: all workers, as they were when nobody could take the request `number`; one that has not changed is the
    same object. `roles`: those that matter to it."""

    number: int
    roles: frozenset[Role]
    views: Mapping[str, WorkerView]

    def lasts(
        self,
        query: PlacementQuery,
        views: Mapping[str, WorkerView],
        candidate: Callable[[PlacementQuery, WorkerView], Candidate],
    ) -> bool:
        """Whether still nobody can take it, as far as a look at those who have changed tells."""
        if query.avoid or len(views) != len(self.views):
            # Who is avoided depends on all the others.
            return False
        before = self.views
        for worker_id, view in views.items():
            if before.get(worker_id) is view:
                continue
            if worker_id not in before:
                return False
            if view.role in self.roles:
                able = able_to_decode if view.role is Role.DECODE else able_to_prefill
                if able(query, [candidate(query, view)]):
                    return False
        self.views = views
        return True
