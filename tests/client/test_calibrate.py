"""The load of a calibration shows steps from all sides, fits into the cluster, and ends in a model of its workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_model import PaperRunner, write_paper_tokenizer
from small_cluster import SmallCluster

from baton.capacity.calibrate import UnlikeWorkers, origin_of
from baton.capacity.core_use import Window
from baton.capacity.cost import CostModel, Source
from baton.client import calibrate
from baton.client.calibrate import CalibrationError, Driven, Kind, Room, _CpuMeter, bursts
from baton.client.cli import main
from baton.proto import cluster_pb2 as cluster
from baton.proto import step_log
from baton.proto.messages import Role
from baton.proto.settings import ObservabilitySettings
from baton.proto.step_log import SUFFIX, StepLogFile, StepLogHeader, StepRecord
from baton.router.config import RouterSettings

STEP_S, TOKEN_S = 0.002, 0.0001


@given(st.integers(64, 8192), st.integers(256, 100_000), st.integers(1, 8), st.integers(0, 99))
def test_no_burst_needs_more_than_the_cluster_has(max_model_len, kv_tokens, workers, seed):
    room = Room(max_model_len, kv_tokens, workers)
    for burst in islice(bursts(room, seed), 60):
        assert all(min(prompt, output) >= 1 for prompt, output in burst.together)
        assert all(prompt + output <= max(max_model_len, 64) for prompt, output in burst.together)
        decoding = [prompt + output for prompt, output in burst.together if output > 1]
        assert sum(decoding) <= kv_tokens * workers


def test_a_minute_of_bursts_has_every_batch_size_and_prompts_of_every_length():
    seen = list(islice(bursts(Room(8192, 20_000, 1), 0), 60))
    assert {burst.kind for burst in seen} == set(Kind)
    assert {len(burst.together) for burst in seen if burst.kind is not Kind.PROMPTS} == set(calibrate._BATCHES)
    alone = sorted(tokens for burst in seen if burst.kind is Kind.PROMPTS for tokens in burst.trailing)
    for low in (2, 8, 32, 128, 512):
        assert sum(low <= tokens < 4 * low for tokens in alone) >= 10
    assert list(islice(bursts(Room(8192, 20_000, 1), 0), 60)) == seen


@pytest.mark.parametrize("shape", [{}, {"prefill": 0, "decode": 0, "colocated": 1}], ids=["1P1D", "co-located"])
async def test_a_driven_cluster_leaves_a_cost_model_of_its_workers(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(calibrate, "_PROBES", 6)
    monkeypatch.setattr(calibrate, "_SETTLE_S", 0.3)
    logs = tmp_path / "logs"
    async with SmallCluster(
        write_paper_tokenizer(tmp_path / "paper"),
        lambda: PaperRunner(num_blocks=1024, step_s=STEP_S, seconds_per_token=TOKEN_S),
        observability=ObservabilitySettings(step_log=str(logs)),
        **shape,
    ) as small:
        shares = []
        driven = await calibrate.drive(small.address, 4.0, progress=lambda share, doing: shares.append(share))
        await small.at_rest()
    assert shares == sorted(shares)
    assert driven.tokens > 0
    assert driven.token_cpu_s > 0
    # Workers and router are in this process: what is whose cannot be seen.
    assert driven.windows == ()

    model = calibrate.fitted(logs, driven)
    path = tmp_path / "cost.json"
    model.save(path)
    assert CostModel.load(path) == model
    assert (model.origin.source, model.origin.model, model.origin.dtype) == (Source.MEASURED, "paper", "int64")
    # A sleep may be longer than asked for, never shorter.
    assert model.step_s(0, 0, 8, 800) > 0.8 * (STEP_S + 8 * TOKEN_S)
    assert model.step_s(512, 512 * 513 // 2, 0, 0) > 0.8 * (STEP_S + 512 * TOKEN_S)
    assert 0 < model.routing.routing_s < 1
    assert 0 < model.routing.delivery_s < 1
    assert (model.transfer.start_s + model.transfer.byte_s + model.transfer.run_s > 0) == (shape == {})


def test_cpu_time_is_seen_where_router_and_workers_are_processes_of_this_machine():
    busy = [sys.executable, "-c", "while True: sum(range(10000))"]
    with subprocess.Popen(busy) as router, subprocess.Popen(busy) as worker:
        try:

            def meter(target: str = "127.0.0.1:9000", host: str = "127.0.0.1", pid: int = worker.pid) -> _CpuMeter:
                workers = [cluster.WorkerStatus(worker_id="w-0", pid=pid, host=host)]
                pools = [cluster.PoolStatus(name="w", workers=workers)]
                return _CpuMeter(cluster.ClusterStatus(router={"pid": router.pid}, pools=pools), target)

            here = meter()
            assert here.sees_all
            beside_s, workers_s = here.beside_s(), here.workers_s()
            deadline = time.monotonic() + 30
            while here.workers_s() <= workers_s or here.beside_s() <= beside_s + 0.01:
                assert time.monotonic() < deadline
            # What this process spent in waiting is of the client.
            assert not meter(target="192.0.2.1:9000").sees_all
            assert not meter(host="192.0.2.1").sees_all
            assert not meter(pid=os.getpid()).sees_all
            assert meter(pid=os.getpid()).workers_s() == 0.0
        finally:
            router.kill()
            worker.kill()


@pytest.mark.parametrize(("other_cores", "told"), [(0.0, False), (0.6, True)])
def test_a_calibration_beside_other_programs_says_so(tmp_path, other_cores, told):
    steps = [StepRecord(0.02 * k, 0, 0, 4, 400, 0, 0.001, 0.008, 0.001, None, 0.01) for k in range(200)]
    header = StepLogHeader("w-0", Role.COLOCATED, "demo", "bfloat16", "cpu", 1)
    (tmp_path / f"w{SUFFIX}").write_text(step_log.header_line(header) + "".join(map(step_log.step_line, steps)))
    windows = tuple(Window(0.5 * k, 0.5 * k + 0.5, 1, 100, 0.05, 0.3) for k in range(8))
    model = calibrate.fitted(tmp_path, Driven((), 0.0005, 800, windows, other_cores))
    assert ("other programs kept 0.60 cores busy" in model.origin.note) == told
    assert "of which the fit has cleared the steps" in model.origin.note
    assert model.cores.step_cpu_s + model.cores.request_cpu_s + model.cores.token_cpu_s > 0


def _log(threads: int) -> StepLogFile:
    return StepLogFile(StepLogHeader(f"w-{threads}", Role.COLOCATED, "demo", "bfloat16", "cpu", threads))


def test_workers_of_several_kinds_are_not_fitted_together():
    with pytest.raises(UnlikeWorkers, match=r"demo bfloat16 cpu 1, demo bfloat16 cpu 2"):
        origin_of([_log(1), _log(2)], "here", "2026-11-30")


def test_notes_that_are_none_end_the_command_in_one_line(tmp_path, capsys):
    output = tmp_path / "cost.json"
    assert main(["capacity", "calibrate", "--logs", str(tmp_path), "-o", str(output)]) == 1
    assert capsys.readouterr().err == (
        f"baton: {tmp_path}: there is no step log: is observability.step_log set, and the directory the right one?\n"
    )
    (tmp_path / f"a{SUFFIX}").write_text("no log\n")
    assert main(["capacity", "calibrate", "--logs", str(tmp_path), "-o", str(output)]) == 1
    assert "line 1 is no line of a step log" in capsys.readouterr().err
    assert not output.exists()


async def test_a_load_that_is_not_served_ends_with_the_servers_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "_PROBES", 1)
    # A probe is a step, 24 to 48 of them are more than a request may take.
    async with SmallCluster(
        write_paper_tokenizer(tmp_path / "paper"),
        lambda: PaperRunner(num_blocks=1024, step_s=0.1),
        router_settings=RouterSettings(port=0, request_timeout_s=2.0),
    ) as small:
        with pytest.raises(CalibrationError, match=f"{small.address} did not serve what it was sent: .+"):
            await calibrate.drive(small.address, 4.0)
        await small.at_rest()
    with pytest.raises(CalibrationError, match="did not serve"):
        await calibrate.drive(small.address, 4.0)
