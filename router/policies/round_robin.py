"""Each in turn, in the order of worker ids, skipping those who may not take the request now.

Owns: whose turn it was last, so that workers may come and go.
Refuses to know: load beyond what `router.placement` forbids.
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

_REASON = "its turn"


class Policy:
    def __init__(self, random: Random) -> None:
        self._last_source = ""
        self._last_sink = ""

    def choose(self, query: PlacementQuery, prefill: list[Candidate], decode: list[Candidate]) -> Placement | None:
        able = able_to_serve(query, prefill, decode)
        return self._placed(able.sources, able.sinks)

    def choose_prefill(self, query: PlacementQuery, prefill: list[Candidate]) -> Placement | None:
        return self._placed(able_to_prefill(query, prefill), [])

    def choose_decode(self, query: PlacementQuery, decode: list[Candidate]) -> Placement | None:
        sink = _after(self._last_sink, able_to_decode(query, decode))
        if sink is None:
            return None
        self._last_sink = sink.worker_id
        return Placement(decode=sink.worker_id, reason=_REASON)

    def _placed(self, sources: list[Candidate], sinks: list[Candidate]) -> Placement | None:
        source = _after(self._last_source, sources)
        if source is None:
            return None
        placement = Placement.of(source, _after(self._last_sink, sinks), _REASON)
        self._last_source = source.worker_id
        self._last_sink = placement.decode or self._last_sink
        return placement


def _after(last: str, candidates: list[Candidate]) -> Candidate | None:
    """The first with a greater id than the last one's, or the first of all."""
    return min(candidates, key=lambda candidate: (candidate.worker_id <= last, candidate.worker_id), default=None)
