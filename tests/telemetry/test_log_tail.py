"""What a process has logged of late can be read from elsewhere, as can what its predecessor said before it ended."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

import grpc
import pytest
from paper_model import PaperRunner
from small_cluster import SmallCluster

from baton.client.client import AsyncClient
from baton.client.errors import BatonError
from baton.proto import cluster_pb2 as cluster
from baton.proto.settings import ObservabilitySettings
from baton.telemetry.log_tail import TAIL_BYTES, NoFormerLog, own_tail
from baton.telemetry.logs import configure, identify


@pytest.fixture
def logged():
    """A function that configures the log as a process does. Everything is as before afterwards."""
    root, baton = logging.getLogger(), logging.getLogger("baton")
    before = root.handlers[:], root.level, baton.level

    def start(process: str, host: str = "10.0.0.12", **settings) -> logging.Logger:
        for handler in root.handlers[:]:
            if handler not in before[0]:
                handler.close()
        configure(ObservabilitySettings(**settings), process, host=host)
        return logging.getLogger("baton.test")

    yield start
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.level, level = before
    baton.setLevel(level)


def told(lines: list[str]) -> list[str]:
    return [line.partition("baton.test: ")[2] for line in lines]


def test_the_last_lines_are_told_oldest_first_with_whose_they_are(logged):
    log = logged("decode-1")
    for number in range(10):
        log.info("line %d", number)
    identify("5f1c8e02a7b3d941")
    tail = own_tail(3, previous=False)
    assert told(tail.lines) == ["line 7", "line 8", "line 9"]
    assert (tail.process, tail.host, tail.incarnation, tail.file) == ("decode-1", "10.0.0.12", "5f1c8e02a7b3d941", "")


def test_a_traceback_counts_by_its_lines(logged):
    log = logged("decode-1")
    log.info("before")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    lines = own_tail(2, previous=False).lines
    assert len(lines) == 2
    assert lines[-1] == "ValueError: no"
    assert told(own_tail(100, previous=False).lines)[:2] == ["before", "failed"]


def test_memory_for_lines_is_bounded(logged):
    log = logged("decode-1")
    for number in range(40):
        log.info("%d %s", number, "x" * (TAIL_BYTES // 16))
    lines = told(own_tail(1000, previous=False).lines)
    assert sum(map(len, lines)) <= TAIL_BYTES
    assert [int(line.split()[0]) for line in lines] == list(range(40 - len(lines), 40))
    assert len(lines) >= 14


def test_the_predecessor_is_the_latest_other_life_on_this_machine(logged, tmp_path):
    settings = {"log_dir": str(tmp_path)}
    for life in ("first", "second", "third"):
        logged("decode-1", **settings).info("starting")
        identify(life)
        logging.getLogger("baton.test").info("this is the %s", life)
    logged("decode-10", **settings).info("of another worker")
    logged("decode-1", **settings).info("starting")
    identify("fourth")
    tail = own_tail(100, previous=True)
    assert (tail.process, tail.incarnation) == ("decode-1", "third")
    assert tail.file == str(tmp_path / "decode-1@10.0.0.12.third.log")
    assert told(tail.lines) == ["starting", "this is the third"]
    assert told(own_tail(100, previous=False).lines) == ["starting"]


def test_the_end_of_a_long_file_has_no_half_line(logged, tmp_path):
    log = logged("decode-1", log_dir=str(tmp_path))
    identify("first")
    for number in range(40):
        log.info("%d %s", number, "x" * (TAIL_BYTES // 16))
    logged("decode-1", log_dir=str(tmp_path))
    identify("second")
    numbers = [int(line.split()[0]) for line in told(own_tail(1000, previous=True).lines)]
    assert numbers == list(range(40 - len(numbers), 40))
    assert len(numbers) >= 14


@pytest.mark.parametrize(("keeps", "reason"), [(False, "log_dir is empty"), (True, "has had no predecessor")])
def test_without_a_predecessor_the_reason_is_told(logged, tmp_path, keeps, reason):
    logged("decode-1", log_dir=str(tmp_path) if keeps else "")
    with pytest.raises(NoFormerLog, match=reason):
        own_tail(10, previous=True)


async def test_a_client_reads_the_router_s_and_any_worker_s(paper_dir, logged):
    logged("router").info("something worth knowing")
    async with SmallCluster(paper_dir, PaperRunner) as small, AsyncClient(small.address) as client:
        for worker_id in ("router", "prefill-0", "decode-0"):
            # All of them are this process here.
            tail = await client.logs(worker_id, 1000)
            assert "something worth knowing" in told(tail.lines)
            assert (tail.process, tail.host) == ("router", "10.0.0.12")


async def test_a_client_is_told_why_there_is_nothing(paper_dir, logged):
    logged("router")
    settings = ObservabilitySettings(log_dir="/var/log/baton")
    cluster_of_two = SmallCluster(paper_dir, PaperRunner, observability=settings)
    async with cluster_of_two as small, AsyncClient(small.address) as client:
        with pytest.raises(BatonError, match="worker_id 'decode-7' is not in this cluster"):
            await client.logs("decode-7")
        with pytest.raises(BatonError, match=r"log_dir is empty"):
            await client.logs("decode-0", previous=True)
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            address = f"127.0.0.1:{nobody.getsockname()[1]}"
        link = small.seats["decode-0"].link
        link.description = replace(link.description, address=address)
        with pytest.raises(BatonError, match=f"decode-0 at {address} does not answer .*on 127.0.0.1 in /var/log/baton"):
            await client.logs("decode-0")


@pytest.mark.parametrize("lines", [-1, 10_001])
async def test_a_number_of_lines_that_makes_no_sense_is_refused(paper_dir, lines):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        with pytest.raises(grpc.aio.AioRpcError, match="lines") as refusal:
            await small.cluster.GetLogs(cluster.GetLogsRequest(lines=lines))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
