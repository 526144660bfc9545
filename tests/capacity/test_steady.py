"""Only the steady part of a run counts; a cluster that falls behind is told from one that keeps up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.capacity.steady import (
    PARTS,
    Block,
    Floats,
    Verdict,
    Window,
    blocks,
    mean_backlog,
    no_growth,
    resampled,
    share,
    slope,
    steadiness,
    wilson,
)


def arrivals(number: int, seed: int = 0) -> Floats:
    return np.cumsum(np.random.default_rng(seed).exponential(1.0, number))


def served(arrived: Floats, service_s: float, seed: int = 0) -> Floats:
    """The ends in a line with one server."""
    free, ends = 0.0, []
    for arrived_s, took_s in zip(
        arrived, np.random.default_rng(seed + 1).exponential(service_s, len(arrived)), strict=True
    ):
        free = max(free, arrived_s) + took_s
        ends.append(free)
    return np.array(ends)


def verdict(service_s: float, seed: int) -> Verdict:
    arrived = arrivals(1500, seed)
    ended = served(arrived, service_s, seed)
    return steadiness(arrived, ended, Window.of(arrived, ended.max())).verdict


@pytest.mark.parametrize("seed", range(10))
def test_half_the_load_is_stable_and_half_as_much_again_overloads(seed: int) -> None:
    assert verdict(0.5, seed) is Verdict.STABLE
    assert verdict(1.5, seed) is Verdict.OVERLOADED


def test_slightly_too_much_load_is_backlogged() -> None:
    arrived = np.arange(2000.0)
    ended = served_evenly(arrived, 1.05)
    assert steadiness(arrived, ended, Window.of(arrived, ended.max())).verdict is Verdict.BACKLOGGED


def served_evenly(arrived: Floats, service_s: float) -> Floats:
    return arrived + service_s + np.arange(len(arrived)) * max(service_s - 1.0, 0.0)


def test_requests_that_are_never_served_are_a_backlog_that_grows() -> None:
    arrived = np.arange(1000.0)
    ended = np.where(np.arange(1000) % 4 == 0, np.inf, arrived + 0.5)
    assert steadiness(arrived, ended, Window.of(arrived, 1000.0)).verdict is Verdict.OVERLOADED


def test_the_window_leaves_out_warm_up_and_end() -> None:
    window = Window.of(np.array([10.0, 20.0, 110.0]), 500.0)
    assert (window.start_s, window.end_s) == (30.0, 100.0)
    assert Window.of(np.zeros(5), 8.0).length_s == 8.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 50)), min_size=1, max_size=30))
def test_the_mean_backlog_is_that_of_counting_at_many_moments(requests: list[tuple[float, float]]) -> None:
    arrived = np.array([start for start, _ in requests])
    ended = arrived + np.array([took for _, took in requests])
    window = Window(0.0, 100.0)
    moments = np.linspace(0, 100, 20_001)[:-1] + 0.0025
    counted = ((arrived <= moments[:, None]) & (moments[:, None] < ended)).sum(axis=1)
    assert mean_backlog(arrived, ended, window) == pytest.approx(counted.reshape(PARTS, -1).mean(axis=1), abs=0.05)


@given(st.floats(-5, 5), st.floats(-100, 100))
def test_the_slope_of_a_line_is_its_slope(rise: float, start: float) -> None:
    assert slope(start + rise * np.arange(20.0)) == pytest.approx(rise, abs=1e-9)


def test_ascents_are_no_chance_and_noise_is() -> None:
    assert no_growth(np.arange(20.0)) < 1e-6
    assert no_growth(-np.arange(20.0)) > 0.99
    found = [no_growth(np.random.default_rng(seed).normal(size=20)) for seed in range(200)]
    assert np.mean(np.array(found) < 0.05) == pytest.approx(0.05, abs=0.04)


@given(st.lists(st.booleans(), min_size=1, max_size=500))
def test_blocks_hold_every_request_once_in_order(flags: list[bool]) -> None:
    cut = blocks(flags)
    assert sum(block.requests for block in cut) == len(flags)
    assert sum(block.good for block in cut) == sum(flags)


@given(st.lists(st.booleans(), min_size=1, max_size=500))
def test_a_share_lies_within_its_interval_and_wilsons_lies_in_it_too(flags: list[bool]) -> None:
    found = share(blocks(flags))
    low, high = wilson(found.value, len(flags))
    assert 0 <= found.low <= low <= found.value + 1e-12
    assert found.value - 1e-12 <= high <= found.high <= 1


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    held = 0
    for seed in range(200):
        flags = np.random.default_rng(seed).random(400) < 0.8
        found = share(blocks(flags))
        held += found.low <= 0.8 <= found.high
    assert held / 200 == pytest.approx(0.95, abs=0.05)


def test_requests_that_share_their_luck_make_the_interval_wider() -> None:
    lucky = np.repeat(np.random.default_rng(1).random(40) < 0.8, 10)
    alone = np.random.default_rng(1).permutation(lucky)
    together, apart = share(blocks(lucky)), share(blocks(alone))
    assert together.high - together.low > 1.5 * (apart.high - apart.low)


def test_the_same_seed_draws_the_same_blocks() -> None:
    first = [Block(10, good) for good in range(10)]
    assert (resampled(first) == resampled(first)).all()
    assert (resampled(first, seed=1) != resampled(first, seed=2)).any()
