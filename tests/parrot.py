"""A model that says its prompt again, token by token, so that a test chooses the output; and its vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from paper_model import PaperRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.scheduler.sequence import Sequence

VOCAB_SIZE = 420
CORPUS = [
    "hello world, hello there. the quick brown fox jumps over the lazy dog",
    "你好世界 你们好 今天天气很好 世界你好",
    "🎉🎊👩‍👩‍👧‍👦 👍🏽 🇩🇪 e\u0301a\u0308o\u0308 नमस्ते สวัสดี ﷽",
]
PIECES = [
    "hello",
    " world",
    "你",
    "好",
    "世",
    "界",
    "🎉",
    "👩‍👩‍👧",
    "e\u0301",
    "ab",
    "a",
    "b",
    "\n",
    " ",
    '"',
    "\\",
    "สวัส",
    "\0",
]


class ParrotRunner(PaperRunner):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.description = replace(self.description, vocab_size=VOCAB_SIZE, eos_token_ids=())

    def _choose(self, sequence: Sequence, context: list[int]) -> int:
        return context[len(context) - sequence.num_prompt_tokens]


def write_parrot_tokenizer(directory: Path) -> Path:
    """Byte-level, as GPT-2's: a token is some bytes, which often end within a character. The template adds nothing."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS * 3, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096}))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory
