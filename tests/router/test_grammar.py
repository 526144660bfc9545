"""Grammars are translated, bounded and checked at the door; nothing that a client writes hangs or breaks a process."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice, product
from string import ascii_lowercase

import pytest
from constrained import CASES
from llguidance import LLMatcher
from paper_model import write_paper_tokenizer

from baton.proto import inference_pb2 as pb
from baton.router.admission import Admitted, ModelLimits, admit
from baton.router.grammar import (
    MAX_NESTED_REPEATS,
    MAX_RULES_BYTES,
    MAX_SCHEMA_BYTES,
    BadGrammar,
    nested_repeats,
    translate,
)
from baton.router.tokenizer import Tokenizer

LIMITS = ModelLimits(vocab_size=300, max_model_len=500, eos_token_ids=(299,))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_paper_tokenizer(tmp_path_factory.mktemp("paper")))


def asked(grammar: pb.Grammar, tokenizer: Tokenizer, limits: ModelLimits = LIMITS, **sampling):
    message = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(grammar=grammar, **sampling))
    return admit(message, limits, tokenizer)


def faults(*arguments, **options) -> dict[str, str]:
    """The violations' descriptions by field."""
    answer = asked(*arguments, **options)
    assert isinstance(answer, list), answer
    return {violation.field: violation.description for violation in answer}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_admitted_is_a_grammar_that_the_library_takes(case, tokenizer):
    admitted = asked(case.grammar, tokenizer)
    assert isinstance(admitted, Admitted)
    assert LLMatcher.validate_grammar(admitted.sampling.grammar) == ""
    assert 299 in admitted.sampling.stop_token_ids


def test_the_order_of_properties_is_the_clients(tokenizer):
    properties = {name: {"type": "null"} for name in "zyxabc"}
    grammar = asked(pb.Grammar(json_schema=json.dumps({"properties": properties})), tokenizer).sampling.grammar
    assert list(json.loads(grammar)["grammars"][0]["json_schema"]["properties"]) == list("zyxabc")


def test_a_schema_decides_about_blanks_itself(tokenizer):
    schema = '{"x-guidance": {"whitespace_flexible": false}, "type": "object"}'
    options = json.loads(translate(pb.Grammar(json_schema=schema)))["grammars"][0]["json_schema"]["x-guidance"]
    assert options["whitespace_flexible"] is False


WRONG = {
    "json_schema": [
        "", "nope", "[]", "true", '{"a": NaN}', '{"type": "object"} x', '{"type": "colour"}', '{"not": {}}',
        '{"a":' * 9000,
        '{"$ref": "http://127.0.0.1:1/x.json"}', '{"$ref": "file:///etc/passwd"}', '{"$ref": "#/nowhere"}',
        '{"type": "string", "format": "no-such"}', '{"items": ' * 300 + "{}" + "}" * 300, " " * MAX_SCHEMA_BYTES + "{}",
    ],
    "regex": ["", "(", "a{2,1}", "[z-a]", "(a|" * 3000 + "a" + ")" * 3000, "a" * (MAX_RULES_BYTES + 1)],
    "lark": ["", "start: (", "start: nothing", "start: " + "(" * 7000 + "a" + ")" * 7000, "#" * (MAX_RULES_BYTES + 1)],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in WRONG.items() for text in texts])
def test_a_grammar_that_cannot_be_followed_is_named_with_its_fault(kind, text, tokenizer):
    found = faults(pb.Grammar(**{kind: text}), tokenizer)
    assert list(found) == [f"sampling.grammar.{kind}"]
    assert len(found[f"sampling.grammar.{kind}"]) < 500


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (pb.Grammar(), "sampling.grammar"),
        (pb.Grammar(json_object=False), "sampling.grammar.json_object"),
        (pb.Grammar(choices=pb.Choices()), "sampling.grammar.choices"),
        (pb.Grammar(choices=pb.Choices(texts=["x" * 40000, "y" * 40000])), "sampling.grammar.choices"),
    ],
)
def test_an_empty_grammar_is_refused(grammar, field, tokenizer):
    assert list(faults(grammar, tokenizer)) == [field]


def test_nothing_may_keep_an_output_from_ending_with_its_grammar(tokenizer):
    grammar = pb.Grammar(regex="a+")
    assert list(faults(grammar, tokenizer, ignore_eos=True)) == ["sampling.ignore_eos"]
    assert list(faults(grammar, tokenizer, min_tokens=3)) == ["sampling.min_tokens"]
    endless = ModelLimits(vocab_size=300, max_model_len=500, eos_token_ids=())
    assert list(faults(grammar, tokenizer, endless)) == ["sampling.grammar"]


def _chain(end: str, size: int) -> str:
    """Rules that lead from one to the next, as many as a size allows: the library follows them by recursion."""
    names = [
        "".join(letters) for length in (1, 2, 3) for letters in islice(product(ascii_lowercase, repeat=length), 6000)
    ]
    names = names if end.islower() else [name.upper() for name in names]
    text, number = f"start: {names[0]}", 0
    while len(text) < size - 16:
        text += f"\n{names[number]}:{names[number + 1]}"
        number += 1
    return f'{text}\n{names[number]}:"{end}"'


