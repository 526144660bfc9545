"""A request inside one worker: its tokens, its blocks and the state that it is in.

Owns: `Sequence` (mutable, owned by one worker's scheduler) and the one table of allowed moves.
Refuses to know: why a sequence moves; that is the scheduler's business.

                      announce            admit              land             step
    decode leg:  EXPECTED -----> WAITING -------> RECEIVING -----> LANDED --------> RUNNING --> FINISHED
    other legs:                  WAITING -----------------------------------------> RUNNING --> EXPORTED --> FINISHED
                                                                    (no blocks)     ^  |  (prefill leg: KV is lent)
                                                                      PREEMPTED ----+<-+
    LANDED may be preempted too. RECEIVING ends as FINISHED when the token that lands with it is the last one.
    Every state but FINISHED and ABORTED may move to ABORTED.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

from baton.proto.messages import FinishReason, Leg, Request, Sampling

Rank = tuple[float, ...]
"""A place in a policy's order; the lowest is first."""


class State(Enum):
    EXPECTED = "expected"  # decode leg: the source has not begun to compute its prompt
    WAITING = "waiting"  # wants blocks
    RECEIVING = "receiving"  # decode leg: holds blocks, its KV is being pulled into them
    LANDED = "landed"  # decode leg: holds blocks with all of the KV, wants its first step
    RUNNING = "running"
    PREEMPTED = "preempted"  # was running, lost its blocks, wants them back
    EXPORTED = "exported"  # prefill leg: computed, its blocks are lent until they are released
    FINISHED = "finished"
    ABORTED = "aborted"


ALLOWED_MOVES: dict[State, frozenset[State]] = {
    State.EXPECTED: frozenset({State.WAITING, State.ABORTED}),
    State.WAITING: frozenset({State.RUNNING, State.RECEIVING, State.ABORTED}),
    State.RECEIVING: frozenset({State.LANDED, State.FINISHED, State.ABORTED}),
    State.LANDED: frozenset({State.RUNNING, State.PREEMPTED, State.ABORTED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.EXPORTED, State.FINISHED, State.ABORTED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.ABORTED}),
    State.EXPORTED: frozenset({State.FINISHED, State.ABORTED}),
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
}


class IllegalMove(AssertionError):
    """A sequence was asked to make a move that the table does not allow: a bug in the caller."""

    def __init__(self, sequence_id: str, origin: State, target: State) -> None:
        super().__init__(f"sequence {sequence_id}: {origin.value} -> {target.value} is not an allowed move")


class Sequence:
    """One request's tokens and progress. Only the scheduler writes to it; the engine reads.

    `token_ids`: prompt, then output. `num_computed_tokens`: tokens [0, n) have KV, or will have once the
    steps planned so far have run. `block_ids[i]` holds the KV of tokens [i * block_size, (i + 1) * block_size);
    a sequence that has ended keeps none.

        | prefix cache hit | computed                 | to compute      | room for one more |
        0                  num_cached_tokens          num_computed      len(token_ids)      len(block_ids) * block_size

    `num_cached_tokens` counts what its first admission found in the prefix cache; the first `num_cached_blocks` blocks
    are known to the prefix cache. Of the tokens that it had when it last began to wait, `num_queued_tokens` are still
    to be computed; those below `num_lost_tokens` were computed before a preemption. `max_total_tokens` ends it.
    `num_pending_tokens` further tokens will have been sampled by steps in flight: a step may compute them already,
    unless it `reads_its_output`: then the choice of a token needs all tokens before it, and not only their KV.
    `rank`, unique to it, is the policy's and never changes once the scheduler has it.
    In a simulation `token_ids` and `num_computed_tokens` may be behind, until `Scheduler.write_up`.
    Times are seconds on the worker's own clock, None until the moment has come.
    """

    __slots__ = (
        "added_s",
        "arrival_number",
        "block_ids",
        "finish_reason",
        "finished_s",
        "first_run_s",
        "landed_s",
        "leg",
        "max_total_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_recomputed_tokens",
        "num_transferred_tokens",
        "prefix_hashes",
        "rank",
        "reads_its_output",
        "request",
        "sampling",
        "sequence_id",
        "state",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: Request, arrival_number: int, now: float) -> None:
        self.request = request
        self.sequence_id = request.sequence_id
        self.leg = request.leg
        self.sampling = request.sampling
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self.arrival_number = arrival_number
        self.rank: Rank = (arrival_number,)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.reads_its_output = _reads_output(request.sampling)
        self.token_ids = list(request.token_ids)
        self.max_total_tokens = request.num_prompt_tokens + request.sampling.max_tokens
        self.block_ids: list[int] = []
        self.prefix_hashes: list[Hashable] = []
        self.num_computed_tokens = 0
        self.num_cached_blocks = 0
        self.num_cached_tokens = 0
        self.num_transferred_tokens = 0
        self.num_queued_tokens = 0 if request.leg is Leg.DECODE else len(request.token_ids)
        self.num_lost_tokens = 0
        self.num_pending_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_preemptions = 0
        self.state = State.EXPECTED if request.leg is Leg.DECODE else State.WAITING
        self.finish_reason: FinishReason | None = None
        self.added_s = now
        self.landed_s: float | None = None
        self.first_run_s: float | None = None
        self.finished_s: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def ended(self) -> bool:
        return self.state is State.FINISHED or self.state is State.ABORTED

    def move_to(self, target: State) -> None:
        """Moves to `target`; raises IllegalMove unless the table allows it."""
        if target not in ALLOWED_MOVES[self.state]:
            raise IllegalMove(self.sequence_id, self.state, target)
        self.state = target

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.state.value}, computed {self.num_computed_tokens} of "
            f"{len(self.token_ids)}, {len(self.block_ids)} blocks)"
        )


def _reads_output(sampling: Sampling) -> bool:
    penalties = (sampling.repetition_penalty - 1.0, sampling.presence_penalty, sampling.frequency_penalty)
    return any(penalties) or bool(sampling.grammar)
