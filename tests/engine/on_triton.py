"""A decoder of Triton kernels computes what the decoder of plain torch computes: whole models, chunked, batched, paged.

Not collected by itself: the interpreter has to be switched on before Triton is imported, for the whole process.
`test_triton_decoder.py` runs it with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine import part as part_module
from baton.engine.runner import Runner
from baton.kernels.dispatch import triton_kernels

VARIANTS = [("llama", {"num_hidden_layers": 2}), ("qwen3", {"num_hidden_layers": 2, "head_dim": 64})]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_tokens_and_logprobs_equal_those_of_plain_torch(
    tiny_model_dir: Callable[..., Path],
    runner_for: Callable[..., Runner],
    new_sequence: Any,
    play: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    overrides: dict[str, Any],
) -> None:
    directory = tiny_model_dir(family, **overrides)
    plain = runner_for(directory, cpu_kernels="torch")
    monkeypatch.setattr(part_module, "kernels_for", lambda device, cpu: triton_kernels())
    triton = runner_for(directory, cpu_kernels="torch", threads=2)
    assert type(triton._decoder.kernels).__name__ == "TritonKernels"  # type: ignore[union-attr]
    prompts = [random.Random(length).choices(range(320), k=length) for length in (1, 15, 40)]
    played, tokens = [], []
    for runner in (plain, triton):
        sequences = [
            new_sequence(prompt, max_tokens=3, temperature=0.8 * (i % 2), seed=i, logprobs=0, prompt_logprobs=0)
            for i, prompt in enumerate(prompts)
        ]
        played.append(play(runner, sequences, seed=4))
        tokens.append([sequence.token_ids for sequence in sequences])
    assert tokens[0] == tokens[1]
    for expected, actual in zip(*played, strict=True):
        pairs = zip(expected.prompt + expected.sampled, actual.prompt + actual.sampled, strict=True)
        assert all(one.logprob == pytest.approx(other.logprob, abs=1e-3) for one, other in pairs)
