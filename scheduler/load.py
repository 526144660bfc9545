"""How busy a scheduler is and what it has done: the figures that a worker reports.

Owns: `SchedulerLoad` and `SchedulerCounters`; their fields mean what those of the same names in `LoadReport` and
`WorkerCounters` mean. Refuses to know: who reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.proto.messages import LoadReport, Role, WorkerCounters
from baton.proto.value import value

_NOTHING_COUNTED = WorkerCounters()


@value
class SchedulerLoad:
    """Made at every step: not frozen, as that takes five times as long, but nobody writes to it.

    `running` counts LANDED too, `waiting` all who hold no blocks, `free_blocks` the evictable ones too."""

    running: int
    waiting: int
    receiving: int
    exported: int
    queued_tokens: int
    running_context_tokens: int
    total_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    lent_blocks: int
    quarantined_blocks: int


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start; only the scheduler writes to them.

    `steps` and the budgets count steps that compute something.
    """

    steps: int = 0
    budget_tokens_used: int = 0
    budget_tokens_offered: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_recomputed: int = 0
    tokens_generated: int = 0
    preemptions_recompute: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0


def load_report(
    worker_id: str,
    incarnation: str,
    role: Role,
    number: int,
    load: SchedulerLoad,
    step_s: float,
    draining: bool,
    counters: WorkerCounters = _NOTHING_COUNTED,
    last_submit: int = 0,
) -> LoadReport:
    """What a worker tells routers of its load: its `number`-th report."""
    return LoadReport(
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        sequence_number=number,
        running=load.running,
        waiting=load.waiting,
        receiving=load.receiving,
        exported=load.exported,
        queued_tokens=load.queued_tokens,
        running_context_tokens=load.running_context_tokens,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        held_blocks=load.held_blocks,
        cached_blocks=load.cached_blocks,
        lent_blocks=load.lent_blocks,
        quarantined_blocks=load.quarantined_blocks,
        step_s=step_s,
        draining=draining,
        last_submit=last_submit,
        counters=counters,
    )
