"""Tokens through prefill, hand-off and decode in real processes are those of transformers and of one plain process."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
import torch
from asking import Answer, answer, request, until

from baton.engine.runner import Runner
from baton.proto import inference_pb2 as inference
from baton.proto import inference_pb2_grpc
from baton.proto.messages import Request, Role, Sampling
from baton.proto.settings import EngineSettings, SchedulerSettings, TransferSettings
from baton.router.config import ClusterConfig, RouterSettings, defaults
from baton.scheduler.plan import Emitted
from baton.scheduler.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.cluster

NUM_PROMPTS = 64
NUM_TOKENS = 12
VOCABULARY = 320


@dataclass(frozen=True)
class SetUp:
    """One shape of cluster."""

    name: str
    prefill: int = 1
    decode: int = 1
    colocated: int = 0
    budget: int = 64
    prefix_cache: bool = True
    binding: str = "early"
    num_blocks: int = 512
    preempts: bool = False
    connector: str = "nixl"
    family: str = "llama"
    overrides: dict[str, Any] = field(default_factory=dict)

    def config(self, model_dir: Path) -> ClusterConfig:
        config = defaults(prefill=self.prefill, decode=self.decode, colocated=self.colocated)
        pools = tuple(
            replace(
                pool,
                engine=EngineSettings(
                    model=str(model_dir),
                    dtype="float32",
                    num_blocks=self.num_blocks if pool.role is not Role.PREFILL else 512,
                    threads=1,
                ),
                scheduler=SchedulerSettings(max_num_batched_tokens=self.budget, prefix_cache=self.prefix_cache),
                num_cpus=0.1,
            )
            for pool in config.pools
        )
        return ClusterConfig(
            str(model_dir),
            pools,
            RouterSettings(port=0, http_port=0, binding=self.binding),
            TransferSettings(connector=self.connector, checksums="always"),
        )


# Every value of every dimension meets the same model, whose greedy and sampled tokens must not depend on the set-up.
SHAPES = [
    SetUp("1P1D, budget 64"),
    SetUp("2P1D, budget 16, no prefix cache", prefill=2, budget=16, prefix_cache=False),
    SetUp("1P2D, budget 512, late, nccl", decode=2, budget=512, binding="late", connector="nccl"),
    SetUp("2P2D, budget 16, late, no prefix cache", 2, 2, budget=16, binding="late", prefix_cache=False),
    SetUp("co-located, budget 64", 0, 0, 1, budget=64),
    SetUp("1P1D, small decode pool", num_blocks=22, preempts=True, budget=512),
    SetUp("co-located, small pool, no prefix cache", 0, 0, 1, num_blocks=22, preempts=True, prefix_cache=False),
]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES = [
    SetUp(
        "llama, MHA, untied, llama3 rope, biases",
        overrides={
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3,
            "attention_bias": True,
        },
    ),
    SetUp("mistral, yarn rope", family="mistral", overrides={"rope_parameters": YARN}, binding="late"),
    SetUp(
        "qwen2, tied, linear rope", family="qwen2", overrides={"rope_parameters": LINEAR, "tie_word_embeddings": True}
    ),
    SetUp("qwen3, one KV head", family="qwen3", overrides={"num_key_value_heads": 1}, budget=16),
]


@dataclass(frozen=True)
class Work:
    """Prompts and how many tokens each gets. `growing`: outputs outgrow the prompts, so pools fill while they run."""

    growing: bool = False

    @property
    def num_tokens(self) -> int:
        return 110 if self.growing else NUM_TOKENS

    def prompts(self) -> list[list[int]]:
        if not self.growing:
            return mixed_prompts()
        random = Random(8)
        return [[random.randrange(256) for _ in range(5 + index)] for index in range(20)]


def mixed_prompts() -> list[list[int]]:
    """64 prompts of 1 to 300 tokens; a third share a prefix with others."""
    random = Random(7)
    shared = [random.randrange(256) for _ in range(120)]
    lengths = [1, 2, 15, 16, 17, 300] + [random.randint(1, 300) for _ in range(NUM_PROMPTS - 6)]
    result = []
    for index, length in enumerate(lengths):
        own = [random.randrange(256) for _ in range(length)]
        result.append((shared[: length // 2] + own)[:length] if index % 3 == 0 else own)
    return result


@functools.cache
def reference(model_dir: Path, work: Work) -> list[list[int]]:
    """Greedy tokens of transformers' own generate, one prompt at a time."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    outputs = []
    for prompt in work.prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=work.num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@functools.cache
