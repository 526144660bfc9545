"""Every field of a request has its bounds, every fault is named, and what is admitted is complete."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from baton.proto import inference_pb2 as pb
from baton.proto.messages import LogitBias, Sampling
from baton.router.admission import Admitted, FieldViolation, ModelLimits, NotFound, Slo, admit
from baton.router.tokenizer import Tokenizer

TEMPLATE = """{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\
{{ m.role }}: {{ m.content }}
{% endfor %}"""
LIMITS = ModelLimits(vocab_size=300, max_model_len=100, eos_token_ids=(2, 3))
WRONG_FLOATS = [math.nan, math.inf, -math.inf]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte, numbered by its place in the alphabet."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Tokenizer(folder)


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"text": "hello"} | fields))  # type: ignore[arg-type]


def sampled(**fields: object) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]


def admitted(message: pb.GenerateRequest, tokenizer: Tokenizer, limits: ModelLimits = LIMITS) -> Admitted:
    answer = admit(message, limits, tokenizer, mint_seed=lambda: 7, mint_request_id=lambda: "minted")
    assert isinstance(answer, Admitted), answer
    return answer


def refused(message: pb.GenerateRequest, tokenizer: Tokenizer, limits: ModelLimits = LIMITS) -> list[FieldViolation]:
    answer = admit(message, limits, tokenizer)
    assert isinstance(answer, list), answer
    return answer


def fields(message: pb.GenerateRequest, tokenizer: Tokenizer, limits: ModelLimits = LIMITS) -> list[str]:
    return [violation.field for violation in refused(message, tokenizer, limits)]


def test_a_bare_prompt_gets_every_default(tokenizer: Tokenizer) -> None:
    prompt = tuple(tokenizer.encode("hello"))
    assert admitted(request(), tokenizer) == Admitted(
        request_id="minted",
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=100 - len(prompt), stop_token_ids=(2, 3), seed=7),
    )


def test_everything_that_was_said_arrives(tokenizer: Tokenizer) -> None:
    message = pb.GenerateRequest(
        request_id="req/1:a.b_c-d",
        token_ids=pb.TokenIds(ids=[5, 6]),
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=-1,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            max_tokens=10,
            min_tokens=10,
            stop=["b", "a", "b"],
            stop_token_ids=[9, 8],
            ignore_eos=True,
            seed=-5,
            logprobs=0,
            prompt_logprobs=20,
            logit_bias={4: -100, 1: 100},
            n=1,
        ),
        priority=-3,
        slo=pb.Slo(ttft_ms=250),
        session_id="s",
        cache_salt="c",
        resume_token_ids=[7],
    )
    assert admitted(message, tokenizer) == Admitted(
        request_id="req/1:a.b_c-d",
        prompt_token_ids=(5, 6),
        sampling=Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=0,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            max_tokens=10,
            min_tokens=10,
            stop_token_ids=(8, 9),
            seed=-5,
            logprobs=0,
            prompt_logprobs=20,
            logit_bias=(LogitBias(1, 100), LogitBias(4, -100)),
        ),
        stop=("b", "a"),
        n=1,
        priority=-3,
        resume_token_ids=(7,),
        cache_salt="c",
        session_id="s",
        slo=Slo(ttft_ms=250),
    )


def test_each_of_several_outputs_has_the_next_seed_within_64_bits(tokenizer: Tokenizer) -> None:
    answer = admitted(sampled(n=3, seed=2**63 - 2), tokenizer)
    assert [answer.sampling_of(index).seed for index in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_minted_seeds_and_ids_differ_between_requests(tokenizer: Tokenizer) -> None:
    answers = [admit(request(), LIMITS, tokenizer) for _ in range(3)]
    assert len({(a.request_id, a.sampling.seed) for a in answers if isinstance(a, Admitted)}) == 3


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 300])), "token_ids.ids[1]"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "token_ids.ids[0]"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="boss")])), "chat.messages[0].role"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="tool")])), "chat"),
        (request(request_id="x" * 129), "request_id"),
        (request(request_id="new\nline"), "request_id"),
        (request(session_id="x" * 129), "session_id"),
        (request(cache_salt="a b"), "cache_salt"),
        (request(slo=pb.Slo(ttft_ms=0)), "slo.ttft_ms"),
        (request(slo=pb.Slo(tpot_ms=-1)), "slo.tpot_ms"),
        (request(resume_token_ids=[300]), "resume_token_ids[0]"),
        (request(resume_token_ids=[1] * 96), "resume_token_ids"),
        (request(resume_token_ids=[1], sampling=pb.SamplingParams(n=2)), "resume_token_ids"),
        (sampled(temperature=-0.5), "sampling.temperature"),
        (sampled(top_p=0), "sampling.top_p"),
        (sampled(top_p=1.5), "sampling.top_p"),
        (sampled(top_k=-2), "sampling.top_k"),
        (sampled(min_p=-0.5), "sampling.min_p"),
        (sampled(min_p=1.5), "sampling.min_p"),
        (sampled(repetition_penalty=0), "sampling.repetition_penalty"),
        (sampled(repetition_penalty=10.5), "sampling.repetition_penalty"),
        (sampled(presence_penalty=2.5), "sampling.presence_penalty"),
        (sampled(frequency_penalty=-2.5), "sampling.frequency_penalty"),
        (sampled(max_tokens=0), "sampling.max_tokens"),
        (sampled(max_tokens=96), "sampling.max_tokens"),
        (sampled(min_tokens=-1), "sampling.min_tokens"),
        (sampled(max_tokens=5, min_tokens=6), "sampling.min_tokens"),
        (sampled(stop=[""]), "sampling.stop[0]"),
        (sampled(stop=["a", "x" * 1025]), "sampling.stop[1]"),
        (sampled(stop=[str(i) for i in range(17)]), "sampling.stop"),
        (sampled(stop_token_ids=[300]), "sampling.stop_token_ids[0]"),
        (sampled(logprobs=-1), "sampling.logprobs"),
        (sampled(logprobs=21), "sampling.logprobs"),
        (sampled(prompt_logprobs=21), "sampling.prompt_logprobs"),
        (sampled(logit_bias={300: 1}), "sampling.logit_bias[300]"),
        (sampled(logit_bias={5: 100.5}), "sampling.logit_bias[5]"),
        (sampled(n=0), "sampling.n"),
        (sampled(n=17), "sampling.n"),
    ],
)
def test_a_fault_is_named_by_its_field(tokenizer: Tokenizer, message: pb.GenerateRequest, field: str) -> None:
    assert fields(message, tokenizer) == [field]


@pytest.mark.parametrize("value", WRONG_FLOATS)
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
)
def test_what_is_not_a_number_is_refused(tokenizer: Tokenizer, name: str, value: float) -> None:
    assert fields(sampled(**{name: value}), tokenizer) == [f"sampling.{name}"]


@pytest.mark.parametrize("value", WRONG_FLOATS)
def test_biases_and_objectives_must_be_numbers(tokenizer: Tokenizer, value: float) -> None:
    message = request(sampling=pb.SamplingParams(logit_bias={1: value}), slo=pb.Slo(ttft_ms=value, tpot_ms=value))
    assert fields(message, tokenizer) == ["slo.ttft_ms", "slo.tpot_ms", "sampling.logit_bias[1]"]


def test_the_edges_of_every_range_are_admitted(tokenizer: Tokenizer) -> None:
    low = pb.SamplingParams(
        temperature=0, min_p=0, presence_penalty=-2, frequency_penalty=-2, top_k=-1, logprobs=0, n=1, min_tokens=0
    )
    high = pb.SamplingParams(
        top_p=1,
        min_p=1,
        repetition_penalty=10,
        presence_penalty=2,
        frequency_penalty=2,
        logprobs=20,
        n=16,
        max_tokens=95,
        min_tokens=95,
        stop=["x" * 1024, *"abcdefghijklmno"],
    )
    admitted(request(sampling=low), tokenizer)
    admitted(request(sampling=high), tokenizer)
    admitted(request(request_id="x" * 128), tokenizer)


def test_an_output_that_is_whole_may_ask_for_its_end(tokenizer: Tokenizer) -> None:
    message = request(resume_token_ids=[1, 2], sampling=pb.SamplingParams(max_tokens=2))
    assert admitted(message, tokenizer).resume_token_ids == (1, 2)


def test_all_faults_are_reported_together(tokenizer: Tokenizer) -> None:
    message = pb.GenerateRequest(request_id="ä", sampling=pb.SamplingParams(top_p=2, n=0))
    assert fields(message, tokenizer) == ["request_id", "prompt", "sampling.top_p", "sampling.n"]


def test_a_violation_says_what_was_given_and_what_is_allowed(tokenizer: Tokenizer) -> None:
    (violation,) = refused(sampled(top_p=1.5), tokenizer)
    assert violation == FieldViolation("sampling.top_p", "1.5", "above 0 and at most 1")
    assert violation.description == "sampling.top_p is 1.5, must be above 0 and at most 1"


def test_a_long_value_is_shown_in_part(tokenizer: Tokenizer) -> None:
    (violation,) = refused(request(request_id="x" * 10_000), tokenizer)
    assert len(violation.value) == 80


def test_prompt_and_output_share_the_models_length(tokenizer: Tokenizer) -> None:
    (violation,) = refused(sampled(max_tokens=200), tokenizer)
    assert violation.field == "sampling.max_tokens"
    assert "at most 95" in violation.bound
    assert "the model's length" in violation.bound


def test_a_pool_that_holds_less_than_the_model_sets_the_bound(tokenizer: Tokenizer) -> None:
    small = ModelLimits(300, 100, (2,), max_pool_tokens=32)
    (violation,) = refused(sampled(max_tokens=50), tokenizer, small)
    assert "at most 27" in violation.bound
    assert "the smallest pool" in violation.bound
    assert admitted(request(), tokenizer, small).sampling.max_tokens == 27


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "x" * 100},
        {"token_ids": pb.TokenIds(ids=[1] * 100)},
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 99)])},
    ],
)
def test_a_prompt_must_leave_room_for_one_token(tokenizer: Tokenizer, prompt: dict[str, object]) -> None:
    (violation,) = refused(request(**prompt), tokenizer)
    assert violation.field == "prompt"
    assert "at most 99 tokens" in violation.bound


def test_a_prompt_of_all_but_one_token_is_admitted(tokenizer: Tokenizer) -> None:
    assert admitted(request(text="x" * 99), tokenizer).sampling.max_tokens == 1


def test_a_huge_text_is_refused_without_being_tokenized(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: Tokenizer, text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters were tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    assert fields(request(text="x" * 10_000_000), tokenizer) == ["prompt"]


def test_chat_is_written_by_the_models_template(tokenizer: Tokenizer) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="system", content="be"), pb.ChatMessage(role="user", content="hi")])
    assert tokenizer.decode(admitted(request(chat=chat), tokenizer).prompt_token_ids) == "system: be\nuser: hi\n"


def test_what_the_template_says_reaches_the_client(tokenizer: Tokenizer) -> None:
    (violation,) = refused(request(chat=pb.Chat(messages=[pb.ChatMessage(role="tool")])), tokenizer)
    assert "no tools" in violation.description


def test_an_adapter_is_not_found_unless_the_request_is_also_wrong(tokenizer: Tokenizer) -> None:
    assert admit(request(adapter="lora"), LIMITS, tokenizer) == NotFound("adapter", "lora")
    assert fields(request(adapter="lora", text=""), tokenizer) == ["text"]


WIRE_FLOATS = st.floats(width=32)
WIRE_INTS = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 40)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(max_size=120),
    scalars=st.fixed_dictionaries(
        {},
        optional={
            "temperature": WIRE_FLOATS,
            "top_p": WIRE_FLOATS,
            "min_p": WIRE_FLOATS,
            "repetition_penalty": WIRE_FLOATS,
            "presence_penalty": WIRE_FLOATS,
            "top_k": WIRE_INTS,
            "max_tokens": WIRE_INTS,
            "min_tokens": WIRE_INTS,
            "logprobs": WIRE_INTS,
            "n": WIRE_INTS,
            "seed": st.integers(-(2**63), 2**63 - 1),
            "stop": st.lists(st.text(max_size=5), max_size=20),
            "stop_token_ids": st.lists(WIRE_INTS, max_size=3),
            "logit_bias": st.dictionaries(WIRE_INTS, WIRE_FLOATS, max_size=3),
        },
    ),
    resume=st.lists(WIRE_INTS, max_size=3),
)
def test_whatever_a_client_sends_is_admitted_within_bounds_or_refused_by_field(
    tokenizer: Tokenizer, text: str, scalars: dict[str, object], resume: list[int]
) -> None:
    message = request(text=text, sampling=pb.SamplingParams(**scalars), resume_token_ids=resume)  # type: ignore[arg-type]
    answer = admit(message, LIMITS, tokenizer)
    if isinstance(answer, Admitted):
        sampling = answer.sampling
        assert 1 <= sampling.max_tokens <= LIMITS.max_tokens - len(answer.prompt_token_ids)
        assert sampling.min_tokens <= sampling.max_tokens
        assert len(answer.resume_token_ids) <= sampling.max_tokens
        assert math.isfinite(sampling.temperature + sampling.top_p + sampling.min_p + sampling.repetition_penalty)
        assert Sampling.from_wire(sampling.to_wire()) == sampling
    else:
        assert isinstance(answer, list)
        known = {"prompt", *pb.GenerateRequest.DESCRIPTOR.fields_by_name}
        assert all(re.split(r"[.\[]", violation.field)[0] in known for violation in answer)
