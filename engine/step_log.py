"""Notes each step and each hand-off of a worker into a file, where the configuration names a directory for it.

Owns: the file, from the worker's start to its end. Refuses to know: what is made of it. The form is
`proto.step_log`'s.

Lines wait in memory until the worker is idle, so a busy one writes 64 KiB at a time. A disk that takes no more ends the
log, not the worker. All calls come on the step loop's thread.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TextIO

from baton import __version__
from baton.engine.description import ModelDescription
from baton.engine.leg import HandoffTimes
from baton.proto.settings import WorkerSettings
from baton.proto.step_log import (
    SUFFIX,
    HandoffRecord,
    StepLogHeader,
    StepRecord,
    handoff_line,
    header_line,
    step_line,
)
from baton.scheduler.plan import Step

log = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 16


class StepLog:
    """An open file; see the module."""

    def __init__(self, file: TextIO, header: StepLogHeader) -> None:
        self._file: TextIO | None = file
        self._ended_s: float | None = None
        self._cpu_s = time.thread_time()
        self._write(header_line(header))
        self._flush()

    def stepped(self, step: Step, start_s: float, planned_s: float, computed_s: float, ended_s: float) -> None:
        """A step was planned, computed and committed, at these moments."""
        work = step.work()
        gap_s = start_s - self._ended_s if self._ended_s is not None else None
        self._ended_s = ended_s
        cpu_s, self._cpu_s = self._cpu_s, time.thread_time()
        self._write(
            step_line(
                StepRecord(
                    start_s=start_s,
                    prefill_tokens=work.prefill_tokens,
                    attention_pairs=work.attention_pairs,
                    decode_sequences=work.decode_sequences,
                    kv_tokens=work.kv_tokens,
                    preemptions=len(step.preempted),
                    plan_s=planned_s - start_s,
                    run_s=computed_s - planned_s,
                    commit_s=ended_s - computed_s,
                    gap_s=gap_s,
                    cpu_s=max(self._cpu_s - cpu_s, 0.0),
                )
            )
        )

    def landed(self, landed_s: float, times: HandoffTimes) -> None:
        self._write(
            handoff_line(
                HandoffRecord(
                    landed_s=landed_s,
                    pulls=times.num_pulls,
                    bytes=times.num_bytes,
                    runs=times.num_runs,
                    reading_s=times.reading_s,
                    wait_s=times.wait_s,
                    transfer_s=times.transfer_s,
                )
            )
        )

    def idle(self) -> None:
        """Nothing to compute: what was noted reaches the file."""
        self._cpu_s = time.thread_time()
        if self._ended_s is not None:
            self._ended_s = None
            self._flush()

    def close(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: str) -> None:
        if self._file is not None:
            try:
                self._file.write(line)
            except OSError as error:
                self._give_up(error)

    def _flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.error("the step log ends here: %s", error)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                log.debug("its last lines are lost")


def open_step_log(settings: WorkerSettings, model: ModelDescription, incarnation: str) -> StepLog | None:
    """The log of a worker, or None where `observability.step_log` is empty. Raises OSError if it cannot be begun."""
    if not settings.observability.step_log:
        return None
    directory = Path(settings.observability.step_log)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{settings.worker_id}-{incarnation}{SUFFIX}"
    header = StepLogHeader(
        worker_id=settings.worker_id,
        role=settings.role,
        model=model.name,
        dtype=model.dtype,
        device=settings.engine.device,
        threads=settings.engine.threads,
        block_size=model.block_size,
        kv_bytes_per_token=model.kv_bytes_per_token,
        baton_version=__version__,
    )
    return StepLog(path.open("a", buffering=_BUFFER_BYTES, encoding="utf-8"), header)
