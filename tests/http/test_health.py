"""/health says whether a request that came now would be answered."""

from __future__ import annotations

from baton.router.http.health import STALL_S, Health
from baton.router.observe import Call, Face


async def test_a_router_is_healthy_from_its_first_request_until_it_drains(cluster, http) -> None:
    assert (await http.get("/health")).json() == {"status": "ok", "reasons": []}
    cluster.router.ready.clear()
    response = await http.get("/health")
    assert (response.status_code, response.json()["status"]) == (503, "unhealthy")
    cluster.router.ready.set()
    await cluster.router.drain(0.1)
    response = await http.get("/health")
    assert response.status_code == 503
    assert response.json()["reasons"] == ["the router is draining"]


async def test_a_role_without_a_worker_is_named(cluster, http) -> None:
    await cluster.remove("decode-0")
    response = await http.get("/health")
    assert response.status_code == 503
    assert response.json()["reasons"] == ["no decode worker is there"]


async def test_requests_without_any_progress_are_a_fault_until_something_moves(cluster) -> None:
    now = 0.0
    router = cluster.router
    health = Health(router, clock=lambda: now)
    router.begin()
    assert health.faults() == []
    now = STALL_S + 1
    assert len(health.faults()) == 1
    health.tokens(1, None)
    assert health.faults() == []
    now += STALL_S + 1
    assert len(health.faults()) == 1
    router.end(0)
    assert health.faults() == []


async def test_a_first_request_after_long_rest_is_no_fault(cluster) -> None:
    now = 0.0
    health = Health(cluster.router, clock=lambda: now)
    health.faults()
    now = 10 * STALL_S
    health.began("a", Call(Face.HTTP))
    cluster.router.begin()
    assert health.faults() == []
    cluster.router.end(0)
