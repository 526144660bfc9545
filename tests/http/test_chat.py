"""What reaches the model's template: messages, tools, calls, arguments, and a message that is to be continued."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from paper_model import PaperRunner, write_paper_tokenizer
from small_cluster import SmallCluster
from web import client_of

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
    "{% if m.tool_call_id %} to {{ m.tool_call_id }}{% endif %}>"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}"
    "{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    "{% if thinking %}(thinking){% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def templated(tmp_path) -> AsyncIterator[SmallCluster]:
    directory = write_paper_tokenizer(Path(tmp_path) / "templated")
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    async with SmallCluster(directory, PaperRunner) as small:
        yield small


async def prompt_of(cluster: SmallCluster, **body) -> str:
    """What the model reads, which must be what /tokenize says of the same conversation."""
    async with client_of(cluster) as http:
        tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
        text = (await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        chat = await http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        assert chat.json()["usage"]["prompt_tokens"] == len(tokens)
        return text


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"messages": [USER]}, "<user>hi</user><assistant>"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            "<user>ab</user><assistant>",
        ),
        ({"messages": [USER], "tools": [TOOL]}, "[weather]<user>hi</user><assistant>"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
                ],
                "tools": [TOOL],
            },
            "[weather]<user>hi</user><assistant>weather(Köln)</assistant><tool weather to c1>rain</tool><assistant>",
        ),
        (
            {"messages": [USER], "chat_template_kwargs": {"thinking": True}},
            "<user>hi</user>(thinking)<assistant>",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "a</assistant> "}], "continue_final_message": True},
            "<user>hi</user><assistant>a</assistant> ",
        ),
        ({"messages": [{"role": "user"}]}, "<user></user><assistant>"),
    ],
    ids=["plain", "parts", "tools", "calls", "arguments", "continued", "no content"],
)
async def test_the_template_sees_what_the_client_sent(templated, body, prompt) -> None:
    assert await prompt_of(templated, **body) == prompt


async def test_no_tools_are_shown_when_none_may_be_chosen(templated) -> None:
    async with client_of(templated) as http:
        body = {"messages": [USER], "tools": [TOOL], "max_tokens": 1}
        used = [
            (await http.post("/v1/chat/completions", json={**body, "tool_choice": choice})).json()["usage"]
            for choice in ("auto", "none")
        ]
    assert used[0]["prompt_tokens"] - used[1]["prompt_tokens"] == len("[weather]")


async def test_a_message_that_the_template_hides_cannot_be_continued(cluster, http) -> None:
    """The paper model's template shows all; one that does not must say so instead of continuing something else."""
    import dataclasses

    from baton.router.tokenizer import ChatMessage, ChatTemplateError, Conversation

    tokenizer = cluster.router.tokenizer
    conversation = Conversation([ChatMessage("user", "hi")], continues=True)
    assert tokenizer.render(conversation) == "user: hi"
    hidden = dataclasses.replace(conversation, messages=[ChatMessage("user", "hi")])
    tokenizer._template = tokenizer._template.environment.from_string("nothing")
    with pytest.raises(ChatTemplateError, match="hides"):
        tokenizer.render(hidden)


async def test_tool_calls_of_strange_shapes_are_no_bug(templated) -> None:
    calls = [
        {},
        {"function": None},
        {"function": {"name": "f", "arguments": "{"}},
        {"function": {"name": "f", "arguments": "[" * 900}},
        {"function": {"name": "f", "arguments": 3}},
    ]
    async with client_of(templated) as http:
        for call in calls:
            messages = [USER, {"role": "assistant", "tool_calls": [call]}]
            response = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert response.status_code in (200, 400)
        for name in ("self", "0", "", "a b", "namespace", "raise_exception", "__class__"):
            body = {"messages": [USER], "chat_template_kwargs": {name: 3}, "max_tokens": 1}
            assert (await http.post("/v1/chat/completions", json=body)).status_code in (200, 400)
