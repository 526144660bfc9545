"""A fit finds the coefficients that made the steps, through noise and outliers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_steps import ORIGIN, TRUTH, Work, works

from baton.capacity import calibrate, regression
from baton.capacity.calibrate import MIN_STEPS, WARM_UP_STEPS, Probe, TooLittleData
from baton.capacity.cost import CostModel
from baton.proto.messages import Role
from baton.proto.step_log import HandoffRecord, StepLogFile, StepLogHeader, StepRecord


def _step(work: Work, seconds: float) -> StepRecord:
    prefill, pairs, decode, kv_tokens = work
    return StepRecord(
        0.0, prefill, pairs, decode, kv_tokens, 0, 0.1 * seconds, 0.8 * seconds, 0.05 * seconds, 0.05 * seconds, seconds
    )


def _log(steps: list[StepRecord], handoffs: Sequence[HandoffRecord] = ()) -> StepLogFile:
    return StepLogFile(StepLogHeader("w", Role.COLOCATED), tuple(steps), tuple(handoffs))


@pytest.mark.parametrize(("noise", "outliers", "margin"), [(0.0, 0.0, 0.002), (0.03, 0.05, 0.03), (0.1, 0.1, 0.12)])
def test_a_fit_predicts_steps_that_it_has_not_seen(noise, outliers, margin):
    generator = random.Random(5)
    steps = []
    for work in works(4000, generator):
        seconds = TRUTH.step_s(*work) * generator.lognormvariate(0, noise)
        steps.append(_step(work, seconds * (generator.uniform(2, 10) if generator.random() < outliers else 1)))
    found = calibrate.fit([_log(steps)], [], ORIGIN)
    errors = [abs(found.step_s(*work) / TRUTH.step_s(*work) - 1) for work in works(500, random.Random(6))]
    assert max(errors) < max(3 * margin, 0.01)
    assert sorted(errors)[len(errors) // 2] < margin
    assert found.steps.kv_token_s == pytest.approx(TRUTH.steps.kv_token_s, rel=max(3 * margin, 0.02))
    assert found.steps.pair_s == pytest.approx(TRUTH.steps.pair_s, rel=max(3 * margin, 0.02))


def test_the_scatter_of_the_steps_becomes_jitter_with_the_same_mean_and_residuals_tell_its_size():
    generator = random.Random(8)
    kinds = works(6000, generator)
    factors = [generator.lognormvariate(0, 0.05) * (5 if generator.random() < 0.02 else 1) for _ in kinds]
    steps = [_step(work, TRUTH.step_s(*work) * factor) for work, factor in zip(kinds, factors, strict=True)]
    found = calibrate.fit([_log(steps)], [], ORIGIN)
    for prefill_tokens in (0, 512):
        of_kind = [f for f, work in zip(factors, kinds, strict=True) if (work[0] > 0) == (prefill_tokens > 0)]
        draws = [found.jitter.at((k + 0.5) / 5000, prefill_tokens) for k in range(5000)]
        assert np.mean(draws) == pytest.approx(np.mean(of_kind), rel=0.03)
        assert np.median(draws) == pytest.approx(1.0, rel=0.02)
    regimes = {residual.regime: residual for residual in found.residuals}
    assert set(regimes) == {name for name, _ in calibrate._REGIMES} | {"all"}
    assert regimes["all"].steps == len(kinds) - WARM_UP_STEPS
    assert regimes["all"].median == pytest.approx(0.6745 * 0.05, rel=0.15)


def test_the_first_steps_of_each_worker_are_left_out():
    generator = random.Random(9)
    steps = [_step(work, TRUTH.step_s(*work)) for work in works(2000, generator)]
    slow = [_step(work, 50 * TRUTH.step_s(*work)) for work in works(WARM_UP_STEPS, generator)]
    logs = [_log(slow + steps[:1000]), _log(slow + steps[1000:])]
    found = calibrate.fit(logs, [], ORIGIN)
    assert found.residuals[-1].steps == 2000
    assert found.residuals[-1].p90 < 0.01


def test_too_few_steps_are_refused_with_their_number():
    steps = [_step((0, 0, 1, 10), 0.01)] * (WARM_UP_STEPS + MIN_STEPS - 1)
    with pytest.raises(TooLittleData, match=f"{MIN_STEPS - 1} steps after warm-up, at least {MIN_STEPS}"):
        calibrate.fit([_log(steps)], [], ORIGIN)


def test_steps_of_one_kind_alone_are_fitted_too():
    found, ratios = calibrate.fit_steps([_step((0, 0, 4, 400), 0.01)] * 300)
    assert np.allclose(ratios, 1.0)
    assert CostModel(ORIGIN, found).step_s(0, 0, 4, 400) == pytest.approx(0.01)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(0, 40))
def test_non_negative_least_squares_leaves_no_coefficient_that_would_do_better(seed, columns, more_rows):
    """The conditions of Karush, Kuhn and Tucker, which only the optimum of a convex problem meets."""
    generator = np.random.default_rng(seed)
    matrix = generator.normal(size=(columns + more_rows, columns))
    target = generator.normal(size=columns + more_rows)
    x = regression.nonnegative(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    scale = np.abs(matrix).sum() * np.abs(target).max()
    assert (x >= 0).all()
    assert (gradient <= 1e-9 * scale).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-9 * scale


def test_a_transfer_is_found_from_hand_offs_of_several_reads():
    generator = random.Random(3)
    handoffs = []
    for _ in range(400):
        pulls, blocks = generator.randint(1, 5), generator.randint(1, 200)
        runs, num_bytes = generator.randint(pulls, pulls + blocks), blocks * 368_640
        reading_s = (2e-3 * pulls + 1.5e-10 * num_bytes + 4e-6 * runs) * generator.lognormvariate(0, 0.02)
        reading_s *= 6 if generator.random() < 0.04 else 1
        transfer_s = reading_s / pulls + 1.2e-3
        handoffs.append(HandoffRecord(float(len(handoffs)), pulls, num_bytes, runs, reading_s, 0.0, transfer_s))
    found = calibrate.fit_transfer(handoffs)
    assert found.start_s == pytest.approx(2e-3, rel=0.05)
    assert found.byte_s == pytest.approx(1.5e-10, rel=0.05)
    assert found.run_s == pytest.approx(4e-6, rel=0.15)
    assert found.control_s == pytest.approx(1.2e-3, rel=0.01)


def test_hand_offs_that_waited_for_one_another_do_not_count_where_others_were_alone():
    alone = [HandoffRecord(10.0 * k, 1, 368_640, 1, 1e-3, 0.0, 3e-3) for k in range(20)]
    crowd = [HandoffRecord(5.0 + 1e-3 * k, 1, 368_640, 1, 20e-3, 0.0, 60e-3) for k in range(200)]
    found = calibrate.fit_transfer([*crowd, *alone])
    assert found.control_s == pytest.approx(2e-3)
    assert found.start_s + 368_640 * found.byte_s + found.run_s == pytest.approx(1e-3)
    assert calibrate.fit_transfer(crowd).control_s == pytest.approx(40e-3)


def test_the_way_to_a_worker_and_back_is_what_a_probe_leaves_around_its_step():
    def step(start_s: float, gap_s: float | None) -> StepRecord:
        return StepRecord(start_s, 8, 36, 0, 0, 0, 0.001, 0.008, 0.001, gap_s, 0.01)

    steps = [step(10.0 * k + 0.003 + 1e-5 * k, None) for k in range(20)] + [
        step(10.0 * k + 0.02, 0.0) for k in range(20)
    ]
    probes = [Probe(10.0 * k, 10.0 * k + 0.015) for k in range(20)]
    routing = calibrate.fit_routing([_log(steps)], probes)
    assert routing.routing_s == pytest.approx(0.0031, abs=1e-4)
    assert routing.delivery_s == pytest.approx(0.0019, abs=1e-4)
    assert routing.report_delay_s == pytest.approx(routing.delivery_s / 2)


def test_probes_by_another_clock_find_nothing():
    routing = calibrate.fit_routing([_log([_step((8, 36, 0, 0), 0.01)])], [Probe(500.0, 501.0)])
    assert (routing.routing_s, routing.delivery_s) == (0.0, 0.0)
