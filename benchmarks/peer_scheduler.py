"""vLLM's scheduler class alone, driven as `scheduler_speed.py` drives ours; runs in the peers' environment.

    question {"scenario": "decode", "running": 64, "steps": 400, "seed": 0}
    answer   {"step_us": schedule + update_from_output, "add_us": constructing and adding a request, or null}

Scenarios, sizes, warm-up, windows and clock are those of that file: change both together.
Owns: the scheduler, a supply of requests and a stand-in for the model.
"""

import gc
import os
import random
import statistics
import sys
import time

import peer_pipe  # takes stdout away from what prints
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS, BUDGET, BLOCK_SIZE, NUM_BLOCKS = 512, 448, 64, 2048, 16, 100_000
MAX_MODEL_LEN = 8192
WINDOW = 20


class Drive:
    """One scheduler with so many places; each step's finished requests are replaced."""

    def __init__(self, model: str, scenario: str, running: int, seed: int) -> None:
        self._scenario = scenario
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(8)]
        self._scheduler = _scheduler(model, running)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._numbers = 0
        self.add_s: list[float] = []
        for _ in range(running):
            self.add()

    def add(self) -> None:
        if self._scenario == "shared":
            prompt = self._random.choice(self._prefixes) + self._tokens(PROMPT_TOKENS - SHARED_TOKENS)
        else:
            prompt = self._tokens(PROMPT_TOKENS)
        max_tokens = 7000 if self._scenario == "decode" else OUTPUT_TOKENS
        self._numbers += 1
        start = time.process_time()
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(f"request-{self._numbers}", prompt, sampling, None, block_hasher=self._hasher)
        self._scheduler.add_request(request)
        self.add_s.append(time.process_time() - start)

    def step(self) -> tuple[dict[str, int], float]:
        """Tokens of each sequence in this step, and the seconds of both halves."""
        scheduler = self._scheduler
        start = time.process_time()
        step = scheduler.schedule()
        planned = time.process_time()
        names = list(step.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7 + index % 1000] if self._samples(name) else [] for index, name in enumerate(names)],
        )
        computed = time.process_time()
        outputs = scheduler.update_from_output(step, result)
        committed = time.process_time()
        for engine_outputs in outputs.values():
            for output in engine_outputs.outputs:
                if output.finish_reason is not None:
                    self.add()
        return step.num_scheduled_tokens, planned - start + committed - computed

    def warm_up(self, running: int) -> None:
        if self._scenario == "decode":
            while len(tokens := self.step()[0]) < running or any(number > 1 for number in tokens.values()):
                pass
        for _ in range(10 if self._scenario == "decode" else 150):
            self.step()

    def _samples(self, name: str) -> bool:
        """`schedule` has counted this step's tokens as computed already."""
        request = self._scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(100, 40_000) for _ in range(num_tokens)]


def _scheduler(model: str, running: int) -> Scheduler:
    cache = CacheConfig(block_size=BLOCK_SIZE, cache_dtype="auto", enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="bfloat16", seed=0, max_model_len=MAX_MODEL_LEN),
        scheduler_config=SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=max(BUDGET, running),
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = False
    cache.num_gpu_blocks, cache.block_size = NUM_BLOCKS, BLOCK_SIZE
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    init_none_hash(sha256)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


def measure(model: str, question: dict) -> dict:
    running, steps = question["running"], question["steps"]
    drive = Drive(model, question["scenario"], running, question["seed"])
    drive.warm_up(running)
    gc.collect()
    gc.freeze()
    drive.add_s.clear()
    times = [1e6 * drive.step()[1] for _ in range(steps)]
    gc.unfreeze()
    windows = [times[first : first + WINDOW] for first in range(0, len(times) - WINDOW + 1, WINDOW)]
    return {
        "step_us": statistics.median(sum(window) / WINDOW for window in windows),
        "add_us": 1e6 * statistics.median(drive.add_s) if drive.add_s else None,
    }


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    peer_pipe.serve(lambda question: measure(sys.argv[1], question), {"ready": True})
