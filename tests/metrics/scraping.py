"""Asks a running cluster for its figures as Prometheus does, and runs one in which all happens that is counted."""

from __future__ import annotations

import asyncio
import gzip
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path

import grpc
from asking import answer, request, until
from metrics.promql import Store
from paper_model import PaperRunner
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from small_cluster import SmallCluster

from baton.proto.settings import SchedulerSettings
from baton.router.config import RouterSettings


@dataclass(frozen=True)
class Answer:
    headers: Message
    body: bytes

    @property
    def text(self) -> str:
        body = gzip.decompress(self.body) if self.headers["Content-Encoding"] == "gzip" else self.body
        return body.decode()


@dataclass(frozen=True)
class Page:
    """What one target showed at one moment."""

    target: dict[str, str]
    text: str

    @property
    def families(self) -> Iterator[Metric]:
        return text_string_to_metric_families(self.text)

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels; there must be one."""
        found = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"{name} {labels} is not on the page of {self.target}"
        return sum(found)


async def get(address: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """One request; raises for any status but 200."""
    message = urllib.request.Request(f"http://{address}{path}", headers=headers, method=method)

    def ask() -> Answer:
        with urllib.request.urlopen(message, timeout=10) as r:
            return Answer(r.headers, r.read())

    return await asyncio.to_thread(ask)


async def targets(cluster: SmallCluster) -> list[dict]:
    return json.loads((await get(cluster.http_address, "/metrics/targets")).body)


async def scrape(cluster: SmallCluster) -> dict[str, Page]:
    """The page of everything that the router says is there, by the name of what it is."""
    pages = {}
    for group in await targets(cluster):
        for address in group["targets"]:
            labels = group["labels"]
            pages[labels["worker_id"]] = Page(labels, (await get(address, "/metrics")).text)
    return pages


@dataclass
class Run:
    """Scrapes of one run, one a simulated minute, and what its clients were told."""

    scrapes: list[dict[str, Page]] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return 60.0 * len(self.scrapes)

    def store(self) -> Store:
        """What Prometheus, configured as deploy/prometheus has it, would know."""
        store = Store()
        for number, pages in enumerate(self.scrapes, start=1):
            for page in pages.values():
                target = {name: value for name, value in page.target.items() if value and not name.startswith("__")}
                store.scrape(page.text, 60.0 * number, job="baton", instance=target["worker_id"], **target)
        return store


async def run_with_trouble(paper_dir: Path) -> Run:
    """1P2D with too few blocks: requests that go well, that are refused, preempted, given up and tried again."""
    run = Run()
    async with SmallCluster(
        paper_dir,
        lambda: PaperRunner(num_blocks=40, step_s=0.002, seconds_per_token=0.0002),
        decode=2,
        scheduler=SchedulerSettings(max_num_batched_tokens=64),
        router_settings=RouterSettings(port=0, max_queued_requests=8),
    ) as cluster:
        await cluster.router.prove_ready()
        run.scrapes.append(await scrape(cluster))
        prompt = [index % 251 for index in range(100)]
        for salt in range(3):
            await answer(cluster.inference, request([*prompt, salt], 20))
        for refused in (request([], 5), request(prompt, 0), request([1] * 10_000, 5)):
            await _trouble(cluster, refused)
        run.scrapes.append(await scrape(cluster))
        given_up = cluster.inference.Generate(request(prompt, 300))
        async for _ in given_up:
            break
        given_up.cancel()
        crowd = [asyncio.create_task(_any_end(cluster, request([n] * 60, 120))) for n in range(8)]
        await until(lambda: cluster.router.book.view("decode-1", 0.0).running >= 2, what="work on decode-1")
        late = [asyncio.create_task(_any_end(cluster, request([n] * 300, 4))) for n in range(24)]
        await until(lambda: any(task.done() for task in late), what="a refusal")
        await cluster.remove("decode-1")
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in await asyncio.gather(*late)
        assert await asyncio.gather(*crowd) == [grpc.StatusCode.OK] * len(crowd)
        await cluster.at_rest(timeout_s=20.0)
        await asyncio.sleep(3 * 0.02)
        run.scrapes.append(await scrape(cluster))
    return run


async def _any_end(cluster: SmallCluster, message) -> grpc.StatusCode:
    try:
        await answer(cluster.inference, message)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _trouble(cluster: SmallCluster, message) -> None:
    assert await _any_end(cluster, message) is grpc.StatusCode.INVALID_ARGUMENT
