"""`ray up cluster.yaml` brings up one head, two prefill and two decode hosts that answer as one plain process would."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hosts.launcher import RayHosts, at_rest, workers
from hosts.streams import wrong_tokens

from baton.client.client import Client
from baton.client.errors import AccessDenied, Unavailable

pytestmark = pytest.mark.timeout(900)

NUM_REQUESTS, NUM_TOKENS = 200, 12
AT_ONCE = 32


def test_every_host_sees_each_worker_on_a_host_of_its_pool(hosts: RayHosts) -> None:
    for asked in ("h1", "h4", "client"):
        status = hosts.status_from(asked)
        found = {
            worker["worker_id"]: (worker["state"], hosts.bed.name_of(worker["address"]))
            for pool in status["pools"]
            for worker in pool["workers"]
        }
        assert {state for state, _ in found.values()} == {"ready"}
        assert sorted(found) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        assert {host for name, (_, host) in found.items() if name.startswith("prefill")} == {"h1", "h2"}
        decode = {host for name, (_, host) in found.items() if name.startswith("decode")}
        assert len(decode) == 2
        assert decode <= {"h3", "h4", "h5"}


def test_200_requests_from_another_host_get_the_tokens_of_transformers(hosts: RayHosts, model_dir) -> None:
    random = Random(5)
    prompts = [random.choices(range(256), k=random.randint(1, 300)) for _ in range(NUM_REQUESTS)]
    used: set[str] = set()

    async def ask() -> list[list[int]]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(prompt: list[int]) -> list[int]:
            async with slots:
                generation = client.generate(
                    token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=300.0
                )
                result = await generation.result()
                used.update((result.finish.prefill_worker, result.finish.decode_worker))
                assert result.finish.connector == "nixl"
                return list(result.token_ids)

        async with hosts.client() as client:
            return await asyncio.gather(*map(one, prompts))

    outputs = asyncio.run(ask())
    assert [len(output) for output in outputs] == [NUM_TOKENS] * NUM_REQUESTS
    assert wrong_tokens(model_dir, prompts, outputs) == []
    status = hosts.status()
    assert used == {worker.worker_id for worker in workers(status)}
    assert at_rest(status)


def test_who_has_no_token_is_turned_away(hosts: RayHosts) -> None:
    for token in (None, "wrong"):
        with Client(hosts.target, token=token, tls=hosts.tls) as client, pytest.raises(AccessDenied):
            client.generate(token_ids=[1, 2, 3], max_tokens=1).result()


def test_who_speaks_plain_text_is_turned_away_and_told_of_tls(hosts: RayHosts) -> None:
    with Client(hosts.target, token="any", timeout_s=20.0) as client, pytest.raises(Unavailable, match="--tls"):
        client.generate(token_ids=[1, 2, 3], max_tokens=1).result()
