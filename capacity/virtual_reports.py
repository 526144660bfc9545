"""Load reports on their way from virtual workers to the router, as far as somebody cares.

Owns: `ReportNote`, a report before it is written out, and `PatientBook`, a load book that reads its post when it is
asked for views. Refuses to know: what is decided from a report.

A report that arrives while nobody waits for a worker changes nothing until somebody does, and then only the last one of
each worker counts. Most are of that kind: one a step. So they are left lying; who asks for views reads those that have
arrived by then, and has those that are still on their way ring when they do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from baton.capacity.virtual_loop import VirtualLoop
from baton.proto.messages import LoadReport, WorkerDescription
from baton.router.load import LoadBook
from baton.router.placement import WorkerView
from baton.scheduler.load import SchedulerLoad, load_report


class ReportNote(NamedTuple):
    """What a report will say."""

    arrives_s: float
    description: WorkerDescription
    number: int
    load: SchedulerLoad
    step_s: float
    last_submit: int

    def report(self) -> LoadReport:
        description = self.description
        return load_report(
            description.worker_id,
            description.incarnation,
            description.role,
            self.number,
            self.load,
            self.step_s,
            draining=False,
            last_submit=self.last_submit,
        )


class PatientBook(LoadBook):
    """`ring` is called when a report arrives that somebody may be waiting for."""

    def __init__(self, credit_steps: float, loop: VirtualLoop) -> None:
        super().__init__(credit_steps)
        self.ring: Callable[[], None] = lambda: None
        self._loop = loop
        self._unread: dict[str, list[ReportNote]] = {}

    def leave(self, note: ReportNote) -> None:
        """A report sets out for which nobody waits now."""
        unread = self._unread.setdefault(note.description.incarnation, [])
        if len(unread) > 1 and unread[1].arrives_s <= self._loop.time():
            # The first will have been superseded by the second whenever somebody looks.
            del unread[0]
        unread.append(note)

    def lay_down(self, note: ReportNote) -> None:
        """A report has arrived, and nobody waits now."""
        incarnation = note.description.incarnation
        later = [each for each in self._unread.get(incarnation, ()) if each.number > note.number]
        self._unread[incarnation] = [note, *later]

    def standings(self) -> dict[str, WorkerView]:
        if self._unread:
            self._read()
        return super().standings()

    def _read(self) -> None:
        now = self._loop.time()
        unread, self._unread = self._unread, {}
        for notes in unread.values():
            arrived = [note for note in notes if note.arrives_s <= now]
            if arrived:
                self.report(arrived[-1].report(), arrived[-1].arrives_s)
            for note in notes[len(arrived) :]:
                self._loop.at(note.arrives_s, partial(self._arrive, note))

    def _arrive(self, note: ReportNote) -> None:
        self.report(note.report(), note.arrives_s)
        self.ring()
