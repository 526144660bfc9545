"""An 8B-shaped model of random weights, for measuring the engine where no checkpoint is at hand.

`write_checkpoint` makes a directory that `Runner` loads as any other. The weights repeat one random piece, so that
writing 16 GB costs little more than the disk does; what a step costs does not depend on what they are.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.runner import Runner
from baton.proto.messages import Request, Sampling
from baton.proto.settings import EngineSettings
from baton.scheduler.plan import Chunk, Step
from baton.scheduler.sequence import Sequence

_PIECE = 1 << 24  # numbers of the piece that repeats
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model, and what is measured with it."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    prompt: int
    batches: tuple[int, ...]
    context: int


EIGHT_BILLION = Shape(4096, 14_336, 32, 32, 8, 128_256, prompt=2048, batches=(1, 32, 128), context=1024)
TINY = Shape(128, 256, 2, 2, 1, 512, prompt=40, batches=(1, 3), context=33)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of steps of one kind, by the median step."""

    name: str
    step_ms: float
    tokens_s: float


def write_checkpoint(directory: Path, shape: Shape) -> None:
    """config.json and one safetensors file in bf16."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header: dict[str, object] = {}
    end = 0
    for name, extents in _tensors(shape):
        start, end = end, end + 2 * torch.Size(extents).numel()
        header[name] = {"dtype": "BF16", "shape": list(extents), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    piece = (torch.randn(_PIECE, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    octets = memoryview(piece.view(torch.uint8).numpy())
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while end > 0:
            file.write(octets[: min(end, len(octets))])
            end -= len(octets)


def measure(directory: Path, shape: Shape, device: str, rounds: int) -> list[Speed]:
    """Prefill of one prompt, then decode at each batch size, through the engine's Runner."""
    longest = max(shape.prompt, shape.context) + 8
    blocks = max(shape.batches) * -(-longest // _BLOCK_SIZE)
    dtype = "bfloat16" if device == "cuda" else "float32"
    runner = Runner(
        EngineSettings(model=str(directory), dtype=dtype, device=device, num_blocks=blocks, block_size=_BLOCK_SIZE)
    )
    speeds = [_speed("prefill", runner, _step([(0, shape.prompt)], shape), rounds)]
    for batch in shape.batches:
        step = _step([(shape.context - 1, 1)] * batch, shape)
        speeds.append(_speed(f"decode, batch {batch}, context {shape.context}", runner, step, rounds))
    return speeds


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    head_dim = shape.hidden // shape.heads
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden)
    for i in range(shape.layers):
        prefix = f"model.layers.{i}."
        yield prefix + "input_layernorm.weight", (shape.hidden,)
        yield prefix + "self_attn.q_proj.weight", (shape.heads * head_dim, shape.hidden)
        yield prefix + "self_attn.k_proj.weight", (shape.kv_heads * head_dim, shape.hidden)
        yield prefix + "self_attn.v_proj.weight", (shape.kv_heads * head_dim, shape.hidden)
        yield prefix + "self_attn.o_proj.weight", (shape.hidden, shape.heads * head_dim)
        yield prefix + "post_attention_layernorm.weight", (shape.hidden,)
        yield prefix + "mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield prefix + "mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield prefix + "mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocabulary, shape.hidden)


def _step(spans: list[tuple[int, int]], shape: Shape) -> Step:
    """Chunks (start, tokens) of sequences of their own, whose past is whatever the pool holds: zeros."""
    chunks = []
    for i, (start, num_tokens) in enumerate(spans):
        length = start + num_tokens
        tokens = tuple((7 * j + i) % shape.vocabulary for j in range(length))
        sequence = Sequence(Request(str(i), tokens, length, Sampling(temperature=0.0, max_tokens=1)), 0, 0.0)
        blocks = -(-length // _BLOCK_SIZE)
        sequence.block_ids.extend(range(i * blocks, (i + 1) * blocks))
        chunks.append(Chunk(sequence, start, num_tokens, True))
    return Step(0, chunks, sum(num_tokens for _, num_tokens in spans))


def _speed(name: str, runner: Runner, step: Step, rounds: int) -> Speed:
    runner.run(step)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        result = runner.run(step)  # returns token ids, so whatever the device had to do is done
        times.append(time.perf_counter() - started)
        if any(token_id < 0 for token_id in result.token_ids):
            raise RuntimeError(f"{name}: a chunk that samples has no token: {result.token_ids}")
    median = sorted(times)[len(times) // 2]
    return Speed(name, median * 1e3, step.num_tokens / median)
