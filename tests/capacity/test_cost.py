"""A cost model: more work never takes less time, its file comes back as it was, and a wrong file is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.capacity.cost import (
    CoreCost,
    CostModel,
    CostModelError,
    Curve,
    Jitter,
    Origin,
    Residual,
    RoutingCost,
    Source,
    StepCost,
    TransferCost,
)

MODEL = CostModel(
    origin=Origin(Source.MEASURED, "2 cores", "demo", "bfloat16", "2026-11-30", 1, "a note"),
    steps=StepCost(Curve((1.0, 8.0, 512.0), (0.0, 0.004, 0.2)), 0.006, 2e-8, 1e-5, 3e-7),
    transfer=TransferCost(1e-3, 1e-10, 2e-6, 1.5e-3),
    routing=RoutingCost(2e-3, 1e-3, 5e-4, 8e-5),
    cores=CoreCost(1e-3, 4e-4, 2e-4, 0.8),
    jitter=Jitter((0.9, 1.0, 1.4), (0.95, 1.0, 1.1)),
    residuals=(Residual("all", 1000, 0.02, 0.08),),
)

coefficients = st.floats(0, 1e-3)


@st.composite
def curves(draw):
    steps = draw(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 0.1)), min_size=1, max_size=6))
    rows, seconds = [0.0], [draw(st.floats(0, 0.1))]
    for more_rows, more_seconds in steps:
        rows.append(rows[-1] + more_rows)
        seconds.append(seconds[-1] + more_seconds)
    return Curve(tuple(rows), tuple(seconds))


models = st.builds(
    CostModel,
    origin=st.just(Origin(Source.ESTIMATE)),
    steps=st.builds(StepCost, curves(), coefficients, coefficients, coefficients, coefficients),
    transfer=st.builds(TransferCost, coefficients, coefficients, coefficients, coefficients),
)
amounts = st.tuples(*[st.integers(0, 5000)] * 4)


@given(models, amounts, st.integers(0, 3), st.integers(1, 5000))
def test_more_of_anything_never_makes_a_step_shorter(model, work, which, more):
    heavier = [amount + more * (index == which) for index, amount in enumerate(work)]
    before = model.step_s(*work)
    assert before >= 0
    assert model.step_s(*heavier) >= before * (1 - 1e-12)


@given(models, st.integers(0, 1 << 30), st.integers(1, 100), st.integers(0, 1 << 30), st.integers(0, 100))
def test_more_bytes_or_runs_never_make_a_transfer_shorter(model, num_bytes, runs, more_bytes, more_runs):
    assert model.transfer_s(num_bytes + more_bytes, runs + more_runs) >= model.transfer_s(num_bytes, runs)


@given(curves(), st.floats(0, 1e4))
def test_a_curve_goes_through_its_points_and_is_linear_between_them(curve, rows):
    for point, seconds in zip(curve.rows, curve.seconds, strict=True):
        assert curve.at(point) == pytest.approx(seconds, abs=1e-12)
    index = max(i for i, point in enumerate(curve.rows) if point <= rows)
    low = min(index, len(curve.rows) - 2)  # beyond the last point as between the last two
    (r0, r1), (s0, s1) = curve.rows[low : low + 2], curve.seconds[low : low + 2]
    assert curve.at(rows) == pytest.approx(s0 + (s1 - s0) * (rows - r0) / (r1 - r0), rel=1e-9, abs=1e-12)


def test_below_its_first_point_a_curve_is_flat():
    assert Curve((4.0, 8.0), (0.5, 1.0)).at(1) == 0.5


@pytest.mark.parametrize(
    ("rows", "seconds", "problem"),
    [
        ((), (), "as many"),
        ((1.0, 2.0), (0.0,), "as many"),
        ((1.0, 1.0), (0.0, 1.0), "ascend"),
        ((1.0, 2.0), (1.0, 0.5), "descend"),
        ((1.0, 2.0), (0.0, float("nan")), "finite"),
        ((-1.0, 2.0), (0.0, 1.0), "negative"),
    ],
)
def test_a_curve_that_could_fall_or_end_is_refused(rows, seconds, problem):
    with pytest.raises(ValueError, match=problem):
        Curve(rows, seconds)


@given(models, amounts, st.floats(0.1, 10))
def test_a_scaled_device_takes_that_many_times_as_long_for_every_step(model, work, factor):
    assert model.scaled(factor).step_s(*work) == pytest.approx(factor * model.step_s(*work), rel=1e-9, abs=1e-15)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_jitter_is_a_quantile_function(ratios, one, other):
    jitter = Jitter(decode=tuple(sorted(ratios)))
    low, high = sorted((one, other))
    assert min(ratios) <= jitter.at(low, 0) <= jitter.at(high, 0) * (1 + 1e-12) <= max(ratios) * (1 + 1e-9)
    assert jitter.at(0.0, 0) == min(ratios)
    assert jitter.at(1.0, 0) == pytest.approx(max(ratios))
    assert jitter.at(one, 512) == 1.0


@given(models)
def test_a_file_comes_back_as_it_was(model):
    assert CostModel.from_json(model.to_json()) == model


def test_a_full_model_is_saved_and_loaded(tmp_path):
    path = tmp_path / "cost.json"
    MODEL.save(path)
    assert CostModel.load(path) == MODEL


def _changed(path: str, value: object) -> str:
    """The file with one value set, or left out where it is None."""
    data = json.loads(MODEL.to_json())
    *way, last = path.split(".")
    place = data
    for name in way:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return json.dumps(data)


def test_a_file_of_the_version_before_says_nothing_of_shared_cores():
    data = json.loads(MODEL.to_json())
    del data["cores"]
    older = json.dumps(data | {"version": 1})
    assert CostModel.from_json(older) == replace(MODEL, cores=CoreCost())


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("format", "other", "is no cost model"),
        ("version", 3, "version is 3, must be 1 or 2"),
        ("cores", None, "cores is missing"),
        ("cores.token_cpu_s", -1, "cores.token_cpu_s is -1, must be at least 0"),
        ("cores.crowded_speed", 1.5, "cores.crowded_speed is 1.5, must be at most 1"),
        ("steps", None, "steps is missing"),
        ("steps.pair_s", None, "steps.pair_s is missing"),
        ("steps.pair_s", -1e-9, "steps.pair_s is -1e-09, must be at least 0"),
        ("steps.pair_s", "fast", "steps.pair_s is 'fast', must be a number"),
        ("steps.rows.seconds", [0.0, 0.2, 0.1], "steps.rows rows must ascend, and seconds must not descend"),
        ("steps.rows.rows", [1, 2, -3], r"steps.rows.rows\[2\] is -3, must be at least 0"),
        ("steps.rows.rows", 3, "steps.rows.rows must be a list of numbers"),
        ("steps.speed", 3, "steps.speed is not a setting"),
        ("transfer.byte_s", None, "transfer.byte_s is missing"),
        ("routing.routing_s", -1, "routing.routing_s is -1, must be at least 0"),
        ("jitter.decode", [1.0, 0.5], "jitter decode: quantiles must not descend"),
        ("jitter.decode", [0.0, 0.5], "jitter decode: every ratio must be finite and above 0"),
        ("origin.source", "guess", "origin.source is 'guess', must be one of measured, estimate"),
        ("residuals", None, "residuals is missing"),
        ("residuals", [{"regime": 3}], r"residuals\[0\].regime is 3, must be a string"),
        ("price", 3, "price is not a field"),
    ],
)
def test_a_wrong_file_is_refused_with_field_and_bound(path, value, complaint):
    with pytest.raises(CostModelError, match=complaint) as caught:
        CostModel.from_json(_changed(path, value), "my.json")
    assert str(caught.value).startswith("my.json: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 1}'])
def test_what_is_no_model_at_all_is_refused(text):
    with pytest.raises(CostModelError, match=r"my\.json: "):
        CostModel.from_json(text, "my.json")
