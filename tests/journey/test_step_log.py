"""A worker with a step log notes what its scheduler planned, and serves on when the log cannot be written."""

from __future__ import annotations

import asyncio
import errno

import pytest
from asking import answer, request
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.engine.leg import HandoffTimes
from baton.engine.step_log import StepLog
from baton.proto import step_log
from baton.proto.messages import Role
from baton.proto.settings import ObservabilitySettings, SchedulerSettings
from baton.proto.step_log import HandoffRecord, StepLogError, StepLogHeader, StepRecord
from baton.scheduler.plan import Step

HEADER = StepLogHeader("prefill-0", Role.PREFILL, model="paper", dtype="int64", threads=2)
BLOCK_BYTES = 16 * 16


class NotingRunner(PaperRunner):
    """Counts the work of each step token by token, the slow and obvious way."""

    def __init__(self) -> None:
        super().__init__(num_blocks=120)
        self.noted: list[tuple[int, int, int, int, int]] = []

    def run(self, step: Step):
        long = [chunk for chunk in step.chunks if chunk.num_tokens > 1]
        single = [chunk for chunk in step.chunks if chunk.num_tokens == 1]
        self.noted.append(
            (
                sum(1 for chunk in long for _ in range(chunk.num_tokens)),
                sum(position + 1 for chunk in long for position in range(chunk.start, chunk.start + chunk.num_tokens)),
                len(single),
                sum(chunk.start + 1 for chunk in single),
                len(step.preempted),
            )
        )
        return super().run(step)


@pytest.mark.parametrize("shape", [{}, {"prefill": 0, "decode": 0, "colocated": 1}], ids=["1P1D", "co-located"])
async def test_each_line_is_what_the_scheduler_planned(paper_dir, tmp_path, shape):
    prompts = [[(index * 7 + salt) % 256 for index in range(90 + 37 * salt)] for salt in range(12)]
    async with SmallCluster(
        paper_dir,
        NotingRunner,
        scheduler=SchedulerSettings(max_num_batched_tokens=96, prefix_cache=False),
        observability=ObservabilitySettings(step_log=str(tmp_path)),
        **shape,
    ) as cluster:
        results = await asyncio.gather(*(answer(cluster.inference, request(prompt, 40)) for prompt in prompts))
        assert [result.tokens for result in results] == [paper_output(prompt, 40) for prompt in prompts]
        await cluster.at_rest()
        noted = {seat.worker_id: seat.runner.noted for seat in cluster.members()}
        moved = {name: counters.bytes_pulled for name, counters in (await cluster.counters()).items()}

    files = {file.header.worker_id: file for file in step_log.read_directory(tmp_path)}
    assert set(files) == set(noted)
    for name, file in files.items():
        assert file.header.role.value == name.rpartition("-")[0]
        lines = [
            (step.prefill_tokens, step.attention_pairs, step.decode_sequences, step.kv_tokens, step.preemptions)
            for step in file.steps
        ]
        assert lines == noted[name]
        assert sum(handoff.bytes for handoff in file.handoffs) == moved[name]
        assert all(min(step.plan_s, step.run_s, step.commit_s, step.gap_s or 0) >= 0 for step in file.steps)
        assert all(step.cpu_s >= 0 for step in file.steps)
        assert sum(step.cpu_s for step in file.steps) > 0
        starts = [step.start_s for step in file.steps]
        assert starts == sorted(starts)
    if "decode-0" in files:
        assert len(files["decode-0"].handoffs) == len(prompts)
        assert all(1 <= handoff.runs <= handoff.bytes // BLOCK_BYTES for handoff in files["decode-0"].handoffs)


def test_what_is_written_is_read_back_and_a_line_cut_short_is_left_out(tmp_path):
    steps = (
        StepRecord(1.5, 64, 2080, 3, 411, 1, 1e-4, 0.25, 2e-4, None, 0.2),
        StepRecord(1.8, 0, 0, 4, 500, 0, 0, 0, 0, 0, 0),
    )
    handoff = HandoffRecord(2.0, 2, 4096, 3, 0.01, 0.001, 0.012)
    path = tmp_path / f"a{step_log.SUFFIX}"
    whole = step_log.header_line(HEADER) + "".join(map(step_log.step_line, steps)) + step_log.handoff_line(handoff)
    path.write_text(whole + step_log.step_line(steps[0])[:-9])
    (file,) = step_log.read_directory(tmp_path)
    assert (file.header, file.steps, file.handoffs) == (HEADER, steps, (handoff,))


def test_a_worker_that_changes_its_role_begins_a_new_part(tmp_path):
    path = tmp_path / f"a{step_log.SUFFIX}"
    step = StepRecord(1.5, 64, 2080, 3, 411, 1, 1e-4, 0.25, 2e-4, None, 0.2)
    other = StepLogHeader("prefill-0", Role.DECODE)
    path.write_text(
        step_log.header_line(HEADER) + step_log.step_line(step) + step_log.header_line(other) + step_log.step_line(step)
    )
    assert [(part.header, part.steps) for part in step_log.read(path)] == [(HEADER, (step,)), (other, (step,))]


@pytest.mark.parametrize(
    "line",
    ["no JSON", "[]", '["s", 1, 2]', '["s", "1", 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]', '{"format": "baton-step-log"}', "3"],
)
def test_a_line_of_another_kind_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / f"a{step_log.SUFFIX}"
    path.write_text(step_log.header_line(HEADER) + line + "\n")
    with pytest.raises(StepLogError, match="line 2 is no line of a step log"):
        step_log.read(path)


def test_steps_before_any_header_are_refused(tmp_path):
    path = tmp_path / f"a{step_log.SUFFIX}"
    path.write_text('["h", 1, 1, 1, 1, 1, 1, 1]\n')
    with pytest.raises(StepLogError, match="line 1"):
        step_log.read(path)


class FullDisk:
    """A file on a disk that is full."""

    closed = False

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.closed = True
        self.flush()


def test_a_full_disk_ends_the_log_and_not_the_worker(caplog):
    file = FullDisk()
    log = StepLog(file, HEADER)
    assert file.closed
    log.stepped(Step(1, [], 0), 1.0, 1.1, 1.2, 1.3)
    log.landed(1.4, HandoffTimes())
    log.idle()
    log.close()
    assert "No space left on device" in caplog.text
