"""What is a trace context is read as W3C Trace Context says; what is none is ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.tracing import TraceContext, begin, read_traceparent, read_tracestate

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
contexts = st.builds(TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


@given(contexts)
def test_a_context_survives_the_header(context):
    assert read_traceparent(context.traceparent) == context


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
        (f" 00-{TRACE}-{SPAN}-01\t", True),
    ],
)
def test_a_header_of_any_version_is_read(header, sampled):
    assert read_traceparent(header) == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{chr(0x661) * 32}-{SPAN}-01",
    ],
)
def test_a_header_that_is_none_is_ignored(header):
    assert read_traceparent(header) is None


@given(st.text())
def test_no_header_raises(header):
    read_traceparent(header)
    read_tracestate(header)


@pytest.mark.parametrize(
    ("header", "read"),
    [
        ("a=1", "a=1"),
        ("a=1 , b@c=x y\t", "a=1,b@c=x y"),
        ("a=1,,b=2", "a=1,b=2"),
        ("", ""),
        ("a", ""),
        ("A=1", ""),
        ("a=1,a=2", ""),
        ("a=b=c", ""),
        ("a=" + "x" * 520, ""),
        (",".join(f"k{index}=1" for index in range(33)), ""),
    ],
)
def test_a_tracestate_is_read_whole_or_not_at_all(header, read):
    assert read_tracestate(header) == read


def test_a_parent_decides_for_the_whole_trace():
    for sampled in (True, False):
        parent = TraceContext(1, 2, sampled)
        context = begin(parent, ratio=0.0 if sampled else 1.0)
        assert (context.trace_id, context.sampled) == (1, sampled)
        assert context.span_id not in (0, 2)


def test_of_requests_without_a_parent_the_ratio_is_sampled():
    counts = {ratio: sum(begin(None, ratio).sampled for _ in range(4000)) for ratio in (0.0, 0.25, 1.0)}
    assert counts[0.0] == 0
    assert counts[1.0] == 4000
    assert 800 < counts[0.25] < 1200  # seven standard deviations
