"""The openai package, unchanged, against a small cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from paper_model import PaperRunner
from parrot import ParrotRunner, write_parrot_tokenizer
from small_cluster import SmallCluster

TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@pytest.fixture
async def client(cluster) -> AsyncIterator[AsyncOpenAI]:
    base_url = f"http://{cluster.http_address}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=30) as client:
        yield client


async def test_chat(client, cluster) -> None:
    answer = await client.chat.completions.create(model="paper", messages=TURNS, max_completion_tokens=7, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.completion_tokens == 14
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    await cluster.at_rest()


async def test_a_streamed_chat_says_what_a_whole_one_says(client) -> None:
    options = {"model": "paper", "messages": TURNS, "max_tokens": 9, "temperature": 0}
    whole = await client.chat.completions.create(**options)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9


async def test_the_chat_stream_helper_reads_our_events(tmp_path) -> None:
    async with SmallCluster(write_parrot_tokenizer(tmp_path / "parrot"), ParrotRunner) as cluster:
        turns = [{"role": "user", "content": "你好 hello world"}]
        async with (
            AsyncOpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused", max_retries=0) as client,
            client.chat.completions.stream(model="paper", messages=turns, stop="world") as stream,
        ):
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
            whole = await stream.get_final_completion()
    assert "".join(deltas) == whole.choices[0].message.content == "你好 hello "


async def test_completions(client) -> None:
    options = {"model": "paper", "prompt": ["one", "two"], "max_tokens": 4, "temperature": 0}
    answer = await client.completions.create(**options, n=2, logit_bias={"5": -100})
    assert len(answer.choices) == 4
    texts = ["", ""]
    async for chunk in await client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    whole = await client.completions.create(**options)
    assert texts == [choice.text for choice in whole.choices]


async def test_models(client) -> None:
    models = (await client.models.list()).data
    assert [model.id for model in models] == ["paper"]
    assert (await client.models.retrieve("paper")).owned_by == "baton"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


async def test_errors_are_the_classes_that_programs_catch(client) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="other", messages=TURNS)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="paper", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    assert "temperature is -1" in wrong.value.message


async def test_an_error_after_the_first_token_is_raised_by_the_stream(paper_dir) -> None:
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.02)) as cluster:
        url = f"http://{cluster.http_address}/v1"
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            stream = await client.completions.create(
                model="paper",
                prompt="x",
                max_tokens=2000,
                stream=True,
                extra_headers={"X-Request-Timeout": "0.5"},
                extra_body={"ignore_eos": True},
            )
            with pytest.raises(openai.APIError, match="deadline"):
                async for _ in stream:
                    pass
        await cluster.at_rest()
