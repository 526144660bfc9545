"""A constrained output outlives the decode worker that writes it: killed, in a real cluster."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from dataclasses import replace

import pytest
from asking import until

from baton.client.client import AsyncClient
from baton.proto.settings import EngineSettings
from baton.router.config import ClusterConfig, RouterSettings, defaults

pytestmark = pytest.mark.cluster

PATTERN = r"([a-f]{3}-){40}[0-9]{4}"
NUM_STREAMS = 6


def test_constrained_outputs_are_whole_and_the_same_after_a_decode_worker_is_killed(launch, tiny_model_dir):
    model_dir = tiny_model_dir("llama", num_hidden_layers=12, hidden_size=128, intermediate_size=256)
    config = defaults(prefill=1, decode=2)
    engine = EngineSettings(model=str(model_dir), dtype="float32", num_blocks=400, threads=1)
    pools = tuple(replace(pool, engine=engine, num_cpus=0.1) for pool in config.pools)
    settings = ClusterConfig(str(model_dir), pools, RouterSettings(port=0, max_retries=8), config.transfer)
    with launch(settings, model_dir) as cluster:
        undisturbed = asyncio.run(_streams(cluster, kill=False))
        disturbed = asyncio.run(_streams(cluster, kill=True))
    assert [tokens for tokens, _, _ in disturbed] == [tokens for tokens, _, _ in undisturbed]
    assert any(retries for _, _, retries in disturbed), "the kill disturbed nobody"
    assert all(re.fullmatch(PATTERN, text) for _, text, _ in disturbed)


async def _streams(cluster, kill: bool) -> list[tuple[list[int], str, int]]:
    """Tokens, text and retries of each stream; kills a decode worker when three of them are well under way."""
    received: list[list[int]] = [[] for _ in range(NUM_STREAMS)]

    async def one(index: int) -> tuple[list[int], str, int]:
        prompt = [(7 * i + 31 * index) % 256 for i in range(30)]
        generation = client.generate(
            token_ids=prompt, temperature=1.0, seed=index, regex=PATTERN, max_tokens=400, timeout_s=120
        )
        async for output in generation:
            received[index] += output.token_ids
        result = await generation.result()
        return list(result.token_ids), result.text, result.finish.retries

    async with AsyncClient(cluster.address) as client:
        running = asyncio.gather(*(one(index) for index in range(NUM_STREAMS)))
        if kill:
            victims = [worker.pid for worker in cluster.workers() if worker.role == "decode"]
            await until(
                lambda: sum(len(tokens) >= 20 for tokens in received) >= 3, 60, "twenty tokens of three streams"
            )
            os.kill(victims[0], signal.SIGKILL)
        return await running
