"""Workers that leave, and links to workers that are not the ones that were expected."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import grpc
import pytest
from asking import answer, request, until
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster, make_worker

from baton.proto import cluster_pb2 as cluster
from baton.proto.messages import Role
from baton.proto.settings import ObservabilitySettings, TransferSettings, WorkerSettings
from baton.router.link import WorkerLink

PROMPT = [index % 251 for index in range(90)]


async def test_a_worker_that_leaves_takes_no_request_with_it(paper_dir):
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.002), decode=2) as small:
        running = [asyncio.create_task(answer(small.inference, request(PROMPT[index:], 200))) for index in range(6)]
        await until(lambda: all(seat.link.num_legs for seat in small.members() if seat.role is Role.DECODE))
        drain = cluster.DrainRequest(worker_id="decode-0", timeout_s=0.01, leave=True)
        assert list((await small.cluster.Drain(drain, timeout=20)).left) == ["decode-0"]
        for index, one in enumerate(await asyncio.gather(*running)):
            assert one.tokens == paper_output(PROMPT[index:], 200)
        assert "decode-0" not in small.seats
        await small.at_rest()


async def test_the_last_worker_of_its_role_leaves_only_by_force(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        drain = cluster.DrainRequest(worker_id="decode-0", timeout_s=1.0, leave=True)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await small.cluster.Drain(drain, timeout=10)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "without decode-0 nothing could be served" in refused.value.details()
        drain.force = True
        assert list((await small.cluster.Drain(drain, timeout=10)).left) == ["decode-0"]


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"worker_id": "decode-0", "host": "127.0.0.1"}, grpc.StatusCode.INVALID_ARGUMENT, "one of the two"),
        ({"host": "10.9.8.7"}, grpc.StatusCode.NOT_FOUND, "host '10.9.8.7' is not in this cluster"),
        ({"worker_id": "decode-9", "leave": True}, grpc.StatusCode.NOT_FOUND, "'decode-9' is not in this cluster"),
    ],
)
async def test_who_is_not_there_cannot_leave(paper_dir, fields, code, said):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await small.cluster.Drain(cluster.DrainRequest(**fields), timeout=10)
        assert refused.value.code() is code
        assert said in refused.value.details()


async def test_the_status_tells_where_each_worker_is_and_why_one_does_not_serve(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        small.seats["decode-0"].note = "no machine has room for 1 GPU"
        prefill, decode = [worker for pool in (await small.status()).pools for worker in pool.workers]
        assert (prefill.host, prefill.note) == ("127.0.0.1", "")
        assert decode.note == "no machine has room for 1 GPU"


async def test_a_link_is_refused_by_another_worker_at_the_address(paper_dir):
    """As when a port of a range that workers share has become another one's."""
    async with SmallCluster(paper_dir, PaperRunner) as small:
        there = small.seats["prefill-0"].description
        link = WorkerLink(replace(there, worker_id="decode-7"), small.router.incarnation, silence_s=5.0)
        with pytest.raises(ConnectionError, match=r"decode-7 at .*: prefill-0 answers there"):
            await link.open(lambda report: None, timeout_s=5.0)


def two_free_ports() -> range:
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return range(port, port + 2)
    raise AssertionError("no two free ports side by side")


async def test_workers_of_a_machine_share_a_range_of_ports_and_one_too_many_is_told():
    ports = two_free_ports()
    settings = WorkerSettings(
        "prefill-0",
        "prefill",
        Role.PREFILL,
        transfer=TransferSettings(connector="local"),
        observability=ObservabilitySettings(worker_metrics=False),
        ports=ports,
    )
    workers = [make_worker(settings, PaperRunner(), lambda error: None) for _ in range(3)]
    addresses = [(await worker.start()).address for worker in workers[:2]]
    assert addresses == [f"127.0.0.1:{port}" for port in ports]
    with pytest.raises(OSError, match=f"no free port from {ports[0]} to {ports[1]}"):
        await workers[2].start()
    for worker in workers[:2]:
        await worker.stop()


async def test_a_worker_listens_and_is_reached_at_an_ipv6_address(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        settings = WorkerSettings(
            "decode-6", "decode", Role.DECODE, transfer=TransferSettings(connector="local"), host="::1"
        )
        worker = make_worker(settings, PaperRunner(), small.failures.append)
        description = await worker.start()
        assert description.address.startswith("[::1]:")
        assert description.metrics_address.startswith("[::1]:")
        link = WorkerLink(description, small.router.incarnation, silence_s=5.0)
        await link.open(lambda report: None, timeout_s=5.0)
        small.router.connect(link)
        assert small.router.book.view("decode-6", now=0.0).host == "[::1]"
        await link.close()
        small.router.disconnect(link)
        await worker.stop()
