"""A trace file replays as it was recorded, and a bad line is refused before anything runs, with its place."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.capacity.prompts import Prompts, block_names
from baton.capacity.trace import Trace, TraceError

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [0, 5]},
    {"timestamp": 5000, "input_length": 512, "output_length": 1, "hash_ids": [0]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:52.6805900,879,55
"""


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    return write(tmp_path / "conversation.jsonl", *map(json.dumps, MOONCAKE))


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_mooncake_file_replays_with_its_times_and_lengths(mooncake: Path) -> None:
    trace = Trace.open(mooncake)
    assert (trace.num_requests, trace.span_s, trace.rate) == (3, 4.0, 0.5)
    found = list(trace.arrivals())
    assert [arrival.time_s for arrival in found] == [0.0, 0.0, 4.0]
    assert [(arrival.prompt_tokens, arrival.output_tokens) for arrival in found] == [(1100, 7), (600, 3), (512, 1)]


def test_equal_block_ids_are_equal_pieces_of_a_prompt(mooncake: Path) -> None:
    first, second, third = (list(arrival.pieces) for arrival in Trace.open(mooncake).arrivals())
    assert first[0] == second[0] == third[0]
    assert first[1] != second[1]
    assert [piece.num_tokens for piece in first] == [512, 512, 76]


def test_replayed_requests_share_kv_as_far_as_their_ids_are_the_same(mooncake: Path) -> None:
    prompts = Prompts(block_size=16)
    first, second, third = (block_names(prompts.token_ids(arrival), 16) for arrival in Trace.open(mooncake).arrivals())
    common = [sum(a == b for a, b in zip(first, other, strict=False)) for other in (second, third)]
    assert common == [512 // 16, 512 // 16 - 1]  # of the last block of a prompt, the last token is its own
    assert len({*first, *second, *third}) == len(first) + len(second) + len(third) - 32 - 31


def test_scaled_prompts_keep_what_they_share(mooncake: Path) -> None:
    first, second, _ = Trace.open(mooncake).arrivals(scale_prompts=0.1, scale_outputs=0.5)
    assert (first.prompt_tokens, first.output_tokens) == (110, 4)
    assert next(first.pieces) == next(second.pieces)
    assert sum(piece.num_tokens for piece in first.pieces) == 110


def test_an_azure_file_replays_from_time_zero(tmp_path: Path) -> None:
    trace = Trace.open(write(tmp_path / "conv.csv", *AZURE.splitlines()))
    found = list(trace.arrivals())
    assert [arrival.time_s for arrival in found] == [0.0, pytest.approx(4.314579), 6.0]
    assert [(arrival.prompt_tokens, arrival.output_tokens) for arrival in found] == [(374, 44), (396, 109), (879, 55)]
    assert len({arrival.session for arrival in found}) == 3


@pytest.mark.parametrize("rate", [0.25, 2.0])
def test_a_rate_rescales_time_and_nothing_else(mooncake: Path, rate: float) -> None:
    trace = Trace.open(mooncake)
    before, after = list(trace.arrivals()), list(trace.arrivals(rate))
    assert [a.time_s * 0.5 / rate for a in before] == [a.time_s for a in after]
    assert [a.blocks for a in before] == [a.blocks for a in after]


def test_an_infinite_rate_sends_all_at_once(mooncake: Path) -> None:
    assert {arrival.time_s for arrival in Trace.open(mooncake).arrivals(float("inf"))} == {0.0}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"timestamp": None}, r"timestamp is missing, must be milliseconds, at least 0"),
        ({"timestamp": -1}, r"timestamp is -1, must be"),
        ({"timestamp": "later"}, r"timestamp is 'later', must be"),
        ({"timestamp": 999}, r"timestamp is before that of the line above it"),
        ({"input_length": 0}, r"input_length is 0, must be a whole number of tokens from 1 to"),
        ({"input_length": 12.5}, r"input_length is 12.5, must be"),
        ({"input_length": True}, r"input_length is True, must be"),
        ({"output_length": -3}, r"output_length is -3, must be"),
        ({"hash_ids": "abc"}, r"hash_ids is 'abc', must be a list of whole numbers"),
        ({"hash_ids": [1, 2, 3]}, r"hash_ids are 3, but an input_length of 600 has 2 blocks"),
    ],
)
def test_a_bad_mooncake_line_is_refused_with_file_line_and_field(
    change: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    bad = {key: value for key, value in {**MOONCAKE[1], **change}.items() if value is not None}
    path = write(tmp_path / "bad.jsonl", json.dumps(MOONCAKE[0]), json.dumps(bad))
    with pytest.raises(TraceError, match=rf"bad\.jsonl:2: {complaint}"):
        Trace.open(path)


@pytest.mark.parametrize("text", ["{", "[]", "nonsense", '"text"', "\x00"])
def test_a_line_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"bad\.jsonl:2: is"):
        Trace.open(write(tmp_path / "bad.jsonl", json.dumps(MOONCAKE[0]), text))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("yesterday,1,2", "TIMESTAMP is 'yesterday', must be a date and time"),
        ("2023-11-16 18:15:40,1,2", "TIMESTAMP is before"),
        ("2023-11-16 18:15:47,many,2", "ContextTokens is 'many', must be"),
        ("2023-11-16 18:15:47,1,0", "GeneratedTokens is 0, must be"),
        ("2023-11-16 18:15:47,1", "has 2 columns, must have 3"),
    ],
)
def test_a_bad_azure_line_is_refused_with_file_line_and_field(line: str, complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.csv", *AZURE.splitlines()[:2], line)
    with pytest.raises(TraceError, match=rf"bad\.csv:3: {complaint}"):
        Trace.open(path)


@pytest.mark.parametrize("content", ["", "\n\n", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_a_file_without_requests_or_columns_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TraceError, match=r"empty\.csv"):
        Trace.open(path)


@given(data=st.binary(max_size=300), name=st.sampled_from(["x.jsonl", "x.csv"]))
def test_any_bytes_are_a_trace_or_are_refused(data: bytes, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    with suppress(TraceError):
        assert Trace.open(path).num_requests > 0
