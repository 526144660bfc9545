"""Outputs of a few tokens, which a prefill worker generates itself while nobody else waits for it."""

from __future__ import annotations

import asyncio

import pytest
from asking import answer, request, until
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.router.config import RouterSettings

LIMIT = 4


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [(7 * index + salt) % 256 for index in range(num_tokens)]


def pair(paper_dir, make_runner=PaperRunner, binding: str = "early") -> SmallCluster:
    settings = RouterSettings(port=0, binding=binding)
    return SmallCluster(paper_dir, make_runner, router_settings=settings, short_output_tokens=LIMIT)


@pytest.mark.parametrize("binding", ["early", "late"])
async def test_a_short_output_comes_whole_from_the_worker_that_computed_its_prompt(paper_dir, binding):
    async with pair(paper_dir, binding=binding) as small:
        for length in (1, 15, 16, 40):
            for max_tokens in range(2, LIMIT + 1):
                prompt = prompt_of(length, salt=100 * max_tokens + length)
                got = await answer(small.inference, request(prompt, max_tokens))
                assert got.tokens == paper_output(prompt, max_tokens)
                assert (got.finish.prefill_worker, got.finish.decode_worker) == ("prefill-0", "prefill-0")
                assert got.finish.usage.transferred_tokens == 0
        await small.at_rest()
        assert (await small.counters())["decode-0"].steps == 0


async def test_a_longer_output_moves(paper_dir):
    async with pair(paper_dir) as small:
        got = await answer(small.inference, request(prompt_of(40), LIMIT + 1))
        assert got.tokens == paper_output(prompt_of(40), LIMIT + 1)
        assert got.finish.decode_worker == "decode-0"
        await small.at_rest()


async def test_a_short_output_moves_while_others_wait_for_the_prefill_worker(paper_dir):
    async with pair(paper_dir, lambda: PaperRunner(seconds_per_token=0.002)) as small:
        long = asyncio.create_task(answer(small.inference, request(prompt_of(300), 1)))
        await until(lambda: small.router.book.in_flight, what="the long prompt's leg")
        got = await answer(small.inference, request(prompt_of(20, salt=5), 3))
        assert got.tokens == paper_output(prompt_of(20, salt=5), 3)
        assert got.finish.decode_worker == "decode-0"
        await long
        await small.at_rest()


async def test_short_and_long_outputs_at_once_on_a_small_pool_are_all_right_and_none_is_set_back(paper_dir):
    async with pair(paper_dir, lambda: PaperRunner(num_blocks=24)) as small:
        asked = [(prompt_of(10 + 9 * index % 70, salt=index), 1 + index % 7) for index in range(60)]
        results = await asyncio.gather(*(answer(small.inference, request(prompt, size)) for prompt, size in asked))
        for (prompt, size), result in zip(asked, results, strict=True):
            assert result.tokens == paper_output(prompt, size)
        await small.at_rest()
        assert (await small.counters())["prefill-0"].preemptions_recompute == 0


async def test_a_short_output_goes_on_elsewhere_when_its_worker_is_lost(paper_dir):
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.05), prefill=2, short_output_tokens=LIMIT) as small:
        prompt = prompt_of(40)
        asking = asyncio.create_task(answer(small.inference, request(prompt, LIMIT)))
        busy = await until(
            lambda: next((seat for seat in small.members() if seat.worker.core.scheduler.load().running), None)
        )
        busy.link._task.cancel()
        assert (await asking).tokens == paper_output(prompt, LIMIT)


async def test_all_outputs_of_a_request_start_where_its_prompt_is(paper_dir):
    async with pair(paper_dir) as small:
        prompt = prompt_of(50)
        got = [part async for part in small.inference.Generate(request(prompt, 3, sampling_n=3), timeout=30)]
        outputs: dict[int, list[int]] = {}
        for part in got:
            outputs.setdefault(part.index, []).extend(part.token_ids)
        assert list(outputs.values()) == [paper_output(prompt, 3)] * 3
        await small.at_rest()
        assert (await small.counters())["decode-0"].steps == 0
