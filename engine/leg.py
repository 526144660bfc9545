"""What a worker remembers of one leg for its account at the end, beside what the scheduler's sequence knows.

Owns: two records. Refuses to know: who fills and who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.proto.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """What a hand-off took. The two stages of a client's timeline begin when the source has finished the prompt:
    seconds from the final notice to the last pull's start, and from there to validated KV.

    `pulling_s`: from the start of the first pull to validated KV, which begins earlier when chunks were pulled early.
    `reading_s` sums the connector's times of the pulls, `num_runs` the stretches of adjacent blocks that they read.
    """

    wait_s: float = 0.0
    transfer_s: float = 0.0
    pulling_s: float = 0.0
    num_pulls: int = 0
    num_bytes: int = 0
    reading_s: float = 0.0
    num_runs: int = 0


@dataclass(slots=True)
class LegRecord:
    """What one leg has to report when it ends."""

    first_token_s: float | None = None
    handoff: HandoffTimes = HandoffTimes()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
