"""A request goes through router, prefill worker, hand-off and decode worker, and comes back right."""

from __future__ import annotations

import asyncio

import pytest
from paper_model import PaperRunner, paper_output, write_paper_tokenizer
from small_cluster import SmallCluster

from baton.proto import inference_pb2 as inference


@pytest.fixture(scope="session")
def paper_dir(tmp_path_factory):
    return write_paper_tokenizer(tmp_path_factory.mktemp("paper"))


def ask(prompt: list[int], max_tokens: int, **fields) -> inference.GenerateRequest:
    return inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=prompt),
        sampling=inference.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        **fields,
    )


async def collect(cluster: SmallCluster, request: inference.GenerateRequest):
    tokens, finish = [], None
    async for message in cluster.inference.Generate(request, timeout=30):
        assert message.first_token_index == len(tokens)
        tokens += message.token_ids
        if message.HasField("finish"):
            finish = message.finish
    assert finish is not None
    return tokens, finish


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100, 1000])
async def test_tokens_are_those_of_one_plain_model(paper_dir, num_tokens):
    prompt = [index * 7 % 256 for index in range(num_tokens)]
    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        tokens, finish = await collect(cluster, ask(prompt, 20))
        assert tokens == paper_output(prompt, 20)
        assert finish.usage.transferred_tokens == num_tokens
        assert finish.connector == "local"
        timeline = finish.timeline
        assert timeline.total > 0
        await cluster.at_rest()


async def test_many_at_once(paper_dir):
    async with SmallCluster(paper_dir, lambda: PaperRunner(num_blocks=200), prefill=2, decode=2) as cluster:
        prompts = [[(index * 31 + position) % 256 for position in range(5 + 17 * index)] for index in range(40)]
        results = await asyncio.gather(*(collect(cluster, ask(prompt, 50)) for prompt in prompts))
        for prompt, (tokens, _) in zip(prompts, results, strict=True):
            assert tokens == paper_output(prompt, 50)
        await cluster.at_rest()
