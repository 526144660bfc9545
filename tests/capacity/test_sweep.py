"""A sweep finds the capacity that a known cluster has, runs nothing twice, and keeps what it has finished."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import queue_cluster

from baton.capacity.grid import Configuration, GridError, Knobs, Model, configurations, knobs_of, parse_ratios
from baton.capacity.journal import Journal, JournalError
from baton.capacity.outcome import Slo
from baton.capacity.record import to_plain
from baton.capacity.study import Objective, Row, capacity_of
from baton.capacity.summary import Summary
from baton.capacity.sweep import Backend, Experiment, Laboratory, Point, Progress, SweepError, rate_of, sweep
from baton.capacity.traffic import Traffic
from baton.proto.messages import Role
from baton.proto.settings import EngineSettings
from baton.router import config

MODEL = Model.of(EngineSettings(model="demo"))
TRAFFIC = Traffic("fixed:100/11", rate=1.0, num_requests=300)
OBJECTIVE = Objective(Slo(ttft_s=0.5, tpot_s=0.02))


class Runs:
    """A backend in this process that counts."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.points: list[Point] = []
        self._fail_after = fail_after

    def __call__(self, point: Point) -> Summary:
        if self._fail_after is not None and len(self.points) >= self._fail_after:
            raise SweepError("enough")
        self.points.append(point)
        return queue_cluster.measure(point)


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "out" / "points.jsonl")
    yield opened
    opened.close()


def shapes(text: str = "1:1", knobs: tuple[Knobs, ...] = (Knobs(),)) -> tuple[Configuration, ...]:
    return configurations(config.defaults(), MODEL, parse_ratios(text), knobs)


def run(
    plan: Experiment,
    measure: Callable[[Point], Summary],
    executor: Executor,
    journal: Journal,
    at_once: int = 1,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Row, ...]:
    laboratory = Laboratory(Backend("queue", measure, executor, at_once=at_once), journal, on_progress)
    _, rows = asyncio.run(sweep(plan, laboratory))
    return rows


def test_the_capacity_of_a_known_cluster_is_found(threads: Executor, journal: Journal) -> None:
    """A prompt takes 0.1 s and an output 0.1 s: a pair serves 10 a second, two co-located workers as many."""
    rows = run(Experiment(shapes("1:1,1:3,3:1"), (TRAFFIC,), OBJECTIVE), Runs(), threads, journal)
    found = {row.label: row.capacity for row in rows}
    assert list(found) == ["1:1", "1:3", "3:1", "2 co-located", "4 co-located"]
    for label, expected in (("1:1", 10), ("1:3", 10), ("2 co-located", 10), ("4 co-located", 20)):
        assert found[label].rate == pytest.approx(expected, rel=0.2)
        assert found[label].low <= found[label].rate <= found[label].high
        assert found[label].is_bounded


def test_every_configuration_was_sent_the_same_arrivals_at_the_rate_of_the_table(
    threads: Executor, journal: Journal
) -> None:
    runs = Runs()
    rows = run(Experiment(shapes("1:2,2:1"), (TRAFFIC,), OBJECTIVE, repeats=2), runs, threads, journal)
    rates = [{level.rate for level in row.levels} for row in rows]
    compared = max(set.intersection(*rates))
    sent = [point.traffic for point in runs.points if point.traffic.rate == compared]
    assert len(sent) == len(rows) * 2
    assert len(set(sent)) == 2
    assert {traffic.seed for traffic in sent} == {0, 1}


def test_nothing_is_run_twice(threads: Executor, tmp_path: Path) -> None:
    plan = Experiment(shapes(), (TRAFFIC,), OBJECTIVE)
    path = tmp_path / "points.jsonl"
    first, again = Runs(), Runs()
    before = run(plan, first, threads, Journal(path))
    assert len(set(first.points)) == len(first.points)
    seen: list[Progress] = []
    assert to_plain(run(plan, again, threads, Journal(path), on_progress=seen.append)) == to_plain(before)
    assert again.points == []
    assert seen[-1].done == seen[-1].kept == seen[-1].expected > 0


