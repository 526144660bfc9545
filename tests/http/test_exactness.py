"""HTTP says what gRPC says, streamed or whole, in whatever script the model writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from asking import answer, request
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from paper_model import paper_output
from parrot import PIECES, ParrotRunner, write_parrot_tokenizer
from small_cluster import SmallCluster
from web import client_of, streamed

from baton.proto import inference_pb2 as inference

TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=20).map("".join)
STOPS = st.lists(
    st.sampled_from(["ab", "ba", "aba", "你", "好世", "🎉", "world", "lo w", " ", '"', "\u0301"]),
    max_size=4,
    unique=True,
)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is completed first; of several completed at once, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@pytest.fixture
async def parrots(tmp_path) -> AsyncIterator[SmallCluster]:
    async with SmallCluster(write_parrot_tokenizer(tmp_path / "parrot"), ParrotRunner) as small:
        yield small


async def test_any_script_comes_out_whole_by_every_way(parrots) -> None:
    """The model says its prompt again; the oracle is the prompt, cut at the first stop string that is completed."""
    http = client_of(parrots)

    async def ways(text: str, stops: list[str]) -> None:
        tokens = parrots.router.tokenizer.encode(text)
        expected, stop = cut(text, stops)
        sampling = {"max_tokens": len(tokens), "temperature": 0, "stop": stops}
        body = {"prompt": text, **sampling}
        conversation = {"messages": [{"role": "user", "content": text}], **sampling}
        message = inference.GenerateRequest(text=text, sampling=inference.SamplingParams(**sampling))
        rpc, whole, stream, chat, chat_stream = await asyncio.gather(
            answer(parrots.inference, message),
            http.post("/v1/completions", json=body),
            streamed(http, "/v1/completions", body),
            http.post("/v1/chat/completions", json=conversation),
            streamed(http, "/v1/chat/completions", conversation),
        )
        choice, turn = whole.json()["choices"][0], chat.json()["choices"][0]
        assert rpc.text == expected
        assert choice["text"] == turn["message"]["content"] == stream.text() == chat_stream.text() == expected
        reason = "stop" if stop else "length"
        assert choice["finish_reason"] == turn["finish_reason"] == reason
        assert stream.finish_reason() == chat_stream.finish_reason() == reason
        assert choice["stop_reason"] == turn["stop_reason"] == stream.choices[-1]["stop_reason"] == stop
        for usage in (whole.json()["usage"], chat.json()["usage"]):
            assert usage["completion_tokens"] == rpc.finish.usage.completion_tokens == len(rpc.tokens)
            assert usage["prompt_tokens"] == len(tokens)

    loop = asyncio.get_running_loop()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=TEXTS, stops=STOPS)
    @example(text="👩‍👩‍👧你好e\u0301", stops=[])
    @example(text="hello world", stops=["lo w"])
    def check(text: str, stops: list[str]) -> None:
        asyncio.run_coroutine_threadsafe(ways(text, stops), loop).result(60)

    await asyncio.to_thread(check)
    await http.aclose()
    await parrots.at_rest()


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
async def test_tokens_by_http_are_those_by_grpc_and_of_the_model(cluster, http, num_tokens) -> None:
    prompt = [(7 * place) % 256 for place in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    rpc = await answer(cluster.inference, request(prompt, 30))
    whole = (await http.post("/v1/completions", json=body)).json()
    stream = await streamed(http, "/v1/completions", body)
    assert rpc.tokens == paper_output(prompt, 30)
    assert whole["choices"][0]["text"] == stream.text() == rpc.text
    assert len(stream.choices) == 30, "one event a token, the end with the last"
    await cluster.at_rest()


async def test_several_prompts_with_several_outputs_keep_their_order(cluster, http) -> None:
    prompts = ["first", "second one", "third"]
    body = {"prompt": prompts, "n": 2, "max_tokens": 12, "temperature": 0}
    whole = (await http.post("/v1/completions", json=body)).json()
    stream = await streamed(http, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    alone = [
        (await http.post("/v1/completions", json={**body, "prompt": prompt, "n": 1})).json()["choices"][0]["text"]
        for prompt in prompts
    ]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == [text for text in alone for _ in range(2)]
    assert [stream.text(index) for index in range(6)] == [text for text in alone for _ in range(2)]
    assert whole["usage"]["completion_tokens"] == stream.chunks[-1]["usage"]["completion_tokens"] == 72
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))
    tokens = [cluster.router.tokenizer.encode(prompt) for prompt in prompts]
    by_ids = (await http.post("/v1/completions", json={**body, "prompt": tokens})).json()
    assert [choice["text"] for choice in by_ids["choices"]] == [choice["text"] for choice in whole["choices"]]
    await cluster.at_rest()


async def test_a_seed_gives_the_same_outputs_by_both_faces(cluster, http) -> None:
    sampling = {"temperature": 1.0, "seed": -5, "max_tokens": 8, "n": 2}
    body = {"prompt": "seeded", **sampling}
    first, second = [(await http.post("/v1/completions", json=body)).json()["choices"] for _ in range(2)]
    assert [choice["text"] for choice in first] == [choice["text"] for choice in second]


async def test_usage_comes_with_each_event_if_asked_for_and_at_the_end(cluster, http) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream_options": options}
    stream = await streamed(http, "/v1/chat/completions", body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream.chunks]
    assert counts == [1, 2, 3, 4, 5, 5]
    assert stream.chunks[-1]["choices"] == []
    assert stream.chunks[-1]["metrics"]["prefill_worker"] == "prefill-0"
    plain = await streamed(http, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in plain.chunks[:-1]] == [None] * 5
    assert plain.chunks[-1]["usage"]["total_tokens"] == plain.chunks[-1]["usage"]["prompt_tokens"] + 5
    without = await streamed(http, "/v1/chat/completions", {**body, "stream_options": None})
    assert all("usage" not in chunk for chunk in without.chunks)


async def test_the_role_comes_with_the_first_token_and_not_before(cluster, http) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    stream = await streamed(http, "/v1/chat/completions", body)
    first, *others = [choice["delta"] for choice in stream.choices]
    assert first["role"] == "assistant"
    assert "content" in first
    assert all("role" not in delta for delta in others)
    assert stream.choices[-1]["finish_reason"] == "length"


async def test_the_stages_in_metrics_add_up_to_the_total(cluster, http) -> None:
    body = {"prompt": "metrics", "max_tokens": 20}
    metrics = (await http.post("/v1/completions", json=body)).json()["metrics"]
    stages = [name for name in inference.Timeline.DESCRIPTOR.fields_by_name if name != "total"]
    assert sum(metrics[stage] for stage in stages) == pytest.approx(metrics["total"], rel=0.05, abs=1e-4)
    assert (metrics["prefill_worker"], metrics["decode_worker"]) == ("prefill-0", "decode-0")


async def test_the_cached_part_of_a_prompt_is_told(cluster, http) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 2}
    first = (await http.post("/v1/completions", json=body)).json()["usage"]
    second = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 96


async def test_an_echo_comes_before_the_output(cluster, http) -> None:
    body = {"prompt": "echo me", "max_tokens": 4, "temperature": 0}
    plain = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    echoed = (await http.post("/v1/completions", json={**body, "echo": True})).json()["choices"][0]["text"]
    stream = await streamed(http, "/v1/completions", {**body, "echo": True})
    assert echoed == stream.text() == "echo me" + plain
