"""Every family and variant, computed in chunks, batches and pages, against transformers on whole sequences."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-all-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-sharded": ("llama", {"max_shard_size": "60KB"}),
    "llama-rope-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {}),
    "mistral-wide-window": ("mistral", {"sliding_window": 512}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-bias-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-yarn-mscale": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "beta_fast": 16.0,
                "truncate": False,
            }
        },
    ),
}
PROMPT_LENGTHS = (1, 5, 16, 47, 130)
NEW_TOKENS = 14


@pytest.fixture(params=VARIANTS, scope="module")
def model_dir(request: pytest.FixtureRequest, tiny_model_dir: Callable[..., Path]) -> Path:
    family, overrides = VARIANTS[request.param]
    return tiny_model_dir(family, **overrides)


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
@pytest.mark.parametrize("block_size", [16, 4])
def test_tokens_and_logprobs_equal_those_of_transformers(
    model_dir: Path, oracle: Any, runner_for: Any, new_sequence: Any, play: Any, block_size: int, cpu_kernels: str
) -> None:
    runner = runner_for(model_dir, block_size=block_size, cpu_kernels=cpu_kernels)
    vocabulary = runner.description.vocab_size
    rng = random.Random(block_size)
    prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length in PROMPT_LENGTHS]
    sequences = [
        new_sequence(prompt, temperature=0.0, max_tokens=NEW_TOKENS, logprobs=vocabulary, prompt_logprobs=3)
        for prompt in prompts
    ]
    played = play(runner, sequences, seed=block_size)
    for prompt, sequence, got in zip(prompts, sequences, played, strict=True):
        expected_ids = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=vocabulary + 1,
        )[0].tolist()
        assert sequence.token_ids == expected_ids
        with torch.inference_mode():
            expected = oracle(torch.tensor([expected_ids])).logits[0].log_softmax(-1)
        for position, entry in enumerate(got.prompt + got.sampled):
            row = expected[position]
            assert entry.token_id == expected_ids[position + 1]
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
            top = torch.tensor(entry.top_logprobs)
            assert torch.allclose(top, row[list(entry.top_ids)], atol=1e-4, rtol=0)
            assert torch.allclose(top, row.sort(descending=True).values[: len(top)], atol=1e-4, rtol=0)
        assert len(got.prompt) == len(prompt) - 1
        assert len(got.sampled) == NEW_TOKENS
        assert all(entry.rank == 1 for entry in got.sampled)
