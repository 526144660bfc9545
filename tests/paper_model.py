"""A model whose KV cache is the text itself, for tests of everything around the model.

Each step writes its tokens and their positions into the KV pool. To sample, it reads the whole context back out of the
pool, compares it with what the sequence should hold, and hashes what it read: a block that is missing, stale, mixed up
or overwritten shows as a wrong token and is listed in `errors`. A real pool, real blocks, no arithmetic.
"""

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton import __version__
from baton.engine.description import ModelDescription
from baton.engine.loop import Computed
from baton.proto.messages import KvGeometry
from baton.scheduler.plan import Chunk, Step, StepResult
from baton.scheduler.sequence import Sequence

VOCAB_SIZE = 300
EOS = 299


def paper_token(context: list[int] | np.ndarray) -> int:
    """The next token after a context: any function of all of it will do. Never the end of the sequence."""
    return zlib.crc32(np.asarray(context, dtype=np.int64).tobytes()) % (VOCAB_SIZE - 1)


def paper_output(prompt: list[int] | tuple[int, ...], num_tokens: int) -> list[int]:
    """What the model says after a prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(paper_token(tokens))
    return tokens[len(prompt) :]


class PaperRunner:
    """A `ModelRunner`. `seconds_per_token` makes prompts take time, `step_s` every step; `version` is its code's."""

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        max_model_len: int = 4096,
        seconds_per_token: float = 0.0,
        step_s: float = 0.0,
        version: str = __version__,
    ) -> None:
        self.kv = torch.full((num_blocks, 1, 1, 2, block_size, 1), -1, dtype=torch.int64)
        self.geometry = KvGeometry(
            model="paper",
            version=version,
            dtype="int64",
            block_size=block_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
        )
        self.description = ModelDescription(
            name="paper",
            path=Path("paper"),
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            dtype="int64",
            block_size=block_size,
            num_blocks=num_blocks,
            kv_bytes_per_token=16,
        )
        self.errors: list[str] = []
        self._cells = self.kv.numpy()[:, 0, 0, :, :, 0]
        self._block_size = block_size
        self._seconds_per_token = seconds_per_token
        self._step_s = step_s
        self._sampled: dict[Sequence, int] = {}

    def launch(self, step: Step) -> Computed:
        return Computed(self.run(step))

    def run(self, step: Step) -> StepResult:
        for sequence, start, num_tokens, _ in step.chunks:
            positions = np.arange(start, start + num_tokens)
            blocks = np.asarray(sequence.block_ids)[positions // self._block_size]
            token_ids = self._tokens(sequence, start + num_tokens)[start:]
            self._cells[blocks, 0, positions % self._block_size] = token_ids
            self._cells[blocks, 1, positions % self._block_size] = positions
        pause_s = self._step_s + self._seconds_per_token * step.num_tokens
        if pause_s:
            time.sleep(pause_s)
        token_ids = [self._sample(chunk) if chunk.samples else -1 for chunk in step.chunks]
        self._sampled = {
            chunk.sequence: token_id for chunk, token_id in zip(step.chunks, token_ids, strict=True) if chunk.samples
        }
        return StepResult(token_ids)

    def _tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The first tokens of a sequence; one that it does not have yet is what the last step sampled."""
        tokens = sequence.token_ids[:num_tokens]
        return tokens if len(tokens) == num_tokens else [*tokens, self._sampled[sequence]]

    def _sample(self, chunk: Chunk) -> int:
        sequence, block_ids = chunk.sequence, chunk.sequence.block_ids
        tokens = self._tokens(sequence, chunk.start + chunk.num_tokens)
        positions = np.arange(len(tokens))
        blocks = np.asarray(block_ids)[positions // self._block_size]
        read = self._cells[blocks, 0, positions % self._block_size]
        places = self._cells[blocks, 1, positions % self._block_size]
        if not np.array_equal(read, tokens) or not np.array_equal(places, positions):
            wrong = int(np.argmax((read != np.asarray(tokens)) | (places != positions)))
            self.errors.append(f"{sequence}: token {wrong} of {len(tokens)} is not in its place")
        return self._choose(sequence, tokens)

    def _choose(self, sequence: Sequence, context: list[int]) -> int:
        """The next token, when the context has been read back and found right."""
        return paper_token(context)


def write_paper_tokenizer(directory: Path) -> Path:
    """A byte-level tokenizer without merges, and the config files that a model directory has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary |= {f"<extra_{index}>": index for index in range(len(alphabet), EOS)}
    vocabulary["<eos>"] = EOS
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(
        json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "max_position_embeddings": 4096})
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<eos>",
                "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
            }
        )
    )
    return directory
