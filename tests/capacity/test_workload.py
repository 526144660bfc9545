"""Synthetic traffic has the quantiles, rates, bursts and shared prefixes that were asked for, and follows its seed."""

from __future__ import annotations

import math
import statistics
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations, groupby, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.capacity.workload import (
    MIXES,
    NAMES,
    PHASE_S,
    Arrival,
    Piece,
    Quantiles,
    UnknownWorkload,
    arrivals,
    mix,
    requests,
)

NUM = 4000


def prompt_length(arrival: Arrival) -> float:
    return arrival.prompt_tokens


def output_length(arrival: Arrival) -> float:
    return arrival.output_tokens


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("length", [prompt_length, output_length])
def test_lengths_have_the_published_quantiles(name: str, length: Callable[[Arrival], float]) -> None:
    quantiles = MIXES[name].prompt if length is prompt_length else MIXES[name].output
    lengths = sorted(map(length, requests(name, NUM, seed=1)))
    for point, value in zip(quantiles.points, quantiles.values, strict=True):
        # Counting is steadier than comparing values where the distribution is flat or steep.
        below, above = (sum(one <= edge for one in lengths) / NUM for edge in (value * 0.97 - 1, value * 1.03 + 1))
        assert below - 0.02 <= point <= above + 0.02


@pytest.mark.parametrize(
    ("name", "prompt", "output"), [("chat", 1155, 211), ("code", 2048, 28), ("long-chat", 12035, 343)]
)
def test_means_are_those_of_the_traces(name: str, prompt: float, output: float) -> None:
    assert mix(name).prompt.mean() == pytest.approx(prompt, rel=0.05)
    assert mix(name).output.mean() == pytest.approx(output, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_arrivals_and_another_seed_others(name: str) -> None:
    assert requests(name, 200, 2.0, seed=3) == requests(name, 200, 2.0, seed=3)
    assert requests(name, 200, 2.0, seed=3) != requests(name, 200, 2.0, seed=4)


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_run_begins_like_a_shorter_one(name: str) -> None:
    assert requests(name, 300, 2.0, seed=3)[:100] == requests(name, 100, 2.0, seed=3)


@pytest.mark.parametrize("name", ["chat", "code"])
def test_another_rate_is_the_same_traffic_in_another_time(name: str) -> None:
    for slow, fast in zip(requests(name, 2000, 1.0, seed=3), requests(name, 2000, 4.0, seed=3), strict=True):
        assert (slow.prompt_tokens, slow.output_tokens) == (fast.prompt_tokens, fast.output_tokens)
        assert slow.time_s == pytest.approx(4 * fast.time_s)


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_arrivals_keep_the_rate_and_come_in_order(rate: float) -> None:
    times = [arrival.time_s for arrival in requests("chat", NUM, rate, seed=1)]
    assert times == sorted(times)
    assert NUM / times[-1] == pytest.approx(rate, rel=0.1)


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def variation(values: Sequence[float]) -> float:
    return statistics.pstdev(values) / statistics.fmean(values)


def test_code_comes_in_bursts_and_chat_does_not() -> None:
    chat = [arrival.time_s for arrival in requests("chat", 20_000, 2.0, seed=1)]
    assert variation(gaps(chat)) == pytest.approx(1.02, rel=0.05)
    code = [arrival.time_s for arrival in requests("code", 50_000, 2.57, seed=1)]
    assert variation(gaps(code)) == pytest.approx(13, rel=0.15)
    assert len(code) / code[-1] == pytest.approx(2.57, rel=0.15)


def test_code_is_silent_for_minutes_and_uneven_within_each_minute() -> None:
    times = [arrival.time_s for arrival in requests("code", 50_000, 2.57, seed=1)]
    assert 150 < max(gaps(times)) <= 217 + 60
    minutes = [list(group) for _, group in groupby(times, key=lambda time_s: time_s // 60)]
    inside = [variation(gaps(minute)) for minute in minutes if len(minute) > 10]
    assert statistics.fmean(inside) == pytest.approx(4.3, rel=0.15)


def test_arrivals_go_on_without_end_in_the_same_memory() -> None:
    endless = arrivals("long-chat", 2.0, seed=1)
    tracemalloc.start()
    try:
        deque(islice(endless, 4000), maxlen=0)
        before, _ = tracemalloc.get_traced_memory()
        deque(islice(endless, 4000), maxlen=0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert {arrival.time_s for arrival in requests("chat", 50)} == {0.0}


def test_scaled_lengths_are_never_below_one() -> None:
    full, small = requests("code", 500, seed=1), requests("code", 500, seed=1, scale_lengths=0.1)
    for before, after in zip(full, small, strict=True):
        assert after.prompt_tokens == pytest.approx(before.prompt_tokens * 0.1, abs=0.6) or after.prompt_tokens == 1
    assert min(arrival.output_tokens for arrival in small) == 1


@pytest.mark.parametrize(("name", "hit"), [("long-chat", 0.366), ("doc-qa", 0.64)])
def test_shared_prefixes_are_as_common_as_in_the_traces(name: str, hit: float) -> None:
    found = requests(name, NUM, 2.0, seed=1)
    reused = sum(max(arrival.prefix_tokens, arrival.shared_tokens) for arrival in found)
    assert reused / sum(arrival.prompt_tokens for arrival in found) == pytest.approx(hit, abs=0.06)


def test_a_follow_up_extends_the_last_request_of_its_session() -> None:
    last: dict[int, Arrival] = {}
    num_follow_ups = 0
    for arrival in requests("long-chat", NUM, 2.0, seed=1):
        previous = last.get(arrival.session)
        if previous is None:
            assert arrival.prefix_tokens == 0
        else:
            num_follow_ups += 1
            assert arrival.prefix_tokens == previous.prompt_tokens < arrival.prompt_tokens
        last[arrival.session] = arrival
    assert num_follow_ups / NUM == pytest.approx(0.39, abs=0.03)


def test_follow_ups_come_after_the_usual_time() -> None:
    last: dict[int, float] = {}
    found = []
    for arrival in requests("long-chat", NUM, 2.0, seed=1):
        if arrival.session in last:
            found.append(arrival.time_s - last[arrival.session])
        last[arrival.session] = arrival.time_s
    p10, *_, p90 = statistics.quantiles(found, n=10)
    assert p10 == pytest.approx(42, rel=0.3)
    assert statistics.median(found) == pytest.approx(123, rel=0.3)
    assert p90 == pytest.approx(483, rel=0.3)


def test_long_documents_get_short_answers() -> None:
    found = requests("doc-qa", NUM, seed=1)
    correlation = statistics.correlation(
        ranks([arrival.prompt_tokens for arrival in found]), ranks([arrival.output_tokens for arrival in found])
    )
    assert correlation == pytest.approx(-0.52, abs=0.05)


def ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    for rank, position in enumerate(order):
        found[position] = rank
    return found


def test_shift_is_three_minutes_of_each_mix_in_turn() -> None:
    found = requests("shift", 9000, 10.0, seed=1)
    phases = [[each for each in found if each.time_s // PHASE_S == phase] for phase in range(4)]
    ratios = [sum(map(prompt_length, part)) / sum(map(output_length, part)) for part in phases]
    expected = [5.5, 75, 36, 5.5]
    assert ratios == [pytest.approx(ratio, rel=0.2) for ratio in expected]
    assert all(after.time_s >= before.time_s for before, after in pairwise(found))
    sessions = [{each.session for each in part} for part in phases]
    assert not any(first & second for first, second in combinations(sessions, 2))
    assert phases[0] != phases[3]


def test_shift_at_once_still_has_all_its_mixes() -> None:
    found = requests("shift", 300, seed=1)
    assert sum(map(output_length, found[100:200])) < sum(map(output_length, found[:100])) / 3


def test_the_pieces_of_a_prompt_are_what_it_shares() -> None:
    arrival = Arrival(0.0, 1000, 5, session=7, prefix_tokens=600, shared_tokens=512)
    assert list(arrival.pieces) == [Piece("shared", 512), Piece("session/7", 488)]
    replayed = Arrival(0.0, 1100, 5, session=7, blocks=(3, 9, 4), block_tokens=512)
    assert list(replayed.pieces) == [Piece("block/3", 512), Piece("block/9", 512), Piece("block/4", 76)]
    assert list(Arrival(0.0, 10, 5, session=7).pieces) == [Piece("session/7", 10)]


def test_fixed_lengths_are_exact_and_random_ones_spread_around_theirs() -> None:
    assert {(a.prompt_tokens, a.output_tokens) for a in requests("fixed:128/16", 50)} == {(128, 16)}
    lengths = [arrival.prompt_tokens for arrival in requests("random:100/10", 2000)]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150
    assert statistics.fmean(lengths) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("name", ["", "chats", "fixed:1", "fixed:0/5", "random:5/-1", "fixed:1/2/3"])
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(UnknownWorkload, match="long-chat"):
        requests(name, 1)


@pytest.mark.parametrize(
    ("num_requests", "rate", "scale"),
    [(-1, 1.0, 1.0), (1, 0.0, 1.0), (1, math.nan, 1.0), (1, 1.0, 0.0), (1, 1.0, math.inf)],
)
def test_numbers_that_make_no_sense_are_refused(num_requests: int, rate: float, scale: float) -> None:
    with pytest.raises(ValueError, match="must"):
        requests("chat", num_requests, rate, scale_lengths=scale)


@given(st.lists(st.integers(0, 10_000), min_size=9, max_size=9).map(sorted), st.floats(0, 1), st.floats(0, 1))
def test_the_inverse_distribution_never_descends_and_meets_its_points(
    values: list[int], first: float, second: float
) -> None:
    quantiles = Quantiles(MIXES["chat"].prompt.points, tuple(values))
    low, high = sorted((first, second))
    assert quantiles.at(low) <= quantiles.at(high) + 1e-6
    for point, value in zip(quantiles.points, values, strict=True):
        assert quantiles.at(point) == pytest.approx(value)


def test_quantiles_that_descend_are_refused() -> None:
    with pytest.raises(ValueError, match="must not descend"):
        Quantiles((0.1, 0.9), (5, 4))
