"""The openai SDK against a server that runs: what programs do with it.

Owns: the calls and what must come back. Refuses to know: the server, beyond its address in BASE_URL.

    BASE_URL=http://127.0.0.1:8000/v1 python tests/clients/openai_sdk.py
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable

import jsonschema
import openai
import pytest
from openai import OpenAI

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def models(client: OpenAI, model: str) -> None:
    card = client.models.retrieve(model)
    assert card.id == model
    assert card.model_dump()["max_model_len"] > 0


def chat(client: OpenAI, model: str) -> None:
    done = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_completion_tokens=16)
    assert "Paris" in done.choices[0].message.content
    assert done.choices[0].finish_reason in ("stop", "length")
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens >= 0


def streamed_and_whole_chats_are_equal(client: OpenAI, model: str) -> None:
    asked = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**asked)
    events = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def completion_with_stop_and_seed(client: OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0.8, "seed": 7}
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    assert first.choices[0].text == second.choices[0].text
    assert first.usage.completion_tokens <= 12
    stopped = client.completions.create(model=model, prompt="One, two, three,", max_tokens=12, temperature=0, stop=",")
    assert "," not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


def log_probabilities(client: OpenAI, model: str) -> None:
    done = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    entries = done.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == done.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert math.exp(entry.logprob) <= 1.0001
    old = client.completions.create(model=model, prompt="One, two,", max_tokens=4, temperature=0, logprobs=2)
    logprobs = old.choices[0].logprobs
    assert "".join(logprobs.tokens) == old.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 4


def several_outputs(client: OpenAI, model: str) -> None:
    done = client.chat.completions.create(model=model, messages=QUESTION, n=3, max_tokens=8, temperature=1.2, seed=1)
    assert sorted(choice.index for choice in done.choices) == [0, 1, 2]
    assert len({choice.message.content for choice in done.choices}) > 1


def output_that_follows_a_schema(client: OpenAI, model: str) -> None:
    done = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name a city and its population as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
        max_tokens=80,
        temperature=0,
    )
    assert done.choices[0].finish_reason == "stop", done.choices[0]
    jsonschema.validate(json.loads(done.choices[0].message.content), CITY)


def errors_are_those_of_the_api(client: OpenAI, model: str) -> None:
    for wrong, error in (
        ({"messages": [], "model": model}, openai.BadRequestError),
        ({"messages": QUESTION, "model": model, "temperature": -1}, openai.BadRequestError),
        ({"messages": QUESTION, "model": "no-such-model"}, openai.NotFoundError),
    ):
        with pytest.raises(error) as raised:
            client.chat.completions.create(**wrong)
        assert raised.value.body["message"], raised.value.body


def a_closed_stream_ends_its_request(client: OpenAI, model: str) -> None:
    stream = client.completions.create(model=model, prompt="Once", max_tokens=2000, stream=True)
    next(iter(stream))
    stream.close()


CHECKS: tuple[Callable[[OpenAI, str], None], ...] = (
    models,
    chat,
    streamed_and_whole_chats_are_equal,
    completion_with_stop_and_seed,
    log_probabilities,
    several_outputs,
    output_that_follows_a_schema,
    errors_are_those_of_the_api,
    a_closed_stream_ends_its_request,
)


def main() -> None:
    client = OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0, timeout=120.0)
    model = client.models.list().data[0].id
    for check in CHECKS:
        check(client, model)
        print("ok", check.__name__.replace("_", " "), flush=True)


if __name__ == "__main__":
    main()
