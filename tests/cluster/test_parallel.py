"""Workers whose models are split over ranks, in real processes: hand-off between unequal ones, and a rank that dies."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import psutil
import pytest
from asking import Answer, answer, request, until

from baton.engine.runner import Runner
from baton.proto import inference_pb2_grpc
from baton.proto.messages import Request, Role, Sampling
from baton.proto.settings import EngineSettings, SchedulerSettings, TransferSettings
from baton.router.config import ClusterConfig, RouterSettings, defaults
from baton.scheduler.plan import Emitted
from baton.scheduler.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.cluster

NUM_TOKENS = 10
LENGTHS = (1, 16, 17, 90, 150)


def engine(model_dir: Path, ranks: int = 1) -> EngineSettings:
    return EngineSettings(model=str(model_dir), dtype="float32", num_blocks=64, threads=1, tensor_parallel=ranks)


def config(model_dir: Path, prefill_ranks: int, decode_ranks: int) -> ClusterConfig:
    ranks = {Role.PREFILL: prefill_ranks, Role.DECODE: decode_ranks}
    pools = tuple(
        replace(
            pool,
            engine=engine(model_dir, ranks[pool.role]),
            scheduler=SchedulerSettings(max_num_batched_tokens=64),
            num_cpus=0.1,
        )
        for pool in defaults(prefill=1, decode=1).pools
    )
    router = RouterSettings(port=0, http_port=0)
    return ClusterConfig(str(model_dir), pools, router, TransferSettings(checksums="always"))


def prompts() -> list[list[int]]:
    return [[Random(length).randrange(256) for _ in range(length)] for length in LENGTHS]


def sampling(index: int) -> dict[str, Any]:
    return {"temperature": 0.8 * (index % 2), "seed": 50 + index}


@functools.cache
def one_process(model_dir: Path) -> list[list[int]]:
    """The tokens of one scheduler and one runner."""
    runner = Runner(engine(model_dir))
    scheduler = Scheduler(SchedulerConfig(Role.COLOCATED, 64, 512))
    outputs = []
    for index, prompt in enumerate(prompts()):
        wanted = Sampling(max_tokens=NUM_TOKENS, **sampling(index))
        sequence = scheduler.add(Request(f"r{index}", tuple(prompt), len(prompt), wanted), 0.0)
        tokens = []
        while not sequence.ended:
            step = scheduler.plan(0.0)
            events = scheduler.commit(step, runner.run(step), 0.0)
            tokens += [event.token_id for event in events if isinstance(event, Emitted)]
        outputs.append(tokens)
    return outputs


async def ask_all(address: str) -> list[Answer]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        wanted = [{f"sampling_{key}": value for key, value in sampling(index).items()} for index in range(len(LENGTHS))]
        return await asyncio.gather(
            *(
                answer(stub, request(prompt, NUM_TOKENS, **options), timeout=60)
                for prompt, options in zip(prompts(), wanted, strict=True)
            )
        )


def check_tokens(cluster: Any, model_dir: Path) -> None:
    answers = asyncio.run(ask_all(cluster.address))
    assert [found.tokens for found in answers] == one_process(model_dir)
    assert {found.finish.connector for found in answers if found.finish.usage.transferred_tokens} == {"nixl"}


def test_a_model_is_split_over_the_decode_workers_ranks_alone(launch: Any, tiny_model_dir: Callable[..., Path]) -> None:
    model_dir = tiny_model_dir("qwen3", num_key_value_heads=2, num_hidden_layers=2)
    with launch(config(model_dir, 1, 2), model_dir) as cluster:
        check_tokens(cluster, model_dir)


def test_a_model_is_split_over_the_prefill_workers_ranks_alone_and_one_of_them_is_killed(
    launch: Any, tiny_model_dir: Callable[..., Path]
) -> None:
    model_dir = tiny_model_dir("qwen3", num_key_value_heads=2, num_hidden_layers=2)
    with launch(config(model_dir, 2, 1), model_dir) as cluster:
        check_tokens(cluster, model_dir)
        leader = pid_of_prefill(cluster)
        (rank,) = further_ranks()
        os.kill(rank, signal.SIGKILL)
        asyncio.run(until(lambda: pid_of_prefill(cluster) not in (None, leader), 60, "a whole worker"))
        check_tokens(cluster, model_dir)
    asyncio.run(until(lambda: not further_ranks(), 20, "the end of the ranks"))


def pid_of_prefill(cluster: Any) -> int | None:
    """The process of the prefill worker's rank 0, None while it does not serve."""
    worker = next(worker for worker in cluster.workers() if worker.role == "prefill")
    return int(worker.pid) if worker.state == "ready" else None


def further_ranks() -> set[int]:
    """Processes of ranks other than 0, by the name that Ray gives them, among this process's descendants."""
    return {process.pid for process in psutil.Process().children(recursive=True) if is_further_rank(process)}


def is_further_rank(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "RankHost" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
