"""Where the time and the tokens of one output went, so that its stages add up to the total.

Owns: the arithmetic of the timeline. Refuses to know: clocks (times come in) and what the stages do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.proto.messages import StageTimes


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of each stage of one output. They follow one another and add up to the total."""

    router_wait: float
    prefill_queue: float
    prefill_compute: float
    handoff_wait: float
    handoff_transfer: float
    decode_admission: float
    decode: float
    retry: float
    total: float


@dataclass(slots=True)
class Ledger:
    """Where the time and the tokens of one output went.

    Workers tell how long each of their stages took. Between them lie the ways of messages, which only the router's own
    clock can see: the way to the prefill worker and back counts as prefill queue, the last token's way as decode.

        arrived_s .. attempt_s ....... sent_s ............................ first_s ............................. ended_s
        |   retry    |   router_wait   | prefill_queue + prefill_compute   | hand-off, decode_admission, decode  |

    An output that forks shares the way of the one that brought the prompt's KV, up to `forked_s`, and its times. What
    follows until the fork's own first step is decode admission. Its tokens are its own: those it shares are cached.
    """

    arrived_s: float
    attempt_s: float = 0.0
    sent_s: float | None = None
    first_s: float | None = None
    forked_s: float | None = None
    stages: StageTimes = field(default_factory=StageTimes)
    cached_tokens: int = 0
    transferred_tokens: int = 0
    recomputed_tokens: int = 0
    retries: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    connector: str = ""
    ended_s: float | None = None

    def begin(self, now: float) -> None:
        """A new attempt: all before it was in vain."""
        self.attempt_s, self.sent_s, self.first_s, self.forked_s = now, None, None, None
        self.stages = StageTimes()

    def fork(self, other: Ledger, forked_s: float) -> None:
        """The other's way until then is this one's too."""
        self.attempt_s, self.sent_s, self.first_s = other.attempt_s, other.sent_s, other.first_s
        self.stages, self.prefill_worker, self.forked_s = other.stages, other.prefill_worker, forked_s

    def admitted(self, compute_s: float, now: float) -> None:
        """A fork has its first token, whose step took `compute_s`."""
        assert self.forked_s is not None
        waited_s = max(0.0, now - self.forked_s - compute_s)
        self.stages = replace(self.stages, decode_admission=self.stages.decode_admission + waited_s)
        self.forked_s = None

    def timeline(self, now: float) -> Timeline:
        """The stages until the end, or until now."""
        end = self.ended_s if self.ended_s is not None else now
        sent = self.sent_s if self.sent_s is not None else end
        first = self.first_s if self.first_s is not None else end
        stages = self.stages
        handed_over = stages.handoff_wait + stages.handoff_transfer + stages.decode_admission
        # The hand-off begins while the first token is on its way here: where decode is that quick, the two overlap.
        overlap = max(0.0, handed_over - (end - first))
        return Timeline(
            router_wait=sent - self.attempt_s,
            prefill_queue=max(0.0, first - sent - stages.prefill_compute - overlap),
            prefill_compute=stages.prefill_compute,
            handoff_wait=stages.handoff_wait,
            handoff_transfer=stages.handoff_transfer,
            decode_admission=stages.decode_admission,
            decode=max(0.0, end - first - handed_over),
            retry=self.attempt_s - self.arrived_s,
            total=end - self.arrived_s,
        )
