"""Random bodies, right in parts and wrong in others: an answer of the documented kinds, and nothing left behind."""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.router.http import schema

DOCUMENTED = {200, 400, 404, 408, 409, 413, 415, 429, 503}
PATHS = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatCompletionRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 16, 300, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, 10**40, 0.5, 1e39, -1e308]),
    st.sampled_from(["", "x", "\0", "\ud800", "é" * 50, "a" * 2000, "paper", "none", "json_schema", "text", "user"]),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["type", "role", "content", "schema", "json", "regex", "1", "-1", "a", "include_usage"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
GOOD = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}


@st.composite
def requests(draw) -> tuple[str, bytes]:
    path = draw(st.sampled_from(list(PATHS)))
    names = [field.alias or name for name, field in PATHS[path].model_fields.items()]
    body = {**GOOD[path], **draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=4))}
    if path.startswith("/v1") and body.get("max_tokens") != 0:
        body.setdefault("max_tokens", 2)
    data = json.dumps(body).encode()
    if draw(st.integers(0, 5)) == 0:
        cut, junk = draw(st.integers(0, len(data))), draw(st.binary(max_size=6))
        data = data[:cut] + junk + data[cut + draw(st.integers(0, 3)) :]
    return path, data


async def test_no_body_whatever_makes_a_500_or_leaves_anything_behind(cluster, http) -> None:
    loop = asyncio.get_running_loop()
    statuses: list[int] = []

    async def send(path: str, data: bytes) -> None:
        headers = {"Content-Type": "application/json", "X-Request-Timeout": "2"}
        response = await http.post(path, content=data, headers=headers)
        statuses.append(response.status_code)
        assert response.status_code in DOCUMENTED, (path, data, response.text)
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(request=requests())
    def check(request: tuple[str, bytes]) -> None:
        asyncio.run_coroutine_threadsafe(send(*request), loop).result(30)

    await asyncio.to_thread(check)
    assert {200, 400} <= set(statuses), "the requests are all of one kind"
    await cluster.at_rest()
    assert not cluster.router.num_running


async def test_the_apis_description_names_every_field_and_status(http) -> None:
    document = (await http.get("/openapi.json")).json()
    for path, model in PATHS.items():
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        described = document["components"]["schemas"][reference.rpartition("/")[2]]
        assert set(described["properties"]) == {field.alias or name for name, field in model.model_fields.items()}
        assert {"200", "400", "401", "404", "408", "413", "429", "500", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
