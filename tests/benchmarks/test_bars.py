"""The table of `make bench`: ratios say how many times better, verdicts follow the bar, a missing peer is no miss."""

from __future__ import annotations

import json
import math
import statistics

import pytest
from bars import HEADINGS, Better, Measure, Row, Verdict, percentile, table, tally
from hypothesis import given
from hypothesis import strategies as st
from peers_install import requirements

POSITIVE = st.floats(min_value=1e-6, max_value=1e6)
PAIRS = st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=7)


def row(*measures: Measure) -> Row:
    return Row("S0", "decode", "tokens/s", measures)


@given(PAIRS)
def test_a_ratio_above_one_says_that_ours_is_better_whichever_way_the_values_go(
    pairs: list[tuple[float, float]],
) -> None:
    ours, theirs = (tuple(side) for side in zip(*pairs, strict=True))
    more = Measure("peer", Better.MORE, 1.0, ours, theirs)
    less = Measure("peer", Better.LESS, 1.0, ours, theirs)
    for a, b, up, down in zip(ours, theirs, more.ratios, less.ratios, strict=True):
        assert (up > 1) == (a > b)
        assert up * down == pytest.approx(1)


@given(PAIRS, POSITIVE)
def test_the_verdict_is_that_of_the_median_round(pairs: list[tuple[float, float]], bar: float) -> None:
    ours, theirs = (tuple(side) for side in zip(*pairs, strict=True))
    reached = statistics.median(a / b for a, b in pairs) >= bar
    assert Measure("peer", Better.MORE, bar, ours, theirs).verdict is (Verdict.OK if reached else Verdict.MISS)


def test_what_must_stay_under_a_bound_is_not_turned_round() -> None:
    assert Measure("window", Better.AT_MOST, 0.15, (0.1, 0.12, 0.2)).verdict is Verdict.OK
    assert Measure("window", Better.AT_MOST, 0.15, (0.1, 0.16, 0.2)).verdict is Verdict.MISS


def test_a_peer_that_is_not_installed_is_told_and_is_no_miss() -> None:
    missing = Measure("peer", Better.MORE, 1.3, (10.0, 11.0))
    assert row(missing).verdict is Verdict.NO_PEER
    assert "peer not installed" in table([row(missing)])
    assert tally([row(missing)]) == "1 peer not installed"


def test_one_measure_that_reaches_its_bar_is_enough() -> None:
    slow = Measure("peer", Better.MORE, 1.3, (10.0,), (10.0,))
    near = Measure("limit", Better.MORE, 0.85, (10.0,), (11.0,))
    far = Measure("limit", Better.MORE, 0.85, (10.0,), (20.0,))
    assert row(slow, near).verdict is Verdict.OK
    assert row(slow, far).verdict is Verdict.MISS


def test_nothing_over_nothing_is_no_ratio_and_something_over_nothing_passes() -> None:
    assert Measure("peer", Better.MORE, 1.3, (0.0, 0.0), (0.0, 0.0)).verdict is Verdict.SHOWN
    assert Measure("peer", Better.MORE, 1.3, (2.0, 2.0), (0.0, 0.0)).ratio == math.inf


def test_a_figure_without_a_bar_is_only_shown() -> None:
    assert row(Measure("peer", Better.MORE, None, (1.0,), (2.0,))).verdict is Verdict.SHOWN


@given(st.lists(st.tuples(POSITIVE | st.just(math.nan), POSITIVE), min_size=1, max_size=5), st.sampled_from(Better))
def test_rows_come_back_from_json_as_they_were(pairs: list[tuple[float, float]], better: Better) -> None:
    ours, theirs = (tuple(side) for side in zip(*pairs, strict=True))
    before = row(Measure("peer", better, 1.3, ours, theirs), Measure("limit", better, None, ours))
    after = Row.from_json(json.loads(json.dumps(before.to_json(), allow_nan=False)))
    assert repr(after) == repr(before)  # NaN is not equal to itself
    assert after.verdict is before.verdict


def test_the_table_has_a_line_for_each_measure_with_median_and_spread() -> None:
    lines = table(
        [
            row(
                Measure("peer", Better.MORE, 1.3, (10.0, 30.0, 20.0), (10.0, 10.0, 10.0)),
                Measure("limit", Better.MORE, 0.85, (10.0, 30.0, 20.0), (40.0, 40.0, 40.0)),
            )
        ]
    ).splitlines()
    assert lines[0].split()[0] == HEADINGS[0]
    assert "2.00 (1.00..3.00)" in lines[2]
    assert lines[2].endswith("ok")
    assert lines[3].strip().startswith("or")
    assert len(lines) == 4


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_percentiles_lie_between_the_nearest_ranks(values: list[float], fraction: float) -> None:
    ordered = sorted(values)
    at = fraction * (len(values) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    assert min(low, high) - 1e-6 <= percentile(values, fraction) <= max(low, high) + 1e-6


def test_the_peers_requirements_leave_out_extras_and_what_serving_text_does_not_need() -> None:
    text = "Name: x\nRequires-Dist: torch==2.13.0+cpu; platform_machine == 'x86_64'\nRequires-Dist: torch_audio\n"
    text += "Requires-Dist: torchaudio; python_version > '3'\nRequires-Dist: numpy>=2\n"
    text += "Requires-Dist: zen==1; extra == 'zen'\n\ntext\n"
    assert requirements(text) == ["torch_audio", "numpy>=2"]
