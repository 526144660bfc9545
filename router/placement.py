"""The vocabulary of placement: what is asked, who could take it, and what was chosen.

Owns: the values that pass between the load book, the dispatch queue and the policies, and the rules that every policy
obeys: never more than a worker's credit, nothing to a draining worker, no worker that already failed this request while
another exists.
Refuses to know: how a policy ranks what is allowed (`router.policies`), time, and where the figures come from.

    LoadBook.views() -> WorkerView -> Candidate --policy(PlacementQuery)--> Placement -> LoadBook.book()
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from baton.proto.messages import Leg, Role
from baton.proto.value import value

MAX_EXPECTED_OUTPUT_TOKENS = 256
"""Room for output that a placement counts on at most. Clients ask for far more than they use; a worker preempts when
too many outgrow it."""


def can_serve(roles: Collection[Role]) -> bool:
    """Whether workers of these roles can bring a request to its end."""
    return Role.COLOCATED in roles or (Role.PREFILL in roles and Role.DECODE in roles)


@value
class PlacementQuery:
    """One attempt of one request, as placement sees it.

    `num_tokens`: prompt and tokens already emitted, all of which need KV. `arrived_s` is the arrival of the request,
    not of the attempt, so a retry keeps its place. `attempt` above 0 was admitted before: the queue's bounds are not
    for it. `prefix_hashes`: one for each full block. `avoid`: workers on which an earlier attempt failed. `at`: the one
    worker that a fork may go to, as it has the prompt's KV.
    """

    attempt_id: str
    num_tokens: int
    max_new_tokens: int = 1
    priority: int = 0
    arrived_s: float = 0.0
    attempt: int = 0
    prefix_hashes: tuple[Hashable, ...] = ()
    avoid: frozenset[str] = frozenset()
    at: str = ""

    @property
    def expected_tokens(self) -> int:
        """Tokens of KV that the request will probably hold when it ends."""
        return self.num_tokens + min(self.max_new_tokens, MAX_EXPECTED_OUTPUT_TOKENS)

    def leg_id(self, leg: Leg) -> str:
        """The name of one leg of this attempt, unique in the cluster as far as `attempt_id` is."""
        return f"{self.attempt_id}.{leg.name.lower()}"


@value
class WorkerView:
    """What the router believes of one worker now: its last report and what was sent to it since.

    `queued_tokens`: prompt tokens that it has yet to compute. `running`: sequences on it in any state but lent.
    `free_kv_tokens`: room, less what is on its way there. `credit_tokens`, `credit_sequences`: what it may take now.
    `age_s`: age of the last report, None before the first and where it is not asked for.
    """

    worker_id: str
    incarnation: str
    role: Role
    host: str
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    total_kv_tokens: int
    queued_tokens: int = 0
    running: int = 0
    free_kv_tokens: int = 0
    credit_tokens: int = 0
    credit_sequences: int = 0
    in_flight: int = 0
    step_s: float = 0.0
    draining: bool = False
    age_s: float | None = None


@value
class Candidate:
    """A worker, and how many of the query's tokens it would have to compute (or fetch), at least one."""

    view: WorkerView
    uncached_tokens: int

    @property
    def worker_id(self) -> str:
        return self.view.worker_id

    @property
    def prefill_work(self) -> int:
        """Prompt tokens that it computes before this query's first token is there."""
        return self.view.queued_tokens + self.uncached_tokens

    @property
    def decode_load(self) -> float:
        """How full it is, 0 to 1: the scarcer of KV room and seats in a step."""
        view = self.view
        used = 1.0 - view.free_kv_tokens / max(view.total_kv_tokens, 1)
        return max(used, view.running / max(view.max_num_seqs, 1))


class PlacedLeg(NamedTuple):
    leg: Leg
    worker_id: str


@value
class Placement:
    """Who runs which leg: a pair, a `whole`, or under late binding first `prefill` and later `decode` alone.

    `uncached_tokens` is what the worker that computes the prompt is expected to compute. `shared_tokens`: those of a
    fork whose KV is held already, by another output of the same request.
    """

    prefill: str | None = None
    decode: str | None = None
    whole: str | None = None
    reason: str = ""
    uncached_tokens: int = 0
    shared_tokens: int = 0

    @classmethod
    def of(cls, source: Candidate, sink: Candidate | None, reason: str) -> Placement:
        """The prompt at `source`; the rest at `sink`, or there too if it is co-located, or (None) not yet chosen."""
        if source.view.role is Role.COLOCATED:
            return cls(whole=source.worker_id, reason=reason, uncached_tokens=source.uncached_tokens)
        return cls(
            prefill=source.worker_id,
            decode=sink.worker_id if sink is not None else None,
            reason=reason,
            uncached_tokens=source.uncached_tokens,
        )

    def stays(self) -> Placement:
        """The same, with the output generated where the prompt is computed."""
        return Placement(whole=self.prefill, reason="short output", uncached_tokens=self.uncached_tokens)

    def legs(self) -> list[PlacedLeg]:
        chosen = ((Leg.PREFILL, self.prefill), (Leg.DECODE, self.decode), (Leg.WHOLE, self.whole))
        return [PlacedLeg(leg, worker_id) for leg, worker_id in chosen if worker_id is not None]


