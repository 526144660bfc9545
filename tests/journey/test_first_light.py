"""A request goes through router, prefill worker, hand-off and decode worker, and comes back right."""

from __future__ import annotations

import asyncio

import pytest
from asking import answer, request
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.proto.settings import SchedulerSettings, TransferSettings
from baton.router.config import RouterSettings


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [(index * 7 + salt * 31) % 256 for index in range(num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100, 1000])
async def test_tokens_are_those_of_one_plain_model(paper_dir, num_tokens):
    prompt = prompt_of(num_tokens)
    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        result = await answer(cluster.inference, request(prompt, 20))
        assert result.tokens == paper_output(prompt, 20)
        assert result.finish.usage.transferred_tokens == num_tokens
        assert result.finish.usage.recomputed_tokens == 0
        assert result.finish.connector == "local"
        await cluster.at_rest()


async def test_the_stages_of_the_timeline_add_up_to_the_total(paper_dir):
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.005, seconds_per_token=0.0002)) as cluster:
        for num_tokens in (20, 400):
            timeline = (await answer(cluster.inference, request(prompt_of(num_tokens), 30))).finish.timeline
            stages = sum(value for field, value in timeline.ListFields() if field.name != "total")
            assert stages == pytest.approx(timeline.total, rel=0.05)


@pytest.mark.parametrize("connector", ["local", "nixl", "nccl"])
@pytest.mark.parametrize("binding", ["early", "late"])
async def test_many_requests_on_two_and_two_workers_are_all_right(paper_dir, connector, binding):
    async with SmallCluster(
        paper_dir,
        lambda: PaperRunner(num_blocks=200),
        prefill=2,
        decode=2,
        transfer=TransferSettings(connector=connector, checksums="always"),
        scheduler=SchedulerSettings(max_num_batched_tokens=128),
        router_settings=RouterSettings(port=0, binding=binding),
    ) as cluster:
        prompts = [prompt_of(5 + 17 * index, salt=index) for index in range(40)]
        results = await asyncio.gather(*(answer(cluster.inference, request(prompt, 50)) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == paper_output(prompt, 50)
        await cluster.at_rest()


async def test_every_uncached_prompt_token_is_transferred_once_and_chunks_overlap_with_compute(paper_dir):
    async with SmallCluster(
        paper_dir,
        lambda: PaperRunner(num_blocks=800, seconds_per_token=0.0001),
        prefill=2,
        decode=2,
        scheduler=SchedulerSettings(max_num_batched_tokens=64),
    ) as cluster:
        shared = prompt_of(160)
        prompts = [shared[: 16 * (index % 10)] + prompt_of(3 + 11 * index, salt=index) for index in range(60)]
        gate = asyncio.Semaphore(16)

        async def one(prompt: list[int]):
            async with gate:
                return await answer(cluster.inference, request(prompt, 12))

        results = await asyncio.gather(*(one(prompt) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == paper_output(prompt, 12)
        await cluster.at_rest()
        counters = await cluster.counters()
        decode = [counters[f"decode-{index}"] for index in range(2)]
        moved = sum(entry.prompt_tokens_transferred for entry in decode)
        cached = sum(entry.prompt_tokens_cached for entry in decode)
        assert moved + cached == sum(map(len, prompts))
        assert moved == sum(result.finish.usage.transferred_tokens for result in results)
        assert sum(entry.tokens_recomputed + entry.prompt_tokens_computed for entry in decode) == 0
        assert sum(entry.chunks_pulled_early for entry in decode) > 0


@pytest.mark.parametrize("role", ["pair", "colocated"])
async def test_preemption_changes_no_token(paper_dir, role):
    async with SmallCluster(
        paper_dir,
        lambda: PaperRunner(num_blocks=40),
        prefill=0 if role == "colocated" else 1,
        decode=0 if role == "colocated" else 1,
        colocated=1 if role == "colocated" else 0,
        scheduler=SchedulerSettings(max_num_batched_tokens=48),
    ) as cluster:
        prompts = [prompt_of(20 + index, salt=index) for index in range(12)]
        results = await asyncio.gather(*(answer(cluster.inference, request(prompt, 300)) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == paper_output(prompt, 300)
        await cluster.at_rest()
        counters = await cluster.counters()
        assert sum(entry.preemptions_recompute for entry in counters.values()) > 0
        assert sum(entry.tokens_recomputed for entry in counters.values()) > 0


async def test_one_token_needs_no_decode_worker(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        result = await answer(cluster.inference, request(prompt_of(30), 1))
        assert result.tokens == paper_output(prompt_of(30), 1)
        assert result.finish.usage.transferred_tokens == 0
        await cluster.at_rest()


async def test_a_resumed_request_goes_on_after_the_tokens_that_the_client_has(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        whole = paper_output(prompt_of(30), 40)
        for num_before in (1, 17, 39, 40):
            message = request(prompt_of(30), 40, resume_token_ids=whole[:num_before])
            result = await answer(cluster.inference, message)
            assert whole[:num_before] + result.tokens == whole
            assert result.finish.usage.completion_tokens == 40
        await cluster.at_rest()


async def test_n_outputs_end_once_each(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
        ends = []
        async for part in cluster.inference.Generate(request(prompt_of(30), 10, sampling_n=3), timeout=30):
            tokens[part.index] += part.token_ids
            if part.HasField("finish"):
                ends.append(part.index)
        assert sorted(ends) == [0, 1, 2]
        assert all(output == paper_output(prompt_of(30), 10) for output in tokens.values())
        await cluster.at_rest()
