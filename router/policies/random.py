"""Anyone who may take the request, with equal chance: the yardstick for the other policies.

Owns: nothing but its generator. Refuses to know: load beyond what `router.placement` forbids.
"""

from __future__ import annotations

from random import Random

from baton.router.placement import (
    Candidate,
    Placement,
    PlacementQuery,
    able_to_decode,
    able_to_prefill,
    able_to_serve,
)

_REASON = "at random"


class Policy:
    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, query: PlacementQuery, prefill: list[Candidate], decode: list[Candidate]) -> Placement | None:
        able = able_to_serve(query, prefill, decode)
        return self._placed(able.sources, self._any(able.sinks))

    def choose_prefill(self, query: PlacementQuery, prefill: list[Candidate]) -> Placement | None:
        return self._placed(able_to_prefill(query, prefill), None)

    def choose_decode(self, query: PlacementQuery, decode: list[Candidate]) -> Placement | None:
        sink = self._any(able_to_decode(query, decode))
        return Placement(decode=sink.worker_id, reason=_REASON) if sink is not None else None

    def _placed(self, sources: list[Candidate], sink: Candidate | None) -> Placement | None:
        source = self._any(sources)
        return Placement.of(source, sink, _REASON) if source is not None else None

    def _any(self, candidates: list[Candidate]) -> Candidate | None:
        return self._random.choice(candidates) if candidates else None
