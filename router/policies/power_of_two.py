"""Two at random, the less busy of them: nearly as even as looking at all, and no herd where figures are stale.

Owns: the sample. Refuses to know: who is allowed (`router.placement`).
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


class Policy:
    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, query: PlacementQuery, prefill: list[Candidate], decode: list[Candidate]) -> Placement | None:
        able = able_to_serve(query, prefill, decode)
        return self._placed(able.sources, self._less_full(able.sinks))

    def choose_prefill(self, query: PlacementQuery, prefill: list[Candidate]) -> Placement | None:
        return self._placed(able_to_prefill(query, prefill), None)

    def choose_decode(self, query: PlacementQuery, decode: list[Candidate]) -> Placement | None:
        sink = self._less_full(able_to_decode(query, decode))
        if sink is None:
            return None
        return Placement(decode=sink.worker_id, reason=f"less full of two: {sink.decode_load:.2f}")

    def _placed(self, sources: list[Candidate], sink: Candidate | None) -> Placement | None:
        if not sources:
            return None
        source = min(self._two(sources), key=lambda candidate: candidate.prefill_work)
        return Placement.of(source, sink, f"shorter of two queues: {source.prefill_work} tokens")

    def _less_full(self, sinks: list[Candidate]) -> Candidate | None:
        return min(self._two(sinks), key=lambda candidate: candidate.decode_load, default=None)

    def _two(self, candidates: list[Candidate]) -> list[Candidate]:
        return self._random.sample(candidates, min(2, len(candidates)))
