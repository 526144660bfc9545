"""Small random models of every family, as directories that both the engine and the router can load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY_VOCABULARY = 320
_IM_END = 257
_TINY = {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": _IM_END,
    "pad_token_id": None,
    "sliding_window": None,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TinyModelDir = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> TinyModelDir:
    """A factory: `tiny_model_dir("llama", num_key_value_heads=4)` is the directory of a random fp32 model.

    Families: llama, mistral, qwen2, qwen3. Overrides are keys of the transformers config; `max_shard_size` goes to
    `save_pretrained`. Same arguments, same directory within a test session, and same weights always. Token ids 0 to 255
    are one byte each, 256 is <|im_start|>, 257 is <|im_end|> (end of sequence), the rest are words of their own.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", **overrides: Any) -> Path:
        key = json.dumps([family, overrides], sort_keys=True)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"tiny-{family}")
            _save_model(directory, family, overrides, int(hashlib.sha256(key.encode()).hexdigest()[:8], 16))
            _save_tokenizer(directory, overrides.get("vocab_size", TINY_VOCABULARY))
            made[key] = directory
        return made[key]

    return make


def _save_model(directory: Path, family: str, overrides: dict[str, Any], seed: int) -> None:
    import torch
    import transformers

    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    options = _TINY | overrides
    shard_size = options.pop("max_shard_size", "5GB")
    config = getattr(transformers, f"{classes[family]}Config")(**options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{classes[family]}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        # Norms start as ones and biases as zeros: neither would show that it is forgotten.
        if parameter.dim() == 1:
            parameter.data.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(directory, max_shard_size=shard_size)


def _save_tokenizer(directory: Path, vocabulary: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([f"<word{i}>" for i in range(tokenizer.get_vocab_size(), vocabulary)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