class PlacementPolicy(Protocol):
    """Chooses among candidates, or nobody when none may take the query now.

    `prefill` holds those who can compute the prompt, co-located workers among them: such a one is chosen as `whole`.
    """

    def choose(self, query: PlacementQuery, prefill: list[Candidate], decode: list[Candidate]) -> Placement | None: ...

    def choose_prefill(self, query: PlacementQuery, prefill: list[Candidate]) -> Placement | None:
        """Late binding, first half: a prefill worker alone, or a whole."""
        ...

    def choose_decode(self, query: PlacementQuery, decode: list[Candidate]) -> Placement | None:
        """Late binding, second half: the prompt is computed."""
        ...


POLICIES = tuple(
    sorted(path.stem for path in (Path(__file__).parent / "policies").glob("*.py") if not path.stem.startswith("_"))
)


def load_policy(name: str, random: Random) -> PlacementPolicy:
    """The policy in `router/policies/<name>.py`; raises `ValueError` for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise ValueError(f"no placement policy {name!r}; there are {', '.join(POLICIES)}")
    policy: PlacementPolicy = importlib.import_module(f"baton.router.policies.{name}").Policy(random)
    return policy


def able_to_prefill(query: PlacementQuery, prefill: Iterable[Candidate]) -> list[Candidate]:
    """Those who may be given the prompt now; a co-located worker only with room for the rest too."""
    return [
        candidate
        for candidate in _allowed(query, prefill)
        if _has_prompt_credit(candidate)
        and (candidate.view.role is not Role.COLOCATED or _has_decode_room(query, candidate))
    ]


def able_to_decode(query: PlacementQuery, decode: Iterable[Candidate]) -> list[Candidate]:
    """Those who may be given the generation now."""
    return [candidate for candidate in _allowed(query, decode) if _has_decode_room(query, candidate)]


def fork_at(query: PlacementQuery, candidate: Candidate) -> Placement | None:
    """A fork at the only worker that is asked, once it has credit for what the fork does not share."""
    view, uncached = candidate.view, candidate.uncached_tokens
    if not _has_prompt_credit(candidate) or (uncached >= view.free_kv_tokens and view.running > 0):
        return None
    shared = query.num_tokens - uncached
    return Placement(whole=view.worker_id, reason="fork", uncached_tokens=uncached, shared_tokens=shared)


def may_stay(query: PlacementQuery, source: WorkerView, short_output_tokens: int) -> bool:
    """Whether a prefill worker generates a short output itself: its few steps are over before KV would have moved, if
    no prompt of another shares them."""
    if not 1 < query.max_new_tokens <= short_output_tokens:
        return False
    return not source.queued_tokens and query.expected_tokens <= source.free_kv_tokens


@dataclass(frozen=True, slots=True)
class Able:
    """Every source goes with every sink; without sinks the sources are co-located."""

    sources: list[Candidate]
    sinks: list[Candidate]


def able_to_serve(query: PlacementQuery, prefill: Iterable[Candidate], decode: Iterable[Candidate]) -> Able:
    """Those who may be given the whole of the query now, in pairs or alone."""
    sinks = able_to_decode(query, decode)
    sources = able_to_prefill(query, prefill)
    if not sinks:
        sources = [source for source in sources if source.view.role is Role.COLOCATED]
    return Able(sources, sinks)


def _allowed(query: PlacementQuery, candidates: Iterable[Candidate]) -> list[Candidate]:
    serving = [candidate for candidate in candidates if not candidate.view.draining]
    if not query.avoid:
        return serving
    untried = [candidate for candidate in serving if candidate.worker_id not in query.avoid]
    return untried or serving


def _has_prompt_credit(candidate: Candidate) -> bool:
    """A prompt above the whole credit would wait for ever, so it may go to a worker with nothing queued from anyone."""
    view = candidate.view
    if view.credit_sequences <= 0:
        return False
    return candidate.uncached_tokens <= view.credit_tokens or view.queued_tokens == 0


def _has_decode_room(query: PlacementQuery, candidate: Candidate) -> bool:
    """Room for the prompt is a condition, room for the output only a preference; an idle worker settles it itself."""
    view = candidate.view
    if view.credit_sequences <= 0:
        return False
    return query.num_tokens < view.free_kv_tokens or view.running == 0
