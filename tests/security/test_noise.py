"""Random bytes on every port: nothing ends, nothing is kept, and requests get their tokens. The full minute a port is
`benchmarks/fuzz_ports.py`'s."""

from __future__ import annotations

import asyncio
import os

import pytest
from asking import answer, request, until
from journey.test_replicas import replicated
from paper_model import paper_output
from port_noise import Port, accepts, bombard

from baton.proto.settings import SecuritySettings
from baton.router import guard

PROMPT = [index % 251 for index in range(90)]
SECONDS = 0.6


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "cluster certificates"])
async def test_noise_on_every_port_ends_nothing(paper_dir, certificates, secured, monkeypatch) -> None:
    monkeypatch.setattr(guard, "REQUEST_S", 1.0)
    security = SecuritySettings(cluster_tls=certificates.cluster_tls) if secured else SecuritySettings()
    async with replicated(paper_dir, security=security) as (keeping, second):
        small = keeping.small
        workers = [seat.description for seat in small.members()]
        addresses = {
            "gRPC": small.address,
            "HTTP": small.http_address,
            "keeper": keeping.address,
            "follower": second.router.replicas.peer_address,
            **{f"{worker.worker_id}": worker.address for worker in workers},
            f"{workers[0].worker_id}, metrics": workers[0].metrics_address,
        }
        incarnations = [worker.incarnation for worker in workers]
        for name, address in addresses.items():
            host, number = address.rsplit(":", 1)
            tls = secured and name not in ("gRPC", "HTTP") and "metrics" not in name
            port = Port(name, host, int(number), os.getpid(), tls)
            tally = await bombard(port, SECONDS, seed=7, attackers=8)
            assert tally.connections > 8, name
            assert await asyncio.to_thread(accepts, port), name
            for stub in (small.inference, second.inference):
                assert (await answer(stub, request(PROMPT, 10))).tokens == paper_output(PROMPT, 10), name
        assert [seat.description.incarnation for seat in small.members()] == incarnations
        assert not small.failures
        await until(lambda: not small.server._allowance._open, timeout_s=20.0, what="the end of half calls")
