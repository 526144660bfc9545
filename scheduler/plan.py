"""What the scheduler tells the engine to compute, and what the engine answers.

Owns: `Step`, `Chunk`, `StepResult` and the events that a commit yields. Refuses to know: how anything is computed.

    Scheduler.plan(now) -> Step -> Runner.run(step) -> StepResult -> Scheduler.commit(step, result, now) -> events
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.proto.messages import FinishReason, TokenLogprob
from baton.proto.value import value
from baton.scheduler.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens [start, start + num_tokens) of one sequence, to be computed in one step.

    The engine reads `sequence.token_ids`, `sequence.block_ids` and `sequence.sampling`, and writes to none of them.
    `samples`: the chunk reaches the sequence's last token, so its logits choose the next one. Where a step is planned
    while another runs, that last token may be one that the other samples: `start` is then beyond `sequence.token_ids`.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


class StepWork(NamedTuple):
    """How much there is to compute in a step: what its time depends on.

    A chunk of one token counts as a decoding sequence, whatever the token: that is how engines compute it. `kv_tokens`
    is the context of those, their own token included; `attention_pairs` sums over the tokens of longer chunks how many
    tokens each attends to, itself included.
    """

    prefill_tokens: int
    attention_pairs: int
    decode_sequences: int
    kv_tokens: int


@value
class Step:
    """One batch for the engine, and what else the plan decided.

    `preempted` lost their blocks in this plan: whoever lent them must revoke the lease before the step runs.
    `reserved` have got blocks for a hand-off: decode legs, which may start to pull, and prefill legs, which begin.
    `skipped` run and get nothing in this step, for want of budget or blocks.
    `num_in_stride` further sequences get one token each and are not among the chunks (`scheduler.stride`, simulations
    only); `stride_context_tokens` is the context of those, their own tokens included.
    """

    number: int
    chunks: list[Chunk]
    num_tokens: int
    preempted: list[Sequence] = field(default_factory=list)
    reserved: list[Sequence] = field(default_factory=list)
    skipped: list[Sequence] = field(default_factory=list)
    num_in_stride: int = 0
    stride_context_tokens: int = 0

    def work(self) -> StepWork:
        decode_sequences, kv_tokens = self.num_in_stride, self.stride_context_tokens
        if not self.chunks:
            return StepWork(0, 0, decode_sequences, kv_tokens)
        if self.num_tokens == len(self.chunks) + decode_sequences:
            kv_tokens += len(self.chunks) + sum([chunk[1] for chunk in self.chunks])
            return StepWork(0, 0, self.num_tokens, kv_tokens)
        pairs = 0
        for _, start, num_tokens, _ in self.chunks:
            if num_tokens == 1:
                decode_sequences += 1
                kv_tokens += start + 1
            else:
                pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return StepWork(self.num_tokens - decode_sequences, pairs, decode_sequences, kv_tokens)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities that one chunk was asked for.

    `sampled` is that of the sampled token; `prompt` those of tokens start + 1 .. start + num_tokens of the sequence, as
    far as they are prompt tokens.
    """

    sampled: TokenLogprob | None = None
    prompt: tuple[TokenLogprob, ...] = ()


@value
class StepResult:
    """What the engine computed for a step.

    `token_ids[i]` is the token sampled for chunk i, -1 where the chunk does not sample. `logprobs` maps the index of a
    chunk to its log-probabilities, for those few chunks that want any. `refused` maps it to the reason why no token can
    follow; `token_ids` then holds one that ends the sequence, which nobody is to be told.
    """

    token_ids: list[int]
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


class Emitted(NamedTuple):
    """A sequence got one token; `finish` says whether and why that ended it."""

    sequence: Sequence
    token_id: int
    finish: FinishReason | None


class Progressed(NamedTuple):
    """A prefill-role sequence now has KV for tokens [0, num_tokens): more of it may be lent."""

    sequence: Sequence
    num_tokens: int
