"""What a decode worker finds out about the ways by which KV reaches it, and who hears of it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from io import StringIO

import grpc
import pytest
from asking import answer, request, until
from doctor.serving import serving
from paper_model import PaperRunner, paper_output
from rich.console import Console
from small_cluster import Seat, SmallCluster

from baton.client.console import Status
from baton.decode_worker.lanes import FORGET_S, MIN_BYTES, LaneBook
from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.messages import HandoffSource, Role
from baton.proto.settings import TransferSettings

SOURCE = HandoffSource("prefill-0", "i", "127.0.0.1:1", "")
MIB = 1 << 20


def large_pool() -> PaperRunner:
    """Its blocks are of 4 KiB: enough of them for a measurement."""
    return PaperRunner(num_blocks=4096, block_size=256)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lanes:
    """A book of one lane that is open, its clock and what it has told."""

    def __init__(self, expected_gb_per_s: float = 0.0) -> None:
        self.clock = Clock()
        self.told: list[tuple[wire.Lane, ...]] = []
        self.book = LaneBook("decode-0", expected_gb_per_s, self.clock, self.told.append)
        self.book.meeting(SOURCE)
        self.book.opened("i", "")

    @property
    def lane(self) -> wire.Lane:
        [lane] = self.book.lanes()
        return lane

    def read(self, num_bytes: int, seconds: float) -> None:
        self.book.reading("i")
        self.clock.now += seconds
        self.book.read("i", num_bytes, "t")


def test_the_rate_is_that_of_all_reads_together_while_any_is_under_way() -> None:
    lanes = Lanes()
    for _ in range(4):
        lanes.book.reading("i")
    lanes.clock.now += 0.01
    for _ in range(4):
        lanes.book.read("i", MIB, "t")
    assert lanes.lane.gb_per_s == pytest.approx(4 * MIB / 0.01 / 1e9)


def test_time_without_a_read_does_not_count() -> None:
    lanes = Lanes()
    lanes.read(MIB // 2, 0.001)
    lanes.clock.now += 1000.0
    lanes.read(MIB // 2, 0.001)
    assert lanes.lane.gb_per_s == pytest.approx(MIB / 0.002 / 1e9)


def test_small_reads_are_no_measurement_until_they_make_a_mebibyte() -> None:
    lanes = Lanes()
    for _ in range(15):
        lanes.read(MIN_BYTES // 16, 0.001)
    assert lanes.lane.gb_per_s == 0
    lanes.read(MIN_BYTES // 16, 0.001)
    assert lanes.lane.gb_per_s > 0


def test_a_probe_has_a_figure_when_it_is_over_though_a_hand_off_reads_all_the_while() -> None:
    lanes = Lanes()
    lanes.book.reading("i")
    lanes.read(2 * MIB, 0.01)
    assert lanes.lane.gb_per_s == 0
    lanes.book.probed("i")
    assert lanes.lane.gb_per_s == pytest.approx(2 * MIB / 0.01 / 1e9)
    lanes.book.probed("i")
    assert lanes.lane.measured_bytes == 2 * MIB


def test_the_best_of_the_last_measurements_counts() -> None:
    lanes = Lanes()
    lanes.read(MIB, 0.001)
    lanes.read(MIB, 0.1)
    assert lanes.lane.gb_per_s == pytest.approx(MIB / 0.001 / 1e9)
    for _ in range(8):
        lanes.read(MIB, 0.1)
    assert lanes.lane.gb_per_s == pytest.approx(MIB / 0.1 / 1e9)


def test_a_slow_lane_is_warned_of_once_until_it_was_fast_again(caplog) -> None:
    lanes = Lanes(expected_gb_per_s=1.0)
    with caplog.at_level(logging.WARNING, "baton.decode_worker.lanes"):
        for _ in range(5):
            lanes.read(MIB, 0.1)
        assert lanes.lane.is_slow
        [warning] = [record.getMessage() for record in caplog.records]
        assert warning.startswith("KV from prefill-0 to decode-0 comes at 0.0105 GB/s by t; 1 GB/s are expected")
        lanes.read(10 * MIB, 0.006)
        assert not lanes.lane.is_slow
        for _ in range(8):
            lanes.read(MIB, 0.1)
        assert len(caplog.records) == 2


def test_the_read_that_made_the_connection_does_not_make_a_lane_slow() -> None:
    lanes = Lanes(expected_gb_per_s=1.0)
    lanes.read(MIB, 0.5)
    assert not lanes.lane.is_slow


def test_reads_too_short_to_see_their_ends_in_time_do_not_make_a_lane_slow() -> None:
    lanes = Lanes(expected_gb_per_s=100.0)
    for _ in range(8):
        lanes.read(MIB, 0.001)
    assert lanes.lane.gb_per_s == pytest.approx(MIB / 0.001 / 1e9)
    assert not lanes.lane.is_slow


def test_nothing_is_slow_where_nothing_is_expected() -> None:
    lanes = Lanes()
    for _ in range(8):
        lanes.read(MIB, 10.0)
    assert not lanes.lane.is_slow


def test_a_change_of_state_is_told_at_once_and_figures_by_the_next_tick() -> None:
    lanes = Lanes()
    assert [[lane.state for lane in told] for told in lanes.told] == [["meeting"], ["open"]]
    lanes.read(MIB, 0.01)
    assert len(lanes.told) == 2
    lanes.book.tick()
    assert lanes.told[2][0].gb_per_s > 0
    lanes.book.tick()
    assert len(lanes.told) == 3
    lanes.book.ended("i", "cut", refused=False)
    assert (lanes.told[3][0].state, lanes.told[3][0].reason) == ("lost", "cut")


def test_a_source_that_started_anew_has_a_new_lane_and_the_old_ones_news_is_nobodys() -> None:
    lanes = Lanes()
    lanes.read(MIB, 0.01)
    lanes.book.meeting(replace(SOURCE, incarnation="j"))
    lanes.book.ended("i", "the old one", refused=False)
    lanes.read(MIB, 0.01)
    assert (lanes.lane.source_incarnation, lanes.lane.state, lanes.lane.gb_per_s) == ("j", "meeting", 0.0)


def test_a_lane_that_was_lost_long_ago_is_forgotten_and_an_open_one_is_not() -> None:
    lanes = Lanes()
    lanes.clock.now += 2 * FORGET_S
    lanes.book.tick()
    assert lanes.lane.state == "open"
    lanes.book.ended("i", "cut", refused=False)
    lanes.clock.now += 2 * FORGET_S
    lanes.book.tick()
    assert lanes.book.lanes() == ()


# --- in a cluster ---------------------------------------------------------------------------------------------------


async def lane_of(small, worker_id: str = "decode-0") -> wire.Lane | None:
    """The one lane of a worker, as the status shows it."""
    status = await small.status()
    [worker] = [worker for pool in status.pools for worker in pool.workers if worker.worker_id == worker_id]
    return worker.lanes[0] if worker.lanes else None


def source_of(seat: Seat) -> wire.HandoffSource:
    its = seat.description
    return wire.HandoffSource(worker_id=its.worker_id, incarnation=its.incarnation, address=its.address)


async def _examine(stub, source: wire.HandoffSource) -> wire.WorkerExamination:
    return await stub.Examine(wire.ExamineRequest(sources=[source], probe_bytes=32 << 20, timeout_s=10))


async def measured(small) -> wire.Lane:
    async def once() -> wire.Lane | None:
        lane = await lane_of(small)
        return lane if lane is not None and lane.gb_per_s else None

    lane = await until(once, what="a measured lane")
    assert isinstance(lane, wire.Lane)
    return lane


async def test_a_lane_is_measured_when_two_workers_have_met_and_the_status_shows_it(paper_dir):
    async with serving(paper_dir, large_pool, block_size=256) as small:
        lane = await measured(small)
        assert (lane.source, lane.state, lane.transport) == ("prefill-0", "open", "local, a copy")
        assert lane.source_incarnation == small.seats["prefill-0"].description.incarnation
        assert 0 < lane.round_trip_s < 5
        assert lane.measured_bytes >= MIN_BYTES
        await small.at_rest()
        counters = await small.counters()
        assert counters["decode-0"].bytes_pulled == 256 * 16  # a block of the first request: probes are no hand-offs


async def test_requests_are_right_while_lanes_are_measured(paper_dir):
    prompt = [index % 251 for index in range(1000)]
    async with serving(paper_dir, large_pool, block_size=256) as small:
        source = source_of(small.seats["prefill-0"])
        async with grpc.aio.insecure_channel(small.seats["decode-0"].description.address) as channel:
            stub = worker_pb2_grpc.ExaminationStub(channel)
            examinations = [asyncio.ensure_future(_examine(stub, source)) for _ in range(3)]
            answers = await asyncio.gather(
                *(answer(small.inference, request([index, *prompt], 20)) for index in range(8))
            )
            for examination in await asyncio.gather(*examinations):
                assert examination.lanes[0].gb_per_s > 0
        for index, told in enumerate(answers):
            assert told.tokens == paper_output([index, *prompt], 20)
        await small.at_rest()


async def test_a_pool_too_small_to_spare_a_mebibyte_is_left_alone(paper_dir):
    async with serving(paper_dir) as small:
        await until(lambda: small.seats["decode-0"].worker.core.duty.side._links)
        [link] = small.seats["decode-0"].worker.core.duty.side._links.values()
        await until(lambda: link.probed)
        lane = await lane_of(small)
        assert (lane.state, lane.gb_per_s, lane.reason) == ("open", 0.0, "")
        await small.at_rest()


async def test_a_worker_changes_its_role_while_a_lane_is_measured(paper_dir):
    async with serving(paper_dir, large_pool, block_size=256, prefill=1, decode=2) as small:
        source = source_of(small.seats["prefill-0"])
        async with grpc.aio.insecure_channel(small.seats["decode-0"].description.address) as channel:
            examining = asyncio.ensure_future(_examine(worker_pb2_grpc.ExaminationStub(channel), source))
            change = await small.set_role("decode-0", Role.PREFILL, 5.0, force=False)
            assert change.description.role is Role.PREFILL
            await asyncio.gather(examining, return_exceptions=True)
        assert (await answer(small.inference, request([1, 2, 3], 5))).tokens == paper_output([1, 2, 3], 5)
        await small.at_rest()


async def test_a_source_whose_kv_cannot_be_read_is_said_to_be_so(paper_dir):
    async with serving(paper_dir, large_pool, block_size=256, prefill=1, decode=1) as small:
        await measured(small)
        await small.add(Role.PREFILL, "prefill-1")
        seat = small.seats["prefill-1"]
        seat.worker._transport.close()  # the control side lives, the pool is gone
        source = source_of(seat)
        async with grpc.aio.insecure_channel(small.seats["decode-0"].description.address) as channel:
            examination = await _examine(worker_pb2_grpc.ExaminationStub(channel), source)
        [lane] = [lane for lane in examination.lanes if lane.source == "prefill-1"]
        assert lane.state == "open"
        assert "is not attached" in lane.reason
        await small.at_rest()


async def test_two_that_do_not_fit_are_refused_at_the_first_meeting_and_the_status_says_why(paper_dir):
    runners = iter([PaperRunner(), PaperRunner(block_size=16, version="9.9.9")])
    transfer = TransferSettings(connector="local")
    async with SmallCluster(paper_dir, lambda: next(runners), transfer=transfer) as small:
        asking = asyncio.ensure_future(answer(small.inference, request([1, 2, 3], 5)))
        lane = None

        async def refused() -> bool:
            nonlocal lane
            lane = await lane_of(small)
            return lane is not None and lane.state == "refused"

        await until(refused)
        assert "version is '0.1.0' on prefill-0 and '9.9.9' on decode-0" in lane.reason
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_the_terminal_shows_lanes(paper_dir):
    async with serving(paper_dir, large_pool, block_size=256) as small:
        await measured(small)
        out = Console(width=140, file=StringIO())
        out.print(Status(await small.status()))
        told = out.file.getvalue()
        assert "prefill-0 > decode-0" in told
        assert "local, a copy" in told
