"""The status page's routes: its files, the picture as JSON, the stream of pictures, its viewers and its end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import httpx2
import pytest
from asking import answer, request, until
from small_cluster import SmallCluster

from baton.proto import cluster_pb2
from baton.proto.plain import plain
from baton.router.http import cluster_page
from baton.router.http.cluster_page import EventStream, StatusFeed

DEADLINE_S = 10.0
FILES = {
    "/cluster": "text/html",
    "/cluster/page.css": "text/css",
    "/cluster/page.js": "text/javascript",
    "/cluster/icon.svg": "image/svg+xml",
}


@asynccontextmanager
async def watching(http: httpx2.AsyncClient) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of the event stream, each within a deadline."""
    async with http.stream("GET", "/cluster/events") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        assert "content-length" not in response.headers
        yield response.aiter_lines()


async def next_event(lines: AsyncIterator[str]) -> list[str]:
    """The lines of one event; none at the end of the stream."""
    event: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in lines:
            if not line:
                return event
            event.append(line)
    return event


async def next_picture(lines: AsyncIterator[str]) -> dict | None:
    while event := await next_event(lines):
        if event[0].startswith("data: "):
            (line,) = event
            return json.loads(line.removeprefix("data: "))
    return None


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "media_type"), FILES.items())
async def test_a_page_may_load_only_what_its_own_server_has(
    http: httpx2.AsyncClient, path: str, media_type: str
) -> None:
    response = await http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].split(";")[0] == media_type
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"


async def test_every_file_that_the_page_names_is_served(http: httpx2.AsyncClient) -> None:
    page = (await http.get("/cluster")).text
    named = set(re.findall(r'(?:href|src)="([^"]+)"', page))
    assert {"cluster/page.css", "cluster/page.js", "cluster/icon.svg", "cluster/status"} == named
    for name in named:
        assert (await http.get(f"/{name}")).status_code == 200


