"""Every refusal has a status, the OpenAI form, and the name of the field that is at fault."""

from __future__ import annotations

import json

import pytest
from paper_model import PaperRunner
from small_cluster import SmallCluster
from web import client_of, streamed

from baton.router.config import RouterSettings

TURN = {"role": "user", "content": "hi"}
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETION, {}, "prompt"),
        (COMPLETION, {"prompt": None}, "prompt"),
        (COMPLETION, {"prompt": ""}, "prompt"),
        (COMPLETION, {"prompt": []}, "prompt"),
        (COMPLETION, {"prompt": {}}, "prompt"),
        (COMPLETION, {"prompt": [[]]}, "prompt[0]"),
        (COMPLETION, {"prompt": ["a", 1]}, "prompt[1]"),
        (COMPLETION, {"prompt": [1, True]}, "prompt[1]"),
        (COMPLETION, {"prompt": [1, 10**6]}, "prompt[1]"),
        (COMPLETION, {"prompt": [[1], [2, 10**6]]}, "prompt[1][1]"),
        (COMPLETION, {"prompt": [10**30]}, "prompt[0]"),
        (COMPLETION, {"prompt": "x" * 5000}, "prompt"),
        (COMPLETION, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETION, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        (COMPLETION, {"prompt": "x", "max_tokens": 5000}, "max_tokens"),
        (COMPLETION, {"prompt": "x", "max_tokens": 2**31}, "max_tokens"),
        (COMPLETION, {"prompt": "x", "max_tokens": True}, "max_tokens"),
        (COMPLETION, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        (COMPLETION, {"prompt": "x", "max_tokens": 5.5}, "max_tokens"),
        (COMPLETION, {"prompt": "x", "temperature": -1}, "temperature"),
        (COMPLETION, {"prompt": "x", "temperature": 1e39}, "temperature"),
        (COMPLETION, {"prompt": "x", "top_p": 0}, "top_p"),
        (COMPLETION, {"prompt": "x", "top_k": -2}, "top_k"),
        (COMPLETION, {"prompt": "x", "n": 0}, "n"),
        (COMPLETION, {"prompt": "x", "n": 17}, "n"),
        (COMPLETION, {"prompt": "x", "n": 2, "best_of": 3}, "best_of"),
        (COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETION, {"prompt": "x", "seed": 2**63}, "seed"),
        (COMPLETION, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (COMPLETION, {"prompt": "x", "logprobs": True}, "logprobs"),
        (COMPLETION, {"prompt": "x", "stop": [""]}, "stop[0]"),
        (COMPLETION, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        (COMPLETION, {"prompt": "x", "stop": 3}, "stop"),
        (COMPLETION, {"prompt": "x", "stop_token_ids": [300]}, "stop_token_ids[0]"),
        (COMPLETION, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a"),
        (COMPLETION, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1"),
        (COMPLETION, {"prompt": "x", "logit_bias": {"301": 1}}, "logit_bias[301]"),
        (COMPLETION, {"prompt": "x", "min_tokens": 17}, "min_tokens"),
        (COMPLETION, {"prompt": "x", "cache_salt": "a b"}, "cache_salt"),
        (COMPLETION, {"prompt": "x", "session_id": "a b"}, "session_id"),
        (COMPLETION, {"prompt": "x", "stream": "yes"}, "stream"),
        (COMPLETION, {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETION, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETION, {"prompt": "x" * 5000, "add_special_tokens": False}, "prompt"),
        (COMPLETION, {"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type"),
        (COMPLETION, {"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
        (COMPLETION, {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
        (COMPLETION, {"prompt": "x", "guided_regex": "a", "guided_json": {}}, "guided_json"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [3]}, "messages[0]"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [TURN, {"role": "boss", "content": "x"}]}, "messages[1].role"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        (CHAT, {"messages": [TURN], "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": [TURN], "max_tokens": 5000}, "max_tokens"),
        (CHAT, {"messages": [TURN], "max_completion_tokens": 5000}, "max_completion_tokens"),
        (CHAT, {"messages": [TURN], "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [TURN], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": [TURN], "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"messages": [TURN], "tools": ["x"]}, "tools[0]"),
        (CHAT, {"messages": [TURN], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (CHAT, {"messages": [TURN], "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [TURN]}, None),
        ("/tokenize", {"prompt": "x" * 10**5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "boss"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 5000}, "tokens"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
async def test_a_bad_field_is_named(http, path, body, param) -> None:
    error = error_of(await http.post(path, json=body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    if param is not None:
        assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b"null", "not an object"),
        (b'"prompt"', "not an object"),
        (b'{"prompt": "x", "temperature": NaN}', "not JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', "not JSON"),
        (b'{"prompt": "\\ud800"}', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "not JSON"),
        (b'{"user": ' + b"[" * 1000 + b"]" * 1000 + b"}", "not JSON"),
        (b'{"prompt": "x", "n": ' + b"9" * 10_000 + b"}", ""),
        (b'{"prompt": "x", "temperature": 1e999}', ""),
        (b'{"prompt": "x", "structured_outputs": {"json": {"maximum": 1e999}}}', ""),
    ],
    ids=lambda value: repr(value[:40]),
)
async def test_what_is_no_json_object_is_refused(http, body, says) -> None:
    response = await http.post(COMPLETION, content=body, headers={"Content-Type": "application/json"})
    assert says in error_of(response, 400)["message"]


async def test_of_a_member_that_comes_twice_the_last_counts(http) -> None:
    body = b'{"prompt": 3, "prompt": "x", "max_tokens": 2}'
    response = await http.post(COMPLETION, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200


async def test_unknown_fields_and_nulls_mean_nothing(http) -> None:
    body = {"prompt": "x", "max_tokens": 2, "user": "me", "invented": {"a": [1]}, "stop": None, "logprobs": None}
    body |= dict.fromkeys(("temperature", "top_p", "n", "seed", "stream", "stream_options", "logit_bias"))
    assert (await http.post(COMPLETION, json=body)).status_code == 200


async def test_zero_bytes_in_texts_are_text(http) -> None:
    body = {"prompt": "a\0b", "max_tokens": 2, "stop": ["\0\0"], "echo": True}
    response = await http.post(COMPLETION, json=body)
    assert response.json()["choices"][0]["text"].startswith("a\0b")


async def test_unknown_routes_methods_and_types_have_the_same_form(http) -> None:
    assert error_of(await http.get("/v2/nothing"), 404)["code"] == "not_found"
    assert error_of(await http.get(COMPLETION), 405)["code"] == "method_not_allowed"
    assert error_of(await http.put(CHAT, json={}), 405)["code"] == "method_not_allowed"
    response = await http.post(COMPLETION, data={"prompt": "x"})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


async def test_only_the_served_model_is_known_under_both_its_names(paper_dir) -> None:
    settings = RouterSettings(port=0, served_model_name="stage/name")
    async with SmallCluster(paper_dir, PaperRunner, router_settings=settings) as cluster, client_of(cluster) as http:
        for name in ("stage/name", "paper", None, ""):
            response = await http.post(COMPLETION, json={"model": name, "prompt": "x", "max_tokens": 1})
            assert response.json()["model"] == "stage/name"
        for path in (COMPLETION, "/tokenize"):
            error = error_of(await http.post(path, json={"model": "other", "prompt": "x"}), 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert (model["id"], model["root"]) == ("stage/name", "paper")
        assert (await http.get("/v1/models/stage/name")).json() == model
        error_of(await http.get("/v1/models/stage"), 404)


async def test_a_request_id_is_taken_if_it_is_a_name_and_told_in_any_case(http) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for name in ("mine-1", "a" * 120):
        response = await http.post(COMPLETION, json=body, headers={"X-Request-Id": name})
        assert response.headers["x-request-id"] == name
        assert response.json()["id"] == f"cmpl-{name}"
    for name in ("", "a b", "a" * 500, "ü"):
        response = await http.post(COMPLETION, json=body, headers={"X-Request-Id": name.encode()})
        assert response.headers["x-request-id"] not in ("", name)
        assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]


async def test_a_request_id_that_is_in_use_is_a_conflict(paper_dir) -> None:
    slow = lambda: PaperRunner(step_s=0.02)  # noqa: E731
    async with SmallCluster(paper_dir, slow) as cluster, client_of(cluster) as http:
        body, headers = {"prompt": "x", "max_tokens": 500, "stream": True}, {"X-Request-Id": "twice"}
        async with http.stream("POST", COMPLETION, json=body, headers=headers) as response:
            assert response.status_code == 200
            again = await http.post(COMPLETION, json=body, headers=headers)
            assert error_of(again, 409)["code"] == "request_in_progress"
        await cluster.at_rest()


async def test_a_deadline_is_408_before_the_first_token_and_an_event_after_it(paper_dir) -> None:
    slow = lambda: PaperRunner(step_s=0.05)  # noqa: E731
    async with SmallCluster(paper_dir, slow) as cluster, client_of(cluster) as http:
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
        http.headers["X-Request-Timeout"] = "0.5"
        assert error_of(await http.post(COMPLETION, json=body), 408)["type"] == "timeout_error"
        stream = await streamed(http, COMPLETION, body)
        assert stream.chunks[-1]["error"]["code"] == "deadline_exceeded"
        assert stream.choices
        http.headers["X-Request-Timeout"] = "0.001"
        error_of(await http.post(COMPLETION, json={**body, "stream": True}), 408)
        for wrong in ("soon", "-1", "nan", "0"):
            http.headers["X-Request-Timeout"] = wrong
            assert error_of(await http.post(COMPLETION, json=body), 400)["param"] == "X-Request-Timeout"
        await cluster.at_rest()


async def test_without_a_worker_it_is_503(paper_dir) -> None:
    settings = RouterSettings(port=0, no_worker_grace_s=0.1)
    async with SmallCluster(paper_dir, PaperRunner, router_settings=settings) as cluster, client_of(cluster) as http:
        await cluster.remove("decode-0")
        for stream in (False, True):
            response = await http.post(COMPLETION, json={"prompt": "x", "stream": stream})
            assert error_of(response, 503)["code"] == "service_unavailable"
            assert response.headers["retry-after"]


async def test_a_bug_is_500_with_the_requests_id(paper_dir, monkeypatch) -> None:
    async with SmallCluster(paper_dir, PaperRunner) as cluster, client_of(cluster) as http:
        monkeypatch.setattr(cluster.router, "limits", lambda: 1 / 0)
        response = await http.post(COMPLETION, json={"prompt": "x"}, headers={"X-Request-Id": "find-me"})
        assert "find-me" in error_of(response, 500)["message"]
