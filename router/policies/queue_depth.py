"""The least predicted work: each (prefill, decode) pair and each whole is scored in tokens, the lowest score wins.

    score = tokens queued + tokens of this prompt to compute     at the worker that computes the prompt
          + tokens of the prompt for which it has no room        they wait for others to leave
          + decode load x one step of tokens                     a full decode worker costs as much as one step
          + KV tokens to move x MOVE_COST                        between machines; a tenth of that within one

Equal scores rotate. Owns: the score and the turn. Refuses to know: who is allowed (`router.placement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

from baton.proto.messages import Role
from baton.router.placement import (
    Candidate,
    Placement,
    PlacementQuery,
    able_to_decode,
    able_to_prefill,
    able_to_serve,
)

MOVE_COST = 0.1
MOVE_COST_WITHIN_HOST = 0.01


class _Choice(NamedTuple):
    score: float
    source: Candidate
    sink: Candidate | None


class _Sink(NamedTuple):
    """One who could decode, as a source sees it; sorts by score, then by turn."""

    score: float
    position: int
    sink: Candidate


class Policy:
    def __init__(self, random: Random) -> None:
        self._turn = random.randrange(1 << 16)

    def choose(self, query: PlacementQuery, prefill: list[Candidate], decode: list[Candidate]) -> Placement | None:
        able = able_to_serve(query, prefill, decode)
        return self._best(_choices(query, self._rotated(able.sources), self._rotated(able.sinks)))

    def choose_prefill(self, query: PlacementQuery, prefill: list[Candidate]) -> Placement | None:
        sources = self._rotated(able_to_prefill(query, prefill))
        return self._best(_Choice(_source_score(query, source), source, None) for source in sources)

    def choose_decode(self, query: PlacementQuery, decode: list[Candidate]) -> Placement | None:
        sinks = self._rotated(able_to_decode(query, decode))
        if not sinks:
            return None
        self._turn += 1
        best = min(sinks, key=lambda sink: _decode_score(query, sink) + MOVE_COST * sink.uncached_tokens)
        return Placement(decode=best.worker_id, reason=f"least full: {best.decode_load:.2f}")

    def _rotated(self, candidates: list[Candidate]) -> list[Candidate]:
        start = self._turn % len(candidates) if candidates else 0
        return candidates[start:] + candidates[:start]

    def _best(self, choices: Iterable[_Choice]) -> Placement | None:
        best = min(choices, key=lambda choice: choice.score, default=None)
        if best is None:
            return None
        self._turn += 1
        return Placement.of(best.source, best.sink, f"least work: {best.score:.0f} tokens")


def _choices(query: PlacementQuery, sources: list[Candidate], sinks: list[Candidate]) -> Iterator[_Choice]:
    """Each source with the sink that is best for it. That is the best on its own machine or the best of all, so no
    more than each of both sides is looked at."""
    far: _Sink | None = None
    near: dict[str, _Sink] = {}
    hosts = {source.view.host for source in sources}
    for position, sink in enumerate(sinks):
        score, host = _decode_score(query, sink), sink.view.host
        there = _Sink(score + MOVE_COST * sink.uncached_tokens, position, sink)
        far = there if far is None else min(far, there)
        if host in hosts:
            here = _Sink(score + MOVE_COST_WITHIN_HOST * sink.uncached_tokens, position, sink)
            near[host] = min(near.get(host, here), here)
    for source in sources:
        score = _source_score(query, source)
        if source.view.role is Role.COLOCATED:
            yield _Choice(score, source, None)
        elif far is not None:
            best = min(near.get(source.view.host, far), far)
            yield _Choice(score + best.score, source, best.sink)


def _source_score(query: PlacementQuery, source: Candidate) -> float:
    score: float = source.prefill_work + max(0, query.num_tokens - source.view.free_kv_tokens)
    return score + _decode_score(query, source) if source.view.role is Role.COLOCATED else score


def _decode_score(query: PlacementQuery, sink: Candidate) -> float:
    """How full the worker is with this request on it, in tokens of one step."""
    view = sink.view
    kv_load = 1.0 - (view.free_kv_tokens - query.expected_tokens) / max(view.total_kv_tokens, 1)
    seat_load = (view.running + 1) / max(view.max_num_seqs, 1)
    return max(kv_load, seat_load) * view.max_num_batched_tokens
