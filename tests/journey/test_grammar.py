"""Constrained outputs through a whole cluster: right, and the same however often they are disturbed on the way."""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest
from asking import Answer, answer, request, until
from constrained import CASES, Case
from small_cluster import SmallCluster

from baton.engine.runner import Runner
from baton.proto import inference_pb2 as inference
from baton.proto.messages import Role
from baton.proto.settings import EngineSettings


def prompt_of(salt: int) -> list[int]:
    """Prompts have no beginning in common, so that each sequence needs blocks of its own."""
    return [(index * 7 + salt * 31) % 256 for index in range(20 + 9 * (salt % 5))]


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir):
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def small(model_dir):
    """`small(decode=2)` is a cluster of the tiny model in fp32."""

    def make(num_blocks: int = 400, **options) -> SmallCluster:
        settings = EngineSettings(model=str(model_dir), dtype="float32", num_blocks=num_blocks, threads=1)
        return SmallCluster(model_dir, lambda: Runner(settings), **options)

    return make


def asked(case: Case, seed: int = 0, max_tokens: int = 400, **fields) -> inference.GenerateRequest:
    options = {"sampling_temperature": 1.0, "sampling_seed": seed, "sampling_ignore_eos": False}
    return request(prompt_of(seed + len(case.name)), max_tokens, sampling_grammar=case.grammar, **{**options, **fields})


async def all_answers(cluster: SmallCluster, seeds: range = range(2)) -> list[Answer]:
    """Each case with each seed, all at once."""
    messages = [asked(case, seed) for case in CASES for seed in seeds]
    return await asyncio.gather(*(answer(cluster.inference, message, 200) for message in messages))


@pytest.fixture(scope="module")
async def undisturbed(small) -> list[Answer]:
    async with small(prefill=0, decode=0, colocated=1) as cluster:
        return await all_answers(cluster)


async def test_every_output_of_a_hand_off_is_what_was_asked_for(small, undisturbed):
    async with small() as cluster:
        answers = await all_answers(cluster)
        await cluster.at_rest()
    assert [a.tokens for a in answers] == [a.tokens for a in undisturbed]
    for case, result in zip([case for case in CASES for _ in range(2)], answers, strict=True):
        assert result.finish.reason == inference.FINISH_REASON_STOP
        case.check(result.text)


@pytest.mark.parametrize("role", ["pair", "colocated"])
async def test_preemptions_change_no_output(small, role):
    """Outputs that are longer than the router expects, so that it sends more than the pool can hold to their end."""
    pattern = "([a-f]{5}-){52}([0-9]{3}|x)"
    messages = [asked(Case("", inference.Grammar(regex=pattern), str), seed) for seed in range(8)]
    shape = {"prefill": 0, "decode": 0, "colocated": 1} if role == "colocated" else {"prefill": 1, "decode": 1}

    async def outputs(num_blocks: int) -> tuple[list[Answer], int]:
        async with small(num_blocks, **shape) as cluster:
            answers = await asyncio.gather(*(answer(cluster.inference, message, 200) for message in messages))
            counters = await cluster.counters()
            await cluster.at_rest()
        return answers, sum(entry.preemptions_recompute for entry in counters.values())

    undisturbed, none = await outputs(400)
    disturbed, some = await outputs(40)
    assert none == 0
    assert some > 0
    assert all(re.fullmatch(pattern, a.text) for a in disturbed)
    assert [a.tokens for a in disturbed] == [a.tokens for a in undisturbed]


async def test_a_lost_decode_worker_changes_no_output(small, undisturbed):
    async with small(decode=2) as cluster:
        running = asyncio.create_task(all_answers(cluster))

        async def decoding() -> int:
            loads = [await cluster.on_loop(seat, seat.worker.core.load) for seat in cluster.members()]
            return sum(load.running for load in loads if load.role is Role.DECODE) >= 6

        await until(decoding, 60, "decoding on both workers")
        await cluster.remove("decode-0")
        answers = await running
    assert any(a.finish.retries for a in answers), "nobody was disturbed"
    assert [a.tokens for a in answers] == [a.tokens for a in undisturbed]


async def test_an_output_resumes_after_any_of_its_tokens(small):
    case = next(case for case in CASES if case.name == "ref")
    async with small() as cluster:
        whole = await answer(cluster.inference, asked(case))
        for known in range(1, len(whole.tokens) + 1, 5):
            rest = await answer(cluster.inference, asked(case, resume_token_ids=whole.tokens[:known]))
            assert whole.tokens[:known] + rest.tokens == whole.tokens


async def test_a_resumed_output_that_contradicts_the_grammar_is_refused(small):
    async with small() as cluster:
        message = asked(Case("", inference.Grammar(regex="[a-z]{3}"), str), resume_token_ids=[65, 66, 0])
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await answer(cluster.inference, message)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "output token 2" in error.value.details()
        await cluster.at_rest()


async def test_stops_of_the_client_end_an_output_before_its_grammar_does(small):
    async with small() as cluster:
        case = Case("", inference.Grammar(regex="[ab]{30}x"), str)
        text = (await answer(cluster.inference, asked(case))).text
        cut = await answer(cluster.inference, asked(case, sampling_stop=["ab"]))
        assert cut.text == text[: text.index("ab")]
        by_id = await answer(cluster.inference, asked(case, sampling_stop_token_ids=[ord("b") - 33]))
        assert by_id.text == text[: text.index("b")]
        short = await answer(cluster.inference, asked(case, max_tokens=5))
        assert short.text == text[:5]
        assert short.finish.reason == inference.FINISH_REASON_LENGTH


async def test_each_of_several_outputs_follows_the_grammar(small):
    case = next(case for case in CASES if case.name == "object")
    async with small() as cluster:
        texts: dict[int, str] = {}
        async for part in cluster.inference.Generate(asked(case, sampling_n=4), timeout=100):
            texts[part.index] = texts.get(part.index, "") + part.text
        await cluster.at_rest()
    assert len(set(texts.values())) == 4
    for text in texts.values():
        case.check(text)


async def test_log_probabilities_of_a_constrained_output_are_numbers(small):
    async with small() as cluster:
        result = await answer(cluster.inference, asked(CASES[0], sampling_logprobs=2))
    assert len(result.logprobs) == len(result.tokens)
    assert all(-1e4 < entry.logprob <= 0 and entry.rank >= 1 for entry in result.logprobs)
