"""Sampling by the Triton kernels against the engine's sampler on the CPU: the same tokens. Run as on_device.py is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton import knobs

from baton.engine import sampler
from baton.kernels.sampling_noise import row_keys
from baton.kernels.triton import penalties, sampling
from baton.proto.messages import Sampling

DEVICE = torch.device("cpu" if knobs.runtime.interpret else "cuda")


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("seed", [11, 12])
def test_tokens_are_those_of_the_engines_sampler_on_the_cpu(seed: int) -> None:
    """Every kind of row in one batch: greedy, filtered in every way, penalised, with prompt and output so far."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    vocabulary, rows = 1200, []
    for i in range(28):
        wanted = Sampling(
            temperature=float(random.choice([0.0, 0.7, 1.0, 1.6])),
            top_k=int(random.choice([0, 1, 20])),
            top_p=float(random.choice([1.0, 0.4, 0.95])),
            min_p=float(random.choice([0.0, 0.02])),
            repetition_penalty=float(random.choice([1.0, 1.3])),
            presence_penalty=float(random.choice([0.0, 0.4])),
            frequency_penalty=float(random.choice([0.0, -0.3])),
            seed=int(random.integers(2**63)),
        )
        tokens = random.integers(0, vocabulary, 3 * i).tolist()
        rows.append(sampler.Row(wanted, tokens, i, 3 * i))
    logits = torch.randn(len(rows), vocabulary) * 3
    expected = sampler.sample(logits.clone(), rows).token_ids
    asked = [row.sampling for row in rows]
    lengths = [row.num_tokens for row in rows]
    history = penalties.History(
        ints([token for row in rows for token in row.token_ids]),
        ints(np.cumsum([0, *lengths]).tolist()),
        ints([row.num_prompt_tokens for row in rows]),
        max(lengths),
    )
    strengths = penalties.Penalties(
        *(
            torch.tensor([getattr(one, name) for one in asked], device=DEVICE)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        )
    )
    draw = sampling.Draw(
        torch.tensor([one.temperature for one in asked], device=DEVICE),
        sampling.filters_of(*([getattr(s, name) for s in asked] for name in ("top_k", "top_p", "min_p")), DEVICE),
        row_keys([one.seed for one in asked], lengths).to(DEVICE),
    )
    assert sampling.sample(logits.to(DEVICE), draw, history, strengths).tolist() == expected
