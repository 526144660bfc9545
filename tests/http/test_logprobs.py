"""Log-probabilities in the clients' forms are those that gRPC reports, of a real small model."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator

import pytest
from asking import answer
from openai import AsyncOpenAI
from small_cluster import SmallCluster
from web import client_of, streamed

from baton.engine.runner import Runner
from baton.proto import inference_pb2 as inference
from baton.proto.settings import EngineSettings

PROMPT = "hello"
SAMPLING = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def real(tiny_model_dir) -> AsyncIterator[SmallCluster]:
    directory = tiny_model_dir("llama")
    settings = EngineSettings(model=str(directory), dtype="float32", num_blocks=64, threads=1)
    async with SmallCluster(directory, lambda: Runner(settings)) as small:
        yield small


async def by_grpc(cluster: SmallCluster, **sampling):
    params = inference.SamplingParams(**SAMPLING, **sampling)
    return await answer(cluster.inference, inference.GenerateRequest(text=PROMPT, sampling=params))


async def test_completions(real) -> None:
    rpc = await by_grpc(real, logprobs=3)
    body = {"prompt": PROMPT, **SAMPLING, "logprobs": 3}
    async with client_of(real) as http:
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        stream = await streamed(http, "/v1/completions", body)
    logprobs = whole["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([entry.logprob for entry in rpc.logprobs], abs=1e-5)
    for own, top, token in zip(rpc.logprobs, logprobs["top_logprobs"], logprobs["tokens"], strict=True):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx([other.logprob for other in own.top], abs=1e-5)
        assert top[token] == pytest.approx(own.logprob, abs=1e-5)
    for member in logprobs:
        joined = [value for choice in stream.choices for value in choice["logprobs"][member]]
        assert joined == logprobs[member]


async def test_each_offset_is_where_the_tokens_text_begins(real) -> None:
    """The tiny model's tokens are bytes and words: where the text is whole, it says the token at its offset."""
    async with client_of(real) as http:
        body = {"prompt": "你好 a", **SAMPLING, "max_tokens": 1, "logprobs": 0, "echo": True}
        choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("你好 a")
    assert logprobs["text_offset"][:8] == [0, 0, 0, 1, 1, 1, 2, 3]
    assert logprobs["tokens"][0] == "bytes:\\xe4"
    assert logprobs["tokens"][6:8] == [" ", "a"]


async def test_a_prompt_can_be_scored_without_a_token_of_output(real) -> None:
    rpc = await by_grpc(real, prompt_logprobs=2)
    async with client_of(real) as http:
        body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
        answered = (await http.post("/v1/completions", json=body)).json()
        stream = await streamed(http, "/v1/completions", body)
        both = (await http.post("/v1/completions", json={**body, "max_tokens": 3})).json()["choices"][0]
    (choice,) = answered["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert answered["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1:] == pytest.approx([entry.logprob for entry in rpc.prompt_logprobs], abs=1e-5)
    assert logprobs["tokens"] == list(PROMPT)
    assert stream.text() == PROMPT
    assert stream.choices[0]["logprobs"] == logprobs
    assert both["logprobs"]["token_logprobs"][1 : len(PROMPT)] == pytest.approx(logprobs["token_logprobs"][1:])
    assert len(both["logprobs"]["tokens"]) == len(PROMPT) + 3


async def test_a_prompts_log_probabilities_in_vllms_form(real) -> None:
    rpc = await by_grpc(real, prompt_logprobs=2)
    async with client_of(real) as http:
        body = {"prompt": PROMPT, **SAMPLING, "prompt_logprobs": 2}
        first, *others = (await http.post("/v1/completions", json=body)).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    for entry, own in zip(others, rpc.prompt_logprobs, strict=True):
        said = entry[str(own.token_id)]
        assert said["logprob"] == pytest.approx(own.logprob, abs=1e-5)
        assert said["rank"] == own.rank
        assert {value["rank"] for value in entry.values()} >= {1, 2}


async def test_chat_by_the_openai_package(real) -> None:
    async with AsyncOpenAI(base_url=f"http://{real.http_address}/v1", api_key="unused", max_retries=0) as client:
        options = {"model": "paper", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
        whole = await client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
        content = whole.choices[0].logprobs.content
        streamed_content = [
            entry
            async for chunk in await client.chat.completions.create(
                **options, logprobs=True, top_logprobs=3, stream=True
            )
            for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
        ]
    assert [entry.token for entry in streamed_content] == [entry.token for entry in content]
    # The second prompt finds the first one in the prefix cache, so its rows are computed in other company.
    for again, entry in zip(streamed_content, content, strict=True):
        assert again.bytes == entry.bytes
        assert again.logprob == pytest.approx(entry.logprob, abs=1e-4)
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob
    tokenizer = real.router.tokenizer
    said = b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace")
    assert whole.choices[0].message.content in said or "<|im_end|>" in said
    assert tokenizer.has_chat_template


async def test_no_infinity_is_written(real) -> None:
    """A token that cannot come has a logprob of minus infinity, for which JSON has no word."""
    async with client_of(real) as http:
        body = {"prompt": PROMPT, **SAMPLING, "logprobs": 20, "logit_bias": {"5": -100}}
        response = await http.post("/v1/completions", json=body)

    def refuse(word: str) -> float:
        raise AssertionError(word)

    content = json.loads(response.content, parse_constant=refuse)
    assert all(map(math.isfinite, content["choices"][0]["logprobs"]["token_logprobs"]))


def test_the_bytes_of_tokens_join_to_any_text(tmp_path_factory) -> None:
    from parrot import CORPUS, write_parrot_tokenizer

    from baton.router.tokenizer import Tokenizer

    tokenizer = Tokenizer(write_parrot_tokenizer(tmp_path_factory.mktemp("parrot")))
    for text in (*CORPUS, "\0 ÿ Ā \u00ad \U0001d518"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    assert tokenizer.token_bytes(10**6) == b""