def _deep_schema(size: int) -> str:
    """Arrays of arrays, through references because JSON itself may not be nested so deep."""
    inner, number = "{}", size // 1000
    parts = [f'"d{i}":' + '{"items":' * 100 + f'{{"$ref":"#/$defs/d{i + 1}"}}' + "}" * 100 for i in range(number)]
    return f'{{"$defs":{{{",".join(parts)},"d{number}":{inner}}},"$ref":"#/$defs/d0"}}'


def _any_of_four(number: int) -> dict:
    return {"anyOf": [{"properties": {f"k{number}{j}": {}}} for j in range(4)]}


HOSTILE = [
    pb.Grammar(lark=_chain("x", MAX_RULES_BYTES)),
    pb.Grammar(lark=_chain("X", MAX_RULES_BYTES)),
    pb.Grammar(lark='start: e\ne: e e | e e e | "a" | "b"'),
    pb.Grammar(lark="start: start"),
    pb.Grammar(lark="start: b{1000}\nb: c{1000}\nc: d{1000}\nd: /x/ | /y/"),
    pb.Grammar(regex="((((a{1,100}){1,100}){1,100}){1,100})"),
    pb.Grammar(regex="(a|b)*a(a|b){30}"),
    pb.Grammar(regex="(.*a.{30}){10}"),
    pb.Grammar(regex="(ab|cd)?" * (MAX_RULES_BYTES // 9)),
    pb.Grammar(json_schema=_deep_schema(MAX_SCHEMA_BYTES - 2000)),
    pb.Grammar(json_schema=json.dumps({"allOf": [_any_of_four(i) for i in range(6)]})),
    pb.Grammar(json_schema='{"type": "string", "maxLength": 1000000000}'),
    pb.Grammar(json_schema='{"type": "array", "minItems": 1000000, "items": {"type": "integer"}}'),
    pb.Grammar(json_schema='{"$ref": "#"}'),
    pb.Grammar(json_schema='{"type": "number", "multipleOf": 0.0001, "minimum": -12345.678}'),
]  # fmt: skip

_FOLLOW = """
import sys, tempfile
from pathlib import Path
sys.path.insert(0, "tests")
from paper_model import write_paper_tokenizer
from baton.engine.grammar import Constrained, Grammars
from baton.proto import inference_pb2 as pb
from baton.router.grammar import translate
result = translate(pb.Grammar.FromString(sys.stdin.buffer.read()))
if isinstance(result, str):
    grammars = Grammars(write_paper_tokenizer(Path(tempfile.mkdtemp())), 300, (299,), 1)
    output = []
    for _ in range(20):
        limits = grammars.begin([Constrained(0, "s", result, output, 0, len(output), (299,))]).result(60)
        if limits.mask is None:
            break
        words = limits.mask.bits_RW[0].tolist()
        output.append(next(t for t in range(300) if words[t // 32] >> t % 32 & 1))
print("alive")
"""


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_grammar_ends_neither_the_router_nor_a_worker(number):
    """In a process of its own: some of these overflow an ordinary stack, and no exception tells of that."""
    done = subprocess.run(
        [sys.executable, "-c", _FOLLOW], input=HOSTILE[number].SerializeToString(), capture_output=True, timeout=200
    )
    assert done.stdout == b"alive\n", (done.returncode, done.stderr[-500:])


def test_the_same_grammar_is_checked_once(monkeypatch):
    first = translate(pb.Grammar(regex="never[ ]asked[ ]before"))
    monkeypatch.setattr("baton.router.grammar._library", lambda: pytest.fail("it was checked again"))
    assert translate(pb.Grammar(regex="never[ ]asked[ ]before")) == first
    assert not isinstance(first, BadGrammar)


@pytest.mark.parametrize(
    ("expression", "repeats"),
    [
        ("x{1000}", 1),
        ("x{1000}y{1000}", 1),
        ("(x{1000}){1000}", 1_000_000),
        ("(?:a|b(c{10,20}|d){30}){2,}", 1200),
        (r"(x{9}\)){9}", 81),
        ("([){5}(]{7}y){3}", 21),
        ("([]){5}]z{2}){3}", 6),
        (r"(\{5}){5}", 1),
        ("(x{,7}){5}", 35),
        ("x{2}{3}{4}", 24),
        ("((((x{9}){9}){9}){9}){9}", 59049),
        ("a{b}{", 1),
    ],
)
def test_counts_within_counts_are_multiplied(expression: str, repeats: int) -> None:
    assert nested_repeats(expression) == repeats


@pytest.mark.parametrize(
    "grammar",
    [
        pb.Grammar(regex="(x{1000}){1000}"),
        pb.Grammar(lark='start: /(x{1000}){1000}/ "!"'),
        pb.Grammar(json_schema='{"properties": {"a": {"anyOf": [{"type": "string", "pattern": "(x{200}){200}"}]}}}'),
    ],
    ids=lambda grammar: grammar.WhichOneof("kind"),
)
def test_an_expression_that_would_hold_a_worker_up_is_refused(grammar: pb.Grammar) -> None:
    outcome = translate(grammar)
    assert isinstance(outcome, BadGrammar)
    assert "repetitions within one another" in outcome.value
    assert f"at most {MAX_NESTED_REPEATS}" in outcome.bound
