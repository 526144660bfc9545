"""Steps are planned while others run, and nobody can tell from the tokens."""

from __future__ import annotations

import asyncio

import pytest
from asking import answer, request
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.proto.messages import Role
from baton.proto.settings import SchedulerSettings

SETTINGS = SchedulerSettings(max_num_batched_tokens=96, async_scheduling="on")


def prompt_of(index: int) -> list[int]:
    return [(place * 7 + index * 31) % 256 for place in range(9 + 3 * index)]


@pytest.mark.parametrize("shape", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "colocated": 1}])
async def test_tokens_are_exact_under_preemption_stop_and_cancellation(paper_dir, shape):
    async with SmallCluster(
        paper_dir, lambda: PaperRunner(num_blocks=34, step_s=0.005), scheduler=SETTINGS, **shape
    ) as small:
        outputs = [paper_output(prompt_of(index), 300) for index in range(24)]

        async def one(index: int) -> None:
            expected = outputs[index]
            if index % 3 == 0:
                stop = expected[100 + index]
                expected = expected[: expected.index(stop) + 1]
                result = await answer(small.inference, request(prompt_of(index), 300, sampling_stop_token_ids=[stop]))
            elif index % 3 == 1:
                call = small.inference.Generate(request(prompt_of(index), 300), timeout=60)
                async for _ in call:
                    call.cancel()
                    return
            else:
                result = await answer(small.inference, request(prompt_of(index), 300))
            assert result.tokens == expected

        await asyncio.gather(*(one(index) for index in range(24)))
        await small.at_rest()
        counters = await small.counters()
        grown = [counters[seat.worker_id] for seat in small.members() if seat.role is not Role.PREFILL]
        assert sum(each.preemptions_recompute for each in grown) > 0
