"""The arithmetic of the cases of `make bench`: what they make of reports, spans and answers."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bars import Better
from case_handoff import handoff
from case_serving import LOADS, METRICS, GreedyServer, prompts
from growth import exponent
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from peers import PeerFailed, Peers, Process

from baton.client import bench
from baton.client.bench import Job, Sample

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def span(name: str, start_s: float, end_s: float, **attributes: float) -> Span:
    return Span(
        name=name,
        start_time_unix_nano=round(start_s * 1e9),
        end_time_unix_nano=round(end_s * 1e9),
        attributes=[
            KeyValue(key=f"baton.{key}", value=AnyValue(double_value=value)) for key, value in attributes.items()
        ],
    )


def test_what_is_exposed_lies_between_the_last_chunk_and_the_first_decode_step() -> None:
    moments = handoff(
        [
            span("baton.prefill", 0.0, 1.3, lent_s=0.3),  # its last token came at 1.0
            span("baton.handoff", 0.4, 1.05),
            span("baton.decode", 0.1, 2.0, queue_s=0.01),  # its first step began at 1.06
        ]
    )
    assert moments.exposed_ms == pytest.approx(60)
    assert moments.transfer_ms == pytest.approx(650)


@given(st.floats(-2, 3), st.floats(0.1, 100), st.integers(1, 100), st.integers(2, 50))
def test_the_exponent_of_a_power_is_that_power(power: float, scale: float, x: int, factor: int) -> None:
    rows = [{"batch": float(at), "step ms": scale * at**power} for at in (x, x * factor)]
    assert exponent(*rows, "step ms") == pytest.approx(power, abs=1e-6)


def report(times: list[list[float]], rate_s: float = 1.0) -> bench.Report:
    """Of requests sent at 0, `rate_s`, ... whose tokens came at those times after it."""
    samples = [
        Sample(at * rate_s, at * rate_s, 8, len(after), tuple(at * rate_s + t for t in after), at * rate_s + after[-1])
        for at, after in enumerate(times)
    ]
    work = [Job(sample.planned_s, [1], sample.output_tokens) for sample in samples]
    return bench.summarize(work, samples, bench.Objectives(ttft_ms=1000.0, tpot_ms=50.0))


def test_figures_of_a_report_are_in_their_units() -> None:
    figures = {metric.name: metric.of(report([[0.5, 0.6, 0.7], [0.5, 0.6, 0.7]])) for metric in METRICS}
    assert figures["TTFT p50"] == pytest.approx(500)
    assert figures["TPOT p99"] == pytest.approx(100)
    assert figures["ITL p99"] == pytest.approx(100)
    assert figures["tokens"] == pytest.approx(6 / 1.7)
    assert figures["goodput"] == 0  # 100 ms a token is more than the objective


def test_beyond_a_server_that_answers_as_fast_as_it_is_asked_there_is_no_room_and_beyond_a_slow_one_there_is() -> None:
    tokens = next(metric for metric in METRICS if metric.name == "tokens")
    assert tokens.room(report([[0.1, 0.12]] * 50)) == pytest.approx(1.0, abs=0.05)
    assert tokens.room(report([[0.1 + at, 0.12 + at] for at in range(50)])) == pytest.approx(2.0, abs=0.05)
    assert tokens.room(report([[0.1, 0.12]] * 50, rate_s=0.0)) == math.inf
    latency = next(metric for metric in METRICS if metric.name == "TTFT p50")
    assert latency.room(report([[0.1, 0.12]] * 50)) == math.inf


def test_no_prompt_of_any_round_and_load_begins_like_another() -> None:
    model = bench.ServedModel("m", 4096, range(1000, 20000))
    starts = [
        tuple(job.prompt[:16])
        for number in range(3)
        for index, load in enumerate(LOADS)
        for part in prompts(load, number * len(LOADS) + index, model)
        for job in part
    ]
    assert len(set(starts)) == len(starts)


def test_servers_are_asked_for_greedy_tokens_of_an_exact_number() -> None:
    settings = GreedyServer("http://127.0.0.1:1", None, 1.0).settings(64, 7)
    assert (settings["max_tokens"], settings["temperature"], settings["ignore_eos"]) == (64, 0.0, True)


def test_every_figure_says_which_way_is_better() -> None:
    assert {metric.name for metric in METRICS if metric.better is Better.MORE} == {"tokens", "goodput"}
    assert all(load.requests > 0 and not math.isnan(load.rate) for load in LOADS)
    assert len({load.what for load in LOADS}) == len(LOADS)
    assert replace(LOADS[0], rate=math.inf).what.endswith("saturation")


# --- peers ------------------------------------------------------------------------------------------------------------


def test_peers_that_are_not_installed_are_not_found(tmp_path: Path) -> None:
    assert Peers.find(tmp_path / "nothing") is None


def test_the_environment_of_a_peer_preloads_what_is_there_and_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    without = Peers.find(tmp_path)
    assert without is not None
    assert any("OpenMP" in line for line in without.missing)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    peers = Peers.find(tmp_path)
    assert peers is not None
    environment = peers.environment(1)
    assert environment["LD_PRELOAD"].endswith("libiomp5.so")
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert "LD_PRELOAD" not in peers.environment(1, preload=False) or "LD_PRELOAD" in os.environ


ECHO = """
import peer_pipe
print("this is for the log")
peer_pipe.serve(lambda question: {"twice": 2 * question["number"]}, {"ready": True})
"""


def echoing(code: str) -> Process:
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    cores = os.sched_getaffinity(0)
    return Process("echo", [sys.executable, "-c", code], environment, cores, pipes=True)


def test_answers_pass_the_pipe_and_what_is_printed_goes_to_the_log() -> None:
    process = echoing(ECHO)
    try:
        assert process.ask(None) == {"ready": True}
        assert [process.ask({"number": number})["twice"] for number in (1, 21)] == [2, 42]
    finally:
        process.close()
    assert process.has_ended
    assert "this is for the log" in process.log.read_text()


def test_a_peer_that_dies_is_an_error_that_names_its_log() -> None:
    process = echoing("raise SystemExit(3)")
    try:
        with pytest.raises(PeerFailed, match=r"see .*echo\.log"):
            process.ask(None)
    finally:
        process.close()


def test_closing_ends_a_peer_that_was_halted_with_all_that_it_has_started() -> None:
    process = echoing(
        "import subprocess, sys, peer_pipe\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "peer_pipe.serve(lambda question: {}, {'child': child.pid})\n"
    )
    child = process.ask(None)["child"]
    process.halt()
    process.close()
    assert process.has_ended
    assert not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()