@pytest.mark.parametrize("change", ["objective", "traffic", "setup"])
def test_what_a_result_depends_on_is_run_again_when_it_changes(change: str, threads: Executor, tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    plan = Experiment(shapes(), (TRAFFIC,), OBJECTIVE, rates=(1.0,), compare_at=1.0)
    run(plan, Runs(), threads, Journal(path))
    other = {
        "objective": Experiment(
            plan.configurations, plan.traffics, Objective(Slo(0.4, 0.02)), rates=(1.0,), compare_at=1.0
        ),
        "traffic": Experiment(
            plan.configurations, (Traffic("fixed:100/12", 1.0, 300),), OBJECTIVE, rates=(1.0,), compare_at=1.0
        ),
        "setup": Experiment(shapes("1:1", knobs_of([512])), plan.traffics, OBJECTIVE, rates=(1.0,), compare_at=1.0),
    }[change]
    runs = Runs()
    run(other, runs, threads, Journal(path))
    assert len(runs.points) == 4


def test_a_sweep_that_was_broken_off_goes_on_where_it_stopped(threads: Executor, tmp_path: Path) -> None:
    plan = Experiment(shapes(), (TRAFFIC,), OBJECTIVE)
    path = tmp_path / "points.jsonl"
    whole = Runs()
    expected = run(plan, whole, threads, Journal(tmp_path / "other.jsonl"))
    with pytest.raises(SweepError, match="enough"):
        run(plan, Runs(fail_after=5), threads, Journal(path))
    rest = Runs()
    assert to_plain(run(plan, rest, threads, Journal(path))) == to_plain(expected)
    assert len(rest.points) == len(whole.points) - 5


def test_points_run_side_by_side_in_processes_give_the_same_rows(threads: Executor, tmp_path: Path) -> None:
    plan = Experiment(shapes(), (TRAFFIC,), OBJECTIVE, rates=(2.0, 8.0), compare_at=2.0)
    alone = run(plan, Runs(), threads, Journal(tmp_path / "alone.jsonl"))
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        together = run(plan, queue_cluster.measure, processes, Journal(tmp_path / "many.jsonl"), at_once=2)
    assert to_plain(together) == to_plain(alone)


def test_an_objective_that_nobody_can_meet_is_explained(threads: Executor, journal: Journal) -> None:
    plan = Experiment(shapes(), (TRAFFIC,), Objective(Slo(ttft_s=0.05)))
    for row in run(plan, Runs(), threads, journal):
        assert row.capacity.rate == 0
        assert "only 0% of requests are good" in row.capacity.note
        assert "p90 100 ms" in row.capacity.note


def test_a_full_disk_is_told_and_finished_points_are_kept(
    threads: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "points.jsonl"
    plan = Experiment(shapes(), (TRAFFIC,), OBJECTIVE)
    real_write, written = os.write, 0

    def write(file: int, data: bytes) -> int:
        nonlocal written
        written += 1
        if written > 3:
            real_write(file, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(file, data)

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        with pytest.raises(JournalError, match="No space left on device; 3 finished points are kept"):
            run(plan, Runs(), threads, Journal(path))
    runs = Runs()
    run(plan, runs, threads, Journal(path))
    assert len(Journal(path)) == len(runs.points) + 3


def test_a_line_that_was_cut_short_is_dropped_and_a_strange_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    path.write_text(json.dumps({"key": "a", "point": 1, "result": 2}) + '\n{"key": "b", "po')
    kept = Journal(path)
    assert (kept.get("a"), kept.get("b"), len(kept)) == (2, None, 1)
    kept.add("c", 1, 3)
    assert Journal(path).get("c") == 3
    path.write_text("nonsense\n")
    with pytest.raises(JournalError, match=r"points\.jsonl:1: is no finished point"):
        Journal(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1:x", "'1:x' is no ratio"),
        ("", "'' is no ratio"),
        ("0:3", "'0:3' has 0 prefill workers, must have 1 to 4096"),
        ("2:0", "'2:0' has 0 decode workers"),
        ("1:2,9999:1", "'9999:1' has 9999 prefill workers"),
        ("all", "needs --total"),
    ],
)
def test_an_impossible_ratio_is_refused_with_its_bound(text: str, complaint: str) -> None:
    with pytest.raises(GridError, match=complaint):
        parse_ratios(text)


def test_ratios_that_are_not_of_the_total_are_refused_and_all_are_all_of_it() -> None:
    with pytest.raises(GridError, match="'1:1' has 2 workers, must have --total 4"):
        parse_ratios("1:3,1:1", 4)
    assert [shape.label for shape in parse_ratios("all", 4)] == ["1:3", "2:2", "3:1"]


def test_knobs_make_a_grid_and_baselines_have_no_binding() -> None:
    found = shapes("1:1", knobs_of([256, 512], [], ["early", "late"]))
    assert [each.label for each in found] == [
        "1:1, chunk 256, early",
        "1:1, chunk 256, late",
        "1:1, chunk 512, early",
        "1:1, chunk 512, late",
        "2 co-located, chunk 256",
        "2 co-located, chunk 512",
    ]
    budgets = [
        {pool.role: pool.scheduler.max_num_batched_tokens for pool in each.setup.pools} for each in (found[0], found[4])
    ]
    assert budgets == [{Role.PREFILL: 256, Role.DECODE: 2048}, {Role.COLOCATED: 256}]
    with pytest.raises(GridError, match="--policies: 'best' is not one of"):
        knobs_of([], ["best"])


def test_the_lattice_of_rates_is_the_same_for_all() -> None:
    assert rate_of(0) == 1.0
    assert rate_of(8) == 2.0
    assert [rate_of(step) for step in range(-3, 4)] == sorted(rate_of(step) for step in range(-3, 4))


def test_without_two_rates_the_capacity_is_not_known() -> None:
    assert not capacity_of((), 0.9).is_known
