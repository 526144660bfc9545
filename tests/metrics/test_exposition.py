"""What router and workers show to Prometheus: it can be read, it is true, and it stays small."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest
from asking import answer, request, until
from metrics.scraping import Page, Run, get, scrape, targets
from paper_model import PaperRunner, paper_output
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from small_cluster import SmallCluster

from baton.engine.metrics import WorkerMetrics
from baton.proto import inference_pb2 as inference
from baton.proto.messages import FailureKind, LoadReport, Role
from baton.proto.settings import ObservabilitySettings, SchedulerSettings, WorkerSettings
from baton.router.cluster import WorkerState
from baton.router.config import RouterSettings
from baton.router.metrics import RouterMetrics
from baton.telemetry.metrics import Endpoint, Meter

ACCEPTS = [  # as Prometheus sends it, versions 2 and 3
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
]


def series_of(page: Page) -> set[tuple]:
    return {(s.name, *sorted(s.labels.items())) for family in page.families for s in family.samples}


def counts_of(page: Page) -> dict[tuple, float]:
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in page.families
        for s in family.samples
        if family.type in ("counter", "histogram")
    }


@pytest.fixture
async def cluster(paper_dir):
    scheduler = SchedulerSettings(max_num_batched_tokens=64)
    async with SmallCluster(paper_dir, PaperRunner, decode=2, scheduler=scheduler) as cluster:
        yield cluster


# --- form -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ACCEPTS)
async def test_every_page_can_be_read_in_both_formats_compressed_or_not(cluster: SmallCluster, accept: str) -> None:
    await answer(cluster.inference, request([1] * 100, 5))
    for group in await targets(cluster):
        [address] = group["targets"]
        plain = await get(address, "/metrics")
        assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        names = {family.name for family in text_string_to_metric_families(plain.text)}
        opened = await get(address, "/metrics", Accept=accept)
        assert opened.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert opened.text.endswith("# EOF\n")
        assert {family.name for family in open_metrics(opened.text)} == names
        small = await get(address, "/metrics", **{"Accept-Encoding": "gzip"})
        assert small.headers["Content-Encoding"] == "gzip"
        assert len(small.body) < len(plain.body) / 4
        assert {family.name for family in text_string_to_metric_families(small.text)} == names


async def test_targets_name_the_router_as_it_was_reached_and_each_worker(cluster: SmallCluster) -> None:
    groups = await targets(cluster)
    labels = [group["labels"] for group in groups]
    lives = {seat.worker_id: seat.description.incarnation for seat in cluster.members()}
    assert len({*lives.values(), cluster.router.incarnation}) == 4
    assert labels == [
        {
            "host": "127.0.0.1",
            "role": role,
            "pool": pool,
            "worker_id": worker_id,
            "__meta_baton_incarnation": lives.get(worker_id, cluster.router.incarnation),
        }
        for role, pool, worker_id in (
            ("router", "", "router"),
            ("prefill", "prefill", "prefill-0"),
            ("decode", "decode", "decode-0"),
            ("decode", "decode", "decode-1"),
        )
    ]
    assert groups[0]["targets"] == [cluster.http_address]
    assert len({target for group in groups for target in group["targets"]}) == 4


async def test_a_worker_without_metrics_opens_no_port_and_is_no_target(paper_dir) -> None:
    quiet = ObservabilitySettings(worker_metrics=False)
    async with SmallCluster(paper_dir, PaperRunner, prefill=0, decode=0, colocated=1, observability=quiet) as cluster:
        [group] = await targets(cluster)
        assert group["labels"]["role"] == "router"
        assert [seat.description.metrics_address for seat in cluster.members()] == [""]


async def test_an_endpoint_serves_others_while_one_says_nothing_and_closes_at_once() -> None:
    endpoint = Endpoint(Meter("m", "e").registry)
    host, _, port = endpoint.open("127.0.0.1").rpartition(":")
    with socket.create_connection((host, int(port))):
        assert "process_open_fds" in (await get(f"{host}:{port}", "/metrics")).text
        await asyncio.to_thread(endpoint.close)
    with pytest.raises(urllib.error.URLError, match="refused"):
        await get(f"{host}:{port}", "/metrics")


async def test_an_endpoint_has_one_path_and_one_method() -> None:
    endpoint = Endpoint(Meter("m", "e").registry)
    address = endpoint.open("127.0.0.1")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        await get(address, "/")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        await get(address, "/metrics", method="POST")
    await asyncio.to_thread(endpoint.close)


async def test_an_endpoint_on_ipv6_tells_an_address_that_can_be_asked() -> None:
    endpoint = Endpoint(Meter("m", "e").registry)
    address = endpoint.open("::1")
    assert address.startswith("[::1]:")
    assert "process_open_fds" in (await get(address, "/metrics")).text
    await asyncio.to_thread(endpoint.close)


async def test_an_endpoint_that_never_opened_can_be_closed() -> None:
    Endpoint(Meter("m", "e").registry).close()


# --- truth ----------------------------------------------------------------------------------------------------------


async def test_figures_are_the_sums_of_what_clients_were_told(cluster: SmallCluster) -> None:
    prompts = [[index % 200] * (20 + 9 * index) for index in range(12)]
    prompts += prompts[:4]
    finishes = []
    for prompt in prompts:
        result = await answer(cluster.inference, request(prompt, 3 + len(prompt) % 7))
        finishes.append(result.finish)
    several = request([7] * 90, 6, sampling_n=3, sampling_temperature=1.0, sampling_seed=1)
    parts = [part async for part in cluster.inference.Generate(several, timeout=30)]
    finishes += [part.finish for part in parts if part.HasField("finish")]
    assert len(finishes) == len(prompts) + 3
    await cluster.at_rest()
    usages = [finish.usage for finish in finishes]
    sums = {name: sum(getattr(usage, name) for usage in usages) for name in usages[0].DESCRIPTOR.fields_by_name}
    assert min(sums["prompt_tokens"], sums["completion_tokens"], sums["cached_tokens"], sums["transferred_tokens"]) > 0

    async def reported() -> bool:
        pages = await scrape(cluster)
        return sum(page.value("baton_legs_total") for page in pages.values() if page.target["role"] != "router") > 0

    await until(reported)
    await asyncio.sleep(5 * 0.02)
    pages = await scrape(cluster)
    router = pages.pop("router")
    assert router.value("vllm:prompt_tokens_total") == sums["prompt_tokens"]
    assert router.value("vllm:request_prompt_tokens_sum") == sums["prompt_tokens"]
    assert router.value("vllm:generation_tokens_total") == sums["completion_tokens"]
    assert router.value("vllm:request_generation_tokens_sum") == sums["completion_tokens"]
    for source in ("cached", "transferred", "recomputed"):
        assert router.value("baton_request_tokens_total", source=source) == sums[f"{source}_tokens"]
    assert router.value("vllm:request_success_total", finished_reason="length") == len(finishes)
    assert router.value("baton_requests_total", face="grpc", outcome="ok") == len(prompts) + 1
    assert router.value("vllm:time_to_first_token_seconds_count") == len(prompts) + 1
    assert router.value("vllm:e2e_request_latency_seconds_count") == len(prompts) + 1
    for stage in ("router_wait", "prefill_compute", "handoff_transfer", "decode"):
        told = sum(getattr(finish.timeline, stage) for finish in finishes)
        assert router.value("baton_request_stage_seconds_sum", stage=stage) == pytest.approx(told, rel=0.02, abs=0.02)
    moved = sum(page.value("baton_prompt_tokens_total", source="transferred") for page in pages.values())
    assert moved == sums["transferred_tokens"]
    assert sum(page.value("baton_tokens_generated_total") for page in pages.values()) == sums["completion_tokens"]
    bytes_moved = sum(page.value("vllm:nixl_bytes_transferred_sum") for page in pages.values())
    assert bytes_moved == sum(c.bytes_pulled for c in (await cluster.counters()).values()) > 0
    assert sum(page.value("vllm:nixl_xfer_time_seconds_count") for page in pages.values()) == sum(
        page.value("baton_chunks_pulled_total") for page in pages.values()
    )


async def test_gaps_are_counted_between_the_messages_of_one_output(cluster: SmallCluster) -> None:
    for _ in range(3):
        await answer(cluster.inference, request([3] * 40, 9))
    router = (await scrape(cluster))["router"]
    assert router.value("vllm:inter_token_latency_seconds_count") == 3 * 8
    assert router.value("vllm:request_time_per_output_token_seconds_count") == 3


async def test_the_blocks_of_a_worker_are_each_in_one_state(run: Run) -> None:
    for pages in run.scrapes:
        for page in pages.values():
            if page.target["role"] != "router":
                assert page.value("baton_blocks") == 40


def test_counters_only_rise(run: Run) -> None:
    for before, after in itertools.pairwise(run.scrapes):
        for who in before.keys() & after.keys():
            later = counts_of(after[who])
            gone = {("worker", worker) for worker in before.keys() - after.keys()}
            for series, value in counts_of(before[who]).items():
                assert series in later or gone.intersection(series), series
                assert later.get(series, value) >= value, series


def test_a_restart_count_does_not_fall_when_another_worker_takes_the_name(paper_dir) -> None:
    async def counts() -> list[float]:
        async with SmallCluster(paper_dir, PaperRunner) as cluster:
            metrics = RouterMetrics(cluster.router, cluster)
            seat, seen = cluster.seats["decode-0"], []
            for restarts in (0, 2, 2, None, 0, 1):
                if restarts is None:
                    hidden = cluster.seats.pop("decode-0")
                    metrics.page()
                    cluster.seats["decode-0"] = hidden
                    continue
                seat.restarts = restarts
                page = {family.name: family for family in metrics.page().collect()}
                [value] = [
                    sample.value
                    for sample in page["baton_worker_restarts"].samples
                    if sample.labels["worker"] == "decode-0"
                ]
                seen.append(value)
            return seen

    assert asyncio.run(counts()) == [0, 2, 2, 2, 3]


async def test_retries_are_counted_by_what_failed(paper_dir) -> None:
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.005), decode=2) as cluster:
        call = cluster.inference.Generate(request([5] * 50, 100))
        tokens = []
        async for part in call:
            tokens += part.token_ids
            if len(tokens) == 10:
                at = next(
                    view.worker_id
                    for view in cluster.router.book.views(0.0)
                    if view.running and view.role is Role.DECODE
                )
                await cluster.remove(at)
        assert tokens == paper_output([5] * 50, 100)
        router = (await scrape(cluster))["router"]
        by_kind = {kind: router.value("baton_retries_total", kind=kind.name.lower()) for kind in FailureKind}
        assert by_kind == {**dict.fromkeys(FailureKind, 0.0), FailureKind.WORKER_LOST: 1.0}


# --- size -----------------------------------------------------------------------------------------------------------


async def test_labels_are_bounded_whatever_clients_send(paper_dir) -> None:
    """500 requests of every kind leave not one series that 60 of the same kinds did not leave."""
    rng = random.Random(11)
    secrets: list[str] = []
    ends: set[grpc.StatusCode] = set()

    def some() -> inference.GenerateRequest:
        words = [f"{rng.getrandbits(64):x}" for _ in range(4)]
        secrets.extend(words)
        return request(
            [rng.randrange(256) for _ in range(rng.choice((0, 5, 40, 200)))],
            rng.choice((1, 4, 9)),
            request_id=f"id-{words[0]}",
            session_id=words[1],
            cache_salt=words[2],
            adapter=rng.choice(("", "", words[3])),
            priority=rng.randrange(-3, 3),
            sampling_temperature=rng.choice((0.0, 1.0, -1.0)),
            sampling_n=rng.choice((1, 1, 3)),
        )

    async def send(number: int) -> None:
        for _ in range(number):
            try:
                async for _ in cluster.inference.Generate(
                    some(), timeout=30, metadata=(("x-client", rng.choice(secrets)),)
                ):
                    pass
            except grpc.aio.AioRpcError as error:
                ends.add(error.code())

    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        await asyncio.gather(*(send(15) for _ in range(4)))
        before = {who: series_of(page) for who, page in (await scrape(cluster)).items()}
        await asyncio.gather(*(send(125) for _ in range(4)))
        pages = await scrape(cluster)
        assert {who: series_of(page) for who, page in pages.items()} == before
        router = pages["router"]
        assert router.value("baton_requests_total", outcome="ok") > 100
        assert router.value("baton_requests_total", outcome="invalid") > 100
        assert router.value("baton_requests_total") == 560
        assert ends <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
        for page in pages.values():
            assert not any(secret in page.text for secret in secrets)


async def test_a_worker_that_is_gone_has_no_gauges_and_is_no_target(cluster: SmallCluster) -> None:
    for salt in range(4):
        await answer(cluster.inference, request([salt] * 30, 4))

    def gauges(page: Page) -> set[str]:
        return {
            family.name
            for family in page.families
            for sample in family.samples
            if sample.labels.get("worker") == "decode-1" and family.type == "gauge"
        }

    before = (await scrape(cluster))["router"]
    assert gauges(before) >= {"baton_worker_up", "baton_worker_credit_tokens", "baton_worker_in_flight"}
    assert before.value("baton_workers", worker_role="decode", state="ready") == 2
    placed = before.value("baton_placements_total", worker="decode-1")
    await cluster.remove("decode-1")
    pages = await scrape(cluster)
    assert "decode-1" not in pages
    assert not gauges(pages["router"])
    assert pages["router"].value("baton_workers", worker_role="decode", state="ready") == 1
    assert pages["router"].value("baton_placements_total", worker="decode-1") == placed


async def test_a_lost_worker_is_down_and_is_not_scraped(cluster: SmallCluster) -> None:
    cluster.seats["decode-0"].state = WorkerState.LOST
    pages = await scrape(cluster)
    assert "decode-0" not in pages
    assert pages["router"].value("baton_worker_up", worker="decode-0") == 0
    assert pages["router"].value("baton_workers", worker_role="decode", state="lost") == 1


# --- load -----------------------------------------------------------------------------------------------------------


async def test_scrapes_under_load_are_all_answered_and_no_token_is_lost(paper_dir) -> None:
    prompts = [[(index * 7 + salt) % 256 for index in range(150)] for salt in range(24)]
    over = asyncio.Event()

    async def scrape_on(cluster: SmallCluster) -> list[dict[str, Any]]:
        seen = []
        while not over.is_set():
            seen.append({who: counts_of(page) for who, page in (await scrape(cluster)).items()})
        return seen

    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.002), decode=2) as cluster:
        scrapers = [asyncio.create_task(scrape_on(cluster)) for _ in range(3)]
        results = await asyncio.gather(*(answer(cluster.inference, request(prompt, 40)) for prompt in prompts))
        over.set()
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == paper_output(prompt, 40)
        for seen in await asyncio.gather(*scrapers):
            assert seen
            for before, after in itertools.pairwise(seen):
                for who, counts in before.items():
                    assert all(after[who][series] >= value for series, value in counts.items())
        await cluster.at_rest()


def test_a_worker_shows_what_it_last_reported_and_nothing_of_load_before_that() -> None:
    description = PaperRunner().description
    metrics = WorkerMetrics(WorkerSettings("w", "p", Role.DECODE, model_name="served"), description, "i", "local")
    names = {family.name for family in metrics.collect()}
    assert "baton_blocks" not in names
    assert "baton_worker_info" in names
    metrics.reported(LoadReport("w", "i", Role.DECODE, running=3, total_blocks=10, free_blocks=4, cached_blocks=1))
    families = {family.name: family for family in metrics.collect()}
    [usage] = families["vllm:kv_cache_usage_perc"].samples
    assert usage.value == pytest.approx(0.6)
    assert usage.labels == {"model_name": "served", "engine": "w"}


async def test_the_served_name_is_the_label_everywhere(paper_dir) -> None:
    settings = RouterSettings(port=0, served_model_name="our-model")
    async with SmallCluster(paper_dir, PaperRunner, router_settings=settings) as cluster:
        for page in (await scrape(cluster)).values():
            named = [s.labels for family in page.families for s in family.samples if "model_name" in s.labels]
            assert {labels["model_name"] for labels in named} == {"our-model"}


async def test_ready_shows_once_a_request_has_gone_through(cluster: SmallCluster) -> None:
    assert (await scrape(cluster))["router"].value("baton_router_ready") == 0
    await cluster.router.prove_ready()
    assert (await scrape(cluster))["router"].value("baton_router_ready") == 1
    await cluster.router.drain(1.0)
    assert (await scrape(cluster))["router"].value("baton_router_draining") == 1


async def test_requests_of_each_face_are_counted_apart(cluster: SmallCluster) -> None:
    await answer(cluster.inference, request([9] * 20, 3))
    message = urllib.request.Request(
        f"http://{cluster.http_address}/v1/completions",
        data=json.dumps({"model": "paper", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with await asyncio.to_thread(urllib.request.urlopen, message, timeout=20) as response:
        told = json.load(response)["usage"]
    router = (await scrape(cluster))["router"]
    assert router.value("baton_requests_total", face="grpc", outcome="ok") == 1
    assert router.value("baton_requests_total", face="http", outcome="ok") == 1
    assert router.value("vllm:generation_tokens_total") == 3 + told["completion_tokens"] == 7
    assert router.value("vllm:prompt_tokens_total") == 20 + told["prompt_tokens"]
