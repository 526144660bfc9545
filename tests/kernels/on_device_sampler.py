"""Sampling by the Triton kernels against the engine's sampler on the CPU: the same tokens. Run as on_device.py is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton import knobs

from baton.engine import device_sampler, sampler
from baton.proto.messages import LogitBias, Sampling

DEVICE = torch.device("cpu" if knobs.runtime.interpret else "cuda")
VOCABULARY = 1200


def mixed_rows(random: np.random.Generator) -> list[sampler.Row]:
    """Every kind of row: greedy, filtered in every way, penalised, biased, with prompt and output so far."""
    rows = []
    for i in range(28):
        biases = tuple(LogitBias(int(t), 3.0) for t in random.integers(0, VOCABULARY + 5, random.integers(0, 3)))
        wanted = Sampling(
            temperature=float(random.choice([0.0, 0.7, 1.0, 1.6])),
            top_k=int(random.choice([0, 1, 20])),
            top_p=float(random.choice([1.0, 0.4, 0.95])),
            min_p=float(random.choice([0.0, 0.02])),
            repetition_penalty=float(random.choice([1.0, 1.3])),
            presence_penalty=float(random.choice([0.0, 0.4])),
            frequency_penalty=float(random.choice([0.0, -0.3])),
            min_tokens=int(random.choice([0, 100])),
            stop_token_ids=tuple(random.integers(0, VOCABULARY + 5, 3).tolist()),
            seed=int(random.integers(2**63)),
            logit_bias=biases,
            logprobs=random.choice([None, 0, 3]),
        )
        tokens = random.integers(0, VOCABULARY, 3 * i).tolist()
        rows.append(sampler.Row(wanted, tokens, i, 3 * i))
    return rows


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_are_those_of_the_engines_sampler_on_the_cpu(seed: int, masked: bool) -> None:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    rows = mixed_rows(random)
    logits = torch.randn(len(rows), VOCABULARY) * 3
    mask = None
    if masked:
        bits = torch.from_numpy(random.integers(-(2**31), 2**31, (9, -(-VOCABULARY // 32))).astype(np.int32))
        mask = sampler.Mask(list(range(0, 27, 3)), bits)
    expected = sampler.sample(logits.clone(), rows, mask)
    told = device_sampler.choose(logits.to(DEVICE), rows, mask).read()
    assert told.token_ids == expected.token_ids
    assert told.logprobs.keys() == expected.logprobs.keys()
    for row, entry in told.logprobs.items():
        wanted = expected.logprobs[row]
        assert (entry.token_id, entry.rank, entry.top_ids) == (wanted.token_id, wanted.rank, wanted.top_ids)
        assert [entry.logprob, *entry.top_logprobs] == pytest.approx([wanted.logprob, *wanted.top_logprobs], abs=1e-4)


def test_rows_that_want_the_most_likely_token_alone_get_it() -> None:
    logits = torch.randn(5, VOCABULARY)
    rows = [sampler.Row(Sampling(temperature=0.0), [1, 2], 1, 2)] * 5
    assert device_sampler.choose(logits.to(DEVICE), rows).read().token_ids == logits.argmax(1).tolist()
