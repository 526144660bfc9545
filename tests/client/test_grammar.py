"""What a caller says about an output's form is what goes out on the wire."""

from __future__ import annotations

import asyncio
import json

import pytest

from baton.client.cli import build_parser, main
from baton.client.errors import InvalidRequest
from baton.client.request import generate_request
from baton.proto import inference_pb2 as pb

SCHEMA = {"type": "object", "properties": {"été": {"type": "null"}}}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json_schema": SCHEMA}, pb.Grammar(json_schema=json.dumps(SCHEMA, ensure_ascii=False))),
        ({"json_schema": "{}"}, pb.Grammar(json_schema="{}")),
        ({"json_object": True}, pb.Grammar(json_object=True)),
        ({"regex": "a+"}, pb.Grammar(regex="a+")),
        ({"lark": 'start: "a"'}, pb.Grammar(lark='start: "a"')),
        ({"choices": ["yes", "no"]}, pb.Grammar(choices=pb.Choices(texts=["yes", "no"]))),
    ],
)
def test_a_grammar_is_sent_as_it_was_given(options, expected):
    message = generate_request("hello", None, None, {"max_tokens": 3, **options})
    assert message.sampling.grammar == expected
    assert message.sampling.max_tokens == 3


def test_no_grammar_is_sent_unasked():
    assert not generate_request("hello", None, None, {}).sampling.HasField("grammar")


def test_two_grammars_are_one_too_many():
    with pytest.raises(TypeError, match="at most one of"):
        generate_request("hello", None, None, {"regex": "a", "choices": ["a"]})


def test_what_is_no_grammar_is_named():
    for name, value in {"json_schema": {"a": object()}, "regex": 3, "choices": [1]}.items():
        with pytest.raises(InvalidRequest, match=name):
            generate_request("hello", None, None, {name: value})


async def test_the_command_takes_a_schema_its_file_or_an_expression(wire, router, tmp_path, capsys):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}')
    for words, expected in (
        (["--json-schema", str(file)], pb.Grammar(json_schema='{"type": "null"}')),
        (["--json-schema", ' {"type": "null"}'], pb.Grammar(json_schema=' {"type": "null"}')),
        (["--regex", "[0-9]"], pb.Grammar(regex="[0-9]")),
    ):
        code = await asyncio.to_thread(main, ["generate", "hello", *words, "--target", wire.target])
        assert code == 0
        assert router.requests[-1].sampling.grammar == expected
    missing = ["generate", "hello", "--json-schema", str(tmp_path / "none"), "--target", wire.target]
    assert await asyncio.to_thread(main, missing) == 1
    assert "none" in capsys.readouterr().err


def test_the_command_takes_one_of_them(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "hello", "--regex", "a", "--json-schema", "{}"])
    assert "not allowed with" in capsys.readouterr().err