async def test_the_page_makes_no_markup_of_data_and_needs_nobody_else(http: httpx2.AsyncClient) -> None:
    texts = {path: (await http.get(path)).text for path in FILES}
    for path, text in texts.items():
        others = set(re.findall(r"\b(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) - {"http://www.w3.org/2000/svg"}
        assert others == set(), path
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(", texts["/cluster/page.js"]
    )
    assert not re.search(r"\son\w+=|\sstyle=|<script>|<style", texts["/cluster"])


# --- the picture ----------------------------------------------------------------------------------------------------


async def test_the_picture_as_json_is_the_status_by_grpc(cluster: SmallCluster, http: httpx2.AsyncClient) -> None:
    await answer(cluster.inference, request(range(40), 3))
    by_http = (await http.get("/cluster/status")).json()
    by_grpc = plain(await cluster.status())
    for picture in (by_http, by_grpc):
        _forget_moving_figures(picture)
    assert by_http == by_grpc
    assert by_http.keys() == set(cluster_pb2.ClusterStatus.DESCRIPTOR.fields_by_name)


async def test_a_finished_request_is_in_the_picture_with_its_account(
    cluster: SmallCluster, http: httpx2.AsyncClient
) -> None:
    for number in range(2):
        result = await answer(cluster.inference, request(range(40), 3, request_id=f"mine-{number}"))
    await until(lambda: cluster.router.num_running == 0)
    newest, before = (await http.get("/cluster/status")).json()["recent"]
    assert [newest["request_id"], before["request_id"]] == ["mine-1", "mine-0"]
    assert newest["number"] == before["number"] + 1
    assert (newest["face"], newest["outcome"], newest["message"]) == ("grpc", "length", "")
    assert (newest["prompt_tokens"], newest["cached_tokens"], newest["completion_tokens"]) == (40, 32, 3)
    assert (newest["prefill_worker"], newest["decode_worker"]) == ("prefill-0", "decode-0")
    assert 0 < newest["ttft_s"] <= newest["timeline"]["total"]
    assert newest["timeline"]["total"] == pytest.approx(result.finish.timeline.total, abs=0.5)
    stages = [seconds for name, seconds in newest["timeline"].items() if name != "total"]
    assert sum(stages) == pytest.approx(newest["timeline"]["total"])
    assert newest["age_s"] >= 0


async def test_a_request_without_a_token_has_no_time_to_its_first(
    cluster: SmallCluster, http: httpx2.AsyncClient
) -> None:
    call = cluster.inference.Generate(request(range(40), 3000, request_id="gone"))
    call.cancel()
    await answer(cluster.inference, request(range(40), 3))
    await until(lambda: cluster.router.num_running == 0)
    for recent in (await http.get("/cluster/status")).json()["recent"]:
        assert (recent["ttft_s"] is None) == (recent["completion_tokens"] == 0)
        assert all(0 <= seconds < 60 for seconds in recent["timeline"].values())


async def test_workers_show_their_hand_offs_pace_and_bounds(cluster: SmallCluster, http: httpx2.AsyncClient) -> None:
    await answer(cluster.inference, request(range(100), 5))

    async def decode_worker():
        pools = (await http.get("/cluster/status")).json()["pools"]
        (worker,) = next(pool["workers"] for pool in pools if pool["name"] == "decode")
        return worker if worker["pace"] and worker["load"]["counters"]["bytes_pulled"] else None

    worker = await until(decode_worker)
    assert worker["load"]["counters"]["chunks_pulled"] >= 1
    assert worker["pace"]["window_s"] > 0
    assert worker["block_size"] == 16
    assert worker["queue_budget_tokens"] > 0
    assert worker["connector"] == "local"
    assert worker["rss_bytes"] > 0


async def test_the_router_shows_what_it_turned_away(cluster: SmallCluster, http: httpx2.AsyncClient) -> None:
    assert (
        await http.post("/v1/completions", json={"model": "paper", "prompt": [1], "temperature": -1})
    ).status_code == 400
    await http.post("/v1/completions", json={"model": "paper", "prompt": [1, 2], "max_tokens": 2, "top_k": -5})
    router = (await http.get("/cluster/status")).json()["router"]
    assert router["refused_total"] == cluster.router.recent.num_refused
    assert router["queued"] == router["queued_tokens"] == 0
    assert router["max_queued_requests"] == cluster.router.config.router.max_queued_requests


# --- the stream -----------------------------------------------------------------------------------------------------


async def test_the_stream_is_a_picture_at_once_and_then_one_a_second(http: httpx2.AsyncClient) -> None:
    async with watching(http) as lines:
        assert await next_event(lines) == ["retry: 1000"]
        pictures = [await next_picture(lines) for _ in range(3)]
    uptimes = [picture["router"]["uptime_s"] for picture in pictures]
    assert uptimes == sorted(set(uptimes))


async def test_the_stream_shows_a_request_that_has_ended(cluster: SmallCluster, http: httpx2.AsyncClient) -> None:
    async with watching(http) as lines:
        assert (await next_picture(lines))["recent"] == []
        await answer(cluster.inference, request(range(20), 2, request_id="seen"))
        while not (picture := await next_picture(lines))["recent"]:
            pass
    assert picture["recent"][0]["request_id"] == "seen"


async def test_viewers_are_bounded_and_a_place_is_free_when_one_goes(
    cluster: SmallCluster, http: httpx2.AsyncClient
) -> None:
    host, port = cluster.http_address.split(":")
    viewers = [await asyncio.open_connection(host, int(port)) for _ in range(cluster_page.MAX_VIEWERS)]
    async with asyncio.timeout(DEADLINE_S):
        for reader, writer in viewers:
            writer.write(b"GET /cluster/events HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
    refused = await http.get("/cluster/events")
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["code"] == "too_many_viewers"
    assert (await http.get("/cluster/status")).status_code == 200
    viewers[0][1].transport.abort()

    async def has_place() -> bool:
        async with http.stream("GET", "/cluster/events") as response:
            return response.status_code == 200

    await until(has_place)
    for _, writer in viewers:
        writer.transport.abort()


async def test_streams_end_at_once_when_the_server_closes(cluster: SmallCluster, http: httpx2.AsyncClient) -> None:
    async with watching(http) as lines:
        assert await next_picture(lines)
        before = asyncio.all_tasks()
        closing = asyncio.create_task(cluster.server.close(grace_s=DEADLINE_S))
        while await next_picture(lines) is not None:
            pass
        await closing
    assert not [task for task in before & asyncio.all_tasks() if "EventStream" in repr(task.get_coro())]


async def test_a_draining_router_shows_that_and_ends_the_stream_while_requests_run(
    cluster: SmallCluster, http: httpx2.AsyncClient
) -> None:
    call = cluster.inference.Generate(request(range(40), 3000))
    await call.read()
    async with watching(http) as lines:
        assert (await next_picture(lines))["router"]["draining"] is False
        draining = asyncio.create_task(cluster.server.drain(DEADLINE_S))
        last = None
        while (picture := await next_picture(lines)) is not None:
            last = picture
        assert last["router"]["draining"] is True
        assert last["router"]["running"] == 1
    async with watching(http) as lines:
        assert (await next_picture(lines))["router"]["draining"] is True
        assert await next_picture(lines) is None
    call.cancel()
    assert await draining


async def test_one_picture_an_interval_serves_all_viewers() -> None:
    taken = iter(range(1000))
    feed = StatusFeed(lambda: str(next(taken)).encode(), asyncio.Event(), interval_s=0.01)
    seen: list[list[bytes]] = [[] for _ in range(20)]

    async def view(pictures: list[bytes]) -> None:
        assert feed.enter()
        async with aclosing(feed.pictures()) as stream:
            async for picture in stream:
                pictures.append(picture)
                if len(pictures) == 5:
                    break

    await asyncio.gather(*map(view, seen))
    assert seen == [[b"0", b"1", b"2", b"3", b"4"]] * 20
    assert next(taken) <= 6


async def test_a_slow_viewer_gets_the_newest_picture_and_holds_nobody_up() -> None:
    taken = iter(range(1000))
    feed = StatusFeed(lambda: str(next(taken)).encode(), asyncio.Event(), interval_s=0.01)
    assert feed.enter()
    assert feed.enter()
    slow, fast = feed.pictures(), feed.pictures()
    assert await anext(slow) == b"0"
    for number in range(5):
        assert await anext(fast) == str(number).encode()
    assert int(await anext(slow)) >= 5
    feed.leave()
    feed.leave()


async def test_pictures_are_taken_only_while_somebody_looks() -> None:
    taken: list[int] = []

    def take() -> bytes:
        taken.append(1)
        return b""

    feed = StatusFeed(take, asyncio.Event(), interval_s=0.005)
    for _ in range(2):
        assert feed.enter()
        stream = feed.pictures()
        await anext(stream)
        await anext(stream)
        feed.leave()
        num_taken = len(taken)
        await asyncio.sleep(0.05)
        assert len(taken) == num_taken


async def test_a_viewer_who_does_not_read_loses_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_page, "SEND_S", 0.05)
    feed = StatusFeed(lambda: b"{}", asyncio.Event(), interval_s=0.01, max_viewers=1)
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(DEADLINE_S):
        await EventStream(feed)({"type": "http"}, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert feed.enter()


async def test_a_picture_that_cannot_be_taken_ends_the_streams() -> None:
    def take() -> bytes:
        if taken:
            raise ValueError("no picture")
        taken.append(1)
        return b"{}"

    taken: list[int] = []
    feed = StatusFeed(take, asyncio.Event(), interval_s=0.01)
    assert feed.enter()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ValueError, match="no picture"):
            async for _ in feed.pictures():
                pass
    feed.leave()


def _forget_moving_figures(picture: dict) -> None:
    for router in (picture["router"], *picture["routers"]):
        for name in ("uptime_s", "rss_bytes"):
            del router[name]
    for recent in picture["recent"]:
        del recent["age_s"]
    for pool in picture["pools"]:
        for worker in pool["workers"]:
            for name in ("load", "load_age_s", "rss_bytes", "pace"):
                del worker[name]
            for lane in worker["lanes"]:
                for name in ("gb_per_s", "measured_bytes", "round_trip_s", "age_s"):
                    del lane[name]
