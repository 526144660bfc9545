"""How fast each worker has been of late, from the counters of its load reports.

Owns: a few seconds of samples a worker. Refuses to know: the clock (`now` is an argument) and what is done with a pace.

    reports ... | t-5s  sample  sample ... sample  now |      pace = (newest - oldest) / their distance
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.proto.messages import LoadReport, WorkerCounters

WINDOW_S = 5.0
SPACING_S = 0.25


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates over the last `window_s`. `budget_share`: of the tokens that steps had room for, those that they used."""

    window_s: float
    prompt_tokens_per_s: float
    tokens_per_s: float
    pulled_bytes_per_s: float
    budget_share: float


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    counters: WorkerCounters


@dataclass(slots=True)
class _Course:
    """The samples of one incarnation: counters start at zero with each."""

    incarnation: str
    samples: deque[_Sample]


class Paces:
    """Fed with every report, keeps one sample in `SPACING_S`."""

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}

    def report(self, report: LoadReport, now: float) -> None:
        course = self._courses.get(report.worker_id)
        if course is None or course.incarnation != report.incarnation:
            course = self._courses[report.worker_id] = _Course(report.incarnation, deque())
        samples, at_s = course.samples, now - report.age_s
        if samples and at_s < samples[-1].at_s + SPACING_S:
            return
        samples.append(_Sample(at_s, report.counters))
        while len(samples) > 2 and samples[-1].at_s - samples[0].at_s > WINDOW_S:
            samples.popleft()

    def drop(self, worker_id: str) -> None:
        """Forgets a worker that is gone."""
        self._courses.pop(worker_id, None)

    def pace(self, worker_id: str) -> Pace | None:
        """None until there are two samples to compare."""
        course = self._courses.get(worker_id)
        if course is None or len(course.samples) < 2:
            return None
        first, last = course.samples[0], course.samples[-1]
        old, new, window_s = first.counters, last.counters, last.at_s - first.at_s
        offered = new.budget_tokens_offered - old.budget_tokens_offered
        return Pace(
            window_s=window_s,
            prompt_tokens_per_s=(new.prompt_tokens_computed - old.prompt_tokens_computed) / window_s,
            tokens_per_s=(new.tokens_generated - old.tokens_generated) / window_s,
            pulled_bytes_per_s=(new.bytes_pulled - old.bytes_pulled) / window_s,
            budget_share=(new.budget_tokens_used - old.budget_tokens_used) / offered if offered else 0.0,
        )
