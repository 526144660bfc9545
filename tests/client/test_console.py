"""What the status looks like in terminals of several sizes, as text: colours only repeat what signs say."""

from __future__ import annotations

import io

import pytest
from fake_router import a_status
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from baton.client.console import Mark, Status, latency, size, stacked
from baton.proto import cluster_pb2 as cluster
from baton.proto import inference_pb2 as inference

MARKS = (Mark("one", "one", "1", ""), Mark("two", "two", "2", ""), Mark("three", "three", "3", ""))


def drawn(message: cluster.ClusterStatus, width: int, height: int = 40) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None, highlight=False)
    console.print(Status(message))
    return out.getvalue().splitlines()


def a_request(number: int, **fields) -> cluster.RecentRequest:
    timeline = inference.Timeline(prefill_queue=0.25, prefill_compute=0.5, decode=1.25, total=2.0)
    values = {"request_id": f"request-{number}", "outcome": "length", "ttft_s": 0.75, "timeline": timeline}
    return cluster.RecentRequest(number=number, prompt_tokens=512, completion_tokens=40, **(values | fields))


def with_requests(*requests: cluster.RecentRequest) -> cluster.ClusterStatus:
    status = a_status()
    status.recent.extend(requests)
    return status


@given(
    shares=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    cells=st.integers(1, 200),
)
def test_a_stacked_bar_is_as_long_as_its_parts_together(shares: list[float], cells: int) -> None:
    total = sum(shares)
    if total > 1:
        shares = [share / total for share in shares]
    text = stacked(shares, MARKS, cells).plain
    assert len(text) == cells
    assert list(text.rstrip()) == sorted(text.rstrip())
    assert abs(len(text.rstrip()) - sum(shares) * cells) <= 0.5 + 1e-6
    for mark, share in zip(MARKS, shares, strict=True):
        assert abs(text.count(mark.sign) - share * cells) <= 1 + 1e-6


@pytest.mark.parametrize("width", [80, 100, 130, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    status = with_requests(a_request(1, request_id="x" * 200), a_request(2, outcome="overloaded"))
    lines = drawn(status, width)
    assert max(map(len, lines)) <= width
    assert any("decode-0" in line and "75%" in line and "1,234" in line for line in lines)


def test_a_wide_terminal_shows_pace_memory_and_what_the_blocks_are() -> None:
    status = a_status()
    worker = status.pools[1].workers[0]
    worker.pace.tokens_per_s, worker.rss_bytes = 321.0, 3 << 30
    worker.load.lent_blocks, worker.load.held_blocks, worker.load.cached_blocks = 25, 50, 10
    (line,) = [line for line in drawn(status, 150) if "decode-0" in line]
    assert "321" in line
    assert "3.0 GiB" in line
    assert (line.count("█"), line.count("▓"), line.count("░")) == (10, 5, 2)
    assert any("held" in line and "quarantined" in line for line in drawn(status, 150))


def test_requests_are_bars_on_one_axis_of_time() -> None:
    half = inference.Timeline(decode=1.0, total=1.0)
    lines = drawn(with_requests(a_request(1), a_request(2, timeline=half)), 120)
    long, short = (next(line for line in lines if f"request-{number}" in line) for number in (1, 2))
    assert any("0 to 2.00 s" in line for line in lines)
    assert short.count("█") == pytest.approx((long.count("█") + long.count("▓") + long.count("░")) / 2, abs=1)
    assert long.count("▓") == pytest.approx(2 * long.count("░"), abs=1)
    assert "750 ms" in long
    assert "512" in long
    for stage in ("router wait", "hand-off transfer", "decode admission"):
        assert stage in " ".join(lines)


@pytest.mark.parametrize("height", [24, 40, 60])
def test_what_is_shown_of_the_requests_fits_the_height(height: int) -> None:
    lines = drawn(with_requests(*(a_request(number) for number in range(50))), 100, height)
    assert len(lines) < height
    assert sum("request-" in line for line in lines) == height - 15


def test_what_a_client_calls_its_request_cannot_steer_the_terminal() -> None:
    lines = drawn(with_requests(a_request(1, request_id="[red]a\x1b[2Jb", outcome="[bold]")), 120)
    assert any("[red]a[2Jb" in line and "[bold]" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_a_request_without_a_token_has_no_first_one() -> None:
    request = a_request(1, outcome="aborted")
    request.ClearField("ttft_s")
    (line,) = [line for line in drawn(with_requests(request), 120) if "request-1" in line]
    assert "750 ms" not in line
    assert " - " in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 ms"),
        (0.01234, "12.3 ms"),
        (0.0999, "99.9 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (123.4, "123 s"),
    ],
)
def test_latencies_have_three_digits(seconds: float, text: str) -> None:
    assert latency(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (150 << 20, "150 MiB"), (1 << 50, "1024 TiB")],
)
def test_sizes_have_a_unit_that_fits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
