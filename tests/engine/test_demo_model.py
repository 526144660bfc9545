"""The demo model: real weights in bf16, against transformers, and a real answer to a real question."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.engine.runner import Runner
from baton.proto.settings import EngineSettings
from baton.scheduler.plan import Chunk, Step

TEXT = (
    "The lighthouse keeper climbed the stairs each evening, counting all two hundred and eleven of them, and lit the "
    "lamp before the first boats came home. In winter the wind was so loud that he sang to hear himself think."
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(EngineSettings(model="demo", num_blocks=128, threads=1))


def test_logits_are_as_near_to_fp32_as_those_of_transformers_in_bf16(runner: Runner, new_sequence: Any) -> None:
    """Two bf16 computations differ by their roundings, so neither can be held to the other.

    Both are compared with the same weights in fp32. Root-mean-square error over all positions and the whole vocabulary;
    half as much again leaves room for another order of the same roundings, and a wrong formula is far outside.
    """
    path = runner.description.path
    token_ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT).ids
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        with torch.inference_mode():
            logits[dtype] = model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
        del model
    vocabulary = runner.description.vocab_size
    sequence = new_sequence(token_ids, temperature=0.0, logprobs=vocabulary, prompt_logprobs=vocabulary)
    sequence.block_ids = list(range(10, 0, -1))
    middle = len(token_ids) // 2
    entries = []
    for number, (start, length) in enumerate([(0, middle), (middle, len(token_ids) - middle)]):
        result = runner.run(Step(number, [Chunk(sequence, start, length, start > 0)], length)).logprobs[0]
        entries.extend(result.prompt)
        if result.sampled is not None:
            entries.append(result.sampled)
    ours = torch.empty_like(logits[torch.float32])
    for row, entry in enumerate(entries):
        ours[row, list(entry.top_ids)] = torch.tensor(entry.top_logprobs)

    def error(of: torch.Tensor) -> float:
        return (of - logits[torch.float32]).square().mean().sqrt().item()

    assert error(ours) <= 1.5 * error(logits[torch.bfloat16])


def test_the_capital_of_france_is_paris(runner: Runner, new_sequence: Any) -> None:
    path = runner.description.path
    template = transformers.AutoTokenizer.from_pretrained(path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = template.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    sequence = new_sequence(tokenizer.encode(text, add_special_tokens=False).ids, temperature=0.0, max_tokens=20)
    sequence.block_ids = [40, 3, 77, 12, 9, 8]
    computed = 0
    while sequence.token_ids[-1] not in runner.description.eos_token_ids or not computed:
        length = len(sequence.token_ids) - computed
        token_id = runner.run(Step(0, [Chunk(sequence, computed, length, True)], length)).token_ids[0]
        computed += length
        sequence.token_ids.append(token_id)
        assert sequence.num_output_tokens < 20
    answer = tokenizer.decode(sequence.token_ids[sequence.num_prompt_tokens :])
    assert answer == "The capital of France is Paris."
