"""The account of one leg, as its worker gives it to the router with the leg's first and last tokens.

Owns: which moments of a sequence each stage lies between. Refuses to know: clocks, and who adds the stages up.
"""

from __future__ import annotations

from baton.proto.messages import Leg, LegSummary, StageTimes
from baton.scheduler.sequence import Sequence


def summarize(
    sequence: Sequence,
    first_token_s: float,
    handoff_wait_s: float,
    handoff_transfer_s: float,
    connector: str,
    now: float,
) -> LegSummary:
    """`first_token_s`: when the leg's first token was committed. The hand-off's times and its connector's name count
    for decode legs only."""
    decodes = sequence.leg is Leg.DECODE
    if decodes:
        assert sequence.landed_s is not None
        # One that its landing has finished never runs.
        first_run_s = sequence.first_run_s if sequence.first_run_s is not None else now
        times = StageTimes(
            handoff_wait=handoff_wait_s,
            handoff_transfer=handoff_transfer_s,
            decode_admission=first_run_s - sequence.landed_s,
            decode=now - first_run_s,
        )
    else:
        assert sequence.first_run_s is not None
        times = StageTimes(
            prefill_queue=sequence.first_run_s - sequence.added_s,
            prefill_compute=first_token_s - sequence.first_run_s,
            decode=now - first_token_s if sequence.leg is Leg.WHOLE else 0.0,
        )
    return LegSummary(
        times=times,
        cached_tokens=sequence.num_cached_tokens,
        transferred_tokens=sequence.num_transferred_tokens,
        recomputed_tokens=sequence.num_recomputed_tokens,
        preemptions=sequence.num_preemptions,
        connector=connector if decodes else "",
    )
