"""Gaps between tokens: counting a step for all sequences at once gives what noting every token gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.capacity.outcome import Histogram
from baton.capacity.token_gaps import Reader, TokenGaps
from baton.proto.messages import Request, Sampling
from baton.scheduler.sequence import Sequence

NAMES = "abcde"
steps = st.lists(st.tuples(st.floats(0.001, 3.0), st.sets(st.sampled_from(NAMES))), min_size=1, max_size=40)


class Slow:
    """Notes the time of each token."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {name: [] for name in NAMES}

    def worst(self, name: str) -> float:
        return max(self.gaps(name), default=0.0)

    def gaps(self, name: str) -> list[float]:
        times = self.times[name]
        return [after - before for before, after in pairwise(times)]


@settings(max_examples=300, deadline=None)
@given(steps)
def test_gaps_and_the_worst_of_each_are_those_of_noting_every_token(steps) -> None:
    histogram, expected, slow = Histogram(), Histogram(), Slow()
    gaps = TokenGaps(histogram)
    sequences = {name: Sequence(Request(name, (1,), 1, Sampling()), 0, 0.0) for name in NAMES}
    readers = {name: Reader() for name in NAMES}
    now = 0.0
    for pause_s, speaking in steps:
        now += pause_s
        in_stride = [name for name in NAMES if name in speaking and sequences[name] in gaps]
        for name in NAMES:
            if name not in speaking:
                gaps.leave(sequences[name])
        gaps.step(now)
        for name in sorted(speaking - set(in_stride)):
            gaps.enter(sequences[name], readers[name])
        for name in speaking:
            slow.times[name].append(now)
    for name in NAMES:
        gaps.leave(sequences[name])
        assert readers[name].worst_gap_s == pytest.approx(slow.worst(name))
        assert readers[name].last_token_s == (slow.times[name][-1] if slow.times[name] else None)
        for gap_s in slow.gaps(name):
            expected.add(gap_s)
    assert histogram.total == expected.total
    for fraction in (0.1, 0.5, 0.99):
        if expected.total:
            assert histogram.quantile(fraction) == pytest.approx(expected.quantile(fraction), rel=0.03)