def sampled_reference(model_dir: Path, work: Work) -> list[list[int]]:
    """Sampled tokens of one plain process: a scheduler and a runner, one request after the other."""
    runner = Runner(EngineSettings(model=str(model_dir), dtype="float32", num_blocks=64, threads=1))
    scheduler = Scheduler(SchedulerConfig(Role.COLOCATED, 64, 512))
    outputs = []
    for index, prompt in enumerate(work.prompts()):
        sampling = Sampling(temperature=0.8, top_p=0.95, max_tokens=work.num_tokens, seed=1000 + index)
        sequence = scheduler.add(Request(f"r{index}", tuple(prompt), len(prompt), sampling), 0.0)
        tokens = []
        while not sequence.ended:
            step = scheduler.plan(0.0)
            events = scheduler.commit(step, runner.run(step), 0.0)
            tokens += [event.token_id for event in events if isinstance(event, Emitted)]
        outputs.append(tokens)
    return outputs


async def ask_all(address: str, work: Work, **sampling: Any) -> list[Answer]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await asyncio.gather(
            *(
                answer(stub, request(prompt, work.num_tokens, sampling_seed=1000 + index, **sampling), timeout=120)
                for index, prompt in enumerate(work.prompts())
            )
        )


def assert_at_rest(cluster) -> list[Any]:
    async def rest() -> bool:
        return not any(
            worker.load.held_blocks or worker.load.lent_blocks or worker.load.quarantined_blocks or worker.in_flight
            for worker in cluster.workers()
        )

    asyncio.run(until(rest, what="free blocks"))
    return [worker.load for worker in cluster.workers()]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_tokens_do_not_depend_on_the_set_up(launch, tiny_model_dir, shape):
    model_dir, work = tiny_model_dir("llama"), Work(growing=shape.preempts)
    with launch(shape.config(model_dir), model_dir) as cluster:
        before = assert_at_rest(cluster)
        greedy = asyncio.run(ask_all(cluster.address, work))
        assert [result.tokens for result in greedy] == reference(model_dir, work)
        sampled = asyncio.run(ask_all(cluster.address, work, sampling_temperature=0.8, sampling_top_p=0.95))
        assert [result.tokens for result in sampled] == sampled_reference(model_dir, work)
        assert [result.tokens for result in sampled] != [result.tokens for result in greedy]
        after = assert_at_rest(cluster)
        counted = {
            name: sum(getattr(load.counters, name) for load in after)
            - sum(getattr(load.counters, name) for load in before)
            for name in ("preemptions_recompute", "prompt_tokens_transferred", "prompt_tokens_cached")
        }
        assert (counted["preemptions_recompute"] > 0) == shape.preempts
        if shape.decode:
            results = greedy + sampled
            assert counted["prompt_tokens_transferred"] == sum(
                result.finish.usage.transferred_tokens for result in results
            )
            decode_cached = sum(load.counters.prompt_tokens_cached for load in after if load.role == "decode") - sum(
                load.counters.prompt_tokens_cached for load in before if load.role == "decode"
            )
            num_prompt_tokens = 2 * sum(map(len, work.prompts()))
            assert counted["prompt_tokens_transferred"] + decode_cached >= num_prompt_tokens
            assert shape.preempts or counted["prompt_tokens_transferred"] + decode_cached == num_prompt_tokens
            assert all(
                result.finish.connector == shape.connector
                for result in results
                if result.finish.usage.transferred_tokens
            )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_gives_transformers_tokens_and_logprobs(launch, tiny_model_dir, family):
    import transformers

    model_dir, work = tiny_model_dir(family.family, **family.overrides), Work()
    prompts = work.prompts()
    with launch(family.config(model_dir), model_dir) as cluster:
        results = asyncio.run(ask_all(cluster.address, work, sampling_logprobs=3))
        assert [result.tokens for result in results] == reference(model_dir, work)
        scored = asyncio.run(ask_one(cluster.address, request(prompts[5], NUM_TOKENS, sampling_prompt_logprobs=2)))
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, result in list(zip(prompts, results, strict=True))[::8]:
        logits = model(torch.tensor([prompt + result.tokens])).logits[0]
        expected = torch.log_softmax(logits, dim=-1)
        for index, entry in enumerate(result.logprobs):
            row = expected[len(prompt) + index - 1]
            assert entry.token_id == result.tokens[index]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert [top.logprob for top in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    prompt = prompts[5]
    expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)
    assert [entry.token_id for entry in scored.prompt_logprobs] == prompt[1:]
    for index, entry in enumerate(scored.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(expected[index, prompt[index + 1]]), abs=1e-4)


async def ask_one(address: str, message: inference.GenerateRequest) -> Answer:
    async with grpc.aio.insecure_channel(address) as channel:
        return await answer(inference_pb2_grpc.InferenceStub(channel), message)
