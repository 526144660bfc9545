"""A plan finds the sizes that a known cluster needs, and says when co-located workers need fewer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import queue_cluster

from baton.capacity.analytic import Lengths, match
from baton.capacity.cost import CostModel, Curve, Origin, Source, StepCost
from baton.capacity.grid import Model, Shape, setup_of
from baton.capacity.journal import Journal
from baton.capacity.outcome import Slo
from baton.capacity.plan import Wish, plan
from baton.capacity.study import Objective, Plan
from baton.capacity.sweep import Backend, Laboratory
from baton.capacity.traffic import Traffic
from baton.capacity.workload import Arrival, requests
from baton.proto.settings import EngineSettings
from baton.router import config

MODEL = Model.of(EngineSettings(model="demo"))
# The known cluster's speed: a prompt token a millisecond, a sequence at a time ten milliseconds an output token.
COST = CostModel(Origin(Source.ESTIMATE), StepCost(rows=Curve((1.0, 2048.0), (0.001, 2.048)), sequence_s=0.009))


def planned(name: str, rate: float, tmp_path: Path, slo: Slo, max_workers: int = 16) -> Plan:
    traffic = Traffic(name, rate, num_requests=250)
    wish = Wish(config.defaults(), MODEL, traffic, Objective(slo), repeats=1, max_workers=max_workers)
    with ThreadPoolExecutor(1) as threads:
        journal = Journal(tmp_path / "points.jsonl")
        laboratory = Laboratory(Backend("queue", queue_cluster.measure, threads), journal)
        found, _, _ = asyncio.run(plan(wish, laboratory, COST))
        journal.close()
    return found


def test_the_smallest_cluster_is_as_large_as_the_work_and_is_shared_out_by_it(tmp_path: Path) -> None:
    """0.2 s of prefill and 0.1 s of decode a request, 12 a second: 2.4 and 1.2 workers at least."""
    found = planned("fixed:200/11", 12.0, tmp_path, Slo(ttft_s=1.0, tpot_s=0.05))
    assert found.smallest is not None
    assert (found.smallest.shape.prefill, found.smallest.shape.decode) == (3, 2)
    assert found.smallest.total_low <= 5 <= found.smallest.total_high
    assert found.best is not None
    assert found.best.shape.total == 5
    assert found.best.capacity.rate >= 12


def test_lengths_that_drift_up_need_more_and_lengths_that_drift_down_do_not(tmp_path: Path) -> None:
    found = planned("fixed:200/11", 12.0, tmp_path, Slo(ttft_s=1.0, tpot_s=0.05))
    by_drift = {(drift.prompts, drift.outputs): drift for drift in found.drifts}
    longer, shorter = by_drift[(1.25, 1.0)], by_drift[(0.75, 1.0)]
    assert longer.held.value < 0.9 <= shorter.held.value
    assert longer.choice is not None
    assert found.chosen is not None
    assert longer.choice.total > found.chosen.total
    assert shorter.choice is not None
    assert shorter.choice.total <= found.chosen.total


def test_co_location_wins_where_it_needs_fewer_workers(tmp_path: Path) -> None:
    """A tenth of a worker's time: one co-located worker is enough, where a pair would idle."""
    found = planned("fixed:50/6", 1.0, tmp_path, Slo(ttft_s=1.0, tpot_s=0.05))
    assert found.colocated is not None
    assert found.colocated.shape == Shape(colocated=1)
    assert found.chosen == Shape(colocated=1)
    assert "Co-location wins" in found.sentence


def test_an_objective_that_no_size_meets_is_told(tmp_path: Path) -> None:
    found = planned("fixed:200/11", 2.0, tmp_path, Slo(ttft_s=0.1), max_workers=4)
    assert found.chosen is None
    assert "No cluster of up to 4 workers" in found.sentence
    assert found.drifts == ()


def test_the_formula_matches_the_two_pools() -> None:
    arrivals = [Arrival(float(number), 200, 11, number) for number in range(10)]
    setup = setup_of(config.defaults(), MODEL, Shape(1, 1))
    found = match(setup, COST, Lengths.of(arrivals), Slo(tpot_s=0.0101))
    assert found.prefill_s == pytest.approx(0.2, rel=0.01)
    assert found.decode_s == pytest.approx(0.1, rel=0.01)
    assert found.prefill_share == pytest.approx(2 / 3, rel=0.01)
    assert found.split(6) == Shape(4, 2)
    assert found.rate(Shape(1, 1)) == pytest.approx(5, rel=0.01)
    assert found.rate(Shape(colocated=3)) == pytest.approx(10, rel=0.01)


def test_prompts_that_are_shared_with_the_session_are_read_once() -> None:
    alone = Lengths.of(requests("long-chat", 500, 2.0, seed=1))
    assert alone.prompt < sum(each.prompt_tokens for each in requests("long-chat", 500, 2.0, seed=1)) / 500
