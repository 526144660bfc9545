"""What config.json may say, in the spellings that are in circulation, and what is refused with the key's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.models.config import ModelConfig, RopeConfig, UnsupportedModel, read_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def read(directory: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in (BASE | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return read_config(directory)


def test_defaults_are_filled_in(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=...)
    assert (config.family, config.head_dim, config.num_kv_heads) == ("llama", 16, 4)
    assert [config.tie_word_embeddings, config.attention_bias, config.mlp_bias] == [False] * 3
    assert config.rope == RopeConfig("default", 10000.0)
    assert (config.sliding_window, config.bos_token_id, config.eos_token_ids) == (None, None, (2,))


def test_end_of_sequence_ids_come_from_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [5, 2, 9]}).eos_token_ids == (2, 5, 9)
    assert read(tmp_path, {"eos_token_id": 7}, eos_token_id=[1, 3]).eos_token_ids == (1, 3, 7)
    assert read(tmp_path, {}, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("linear", {"factor": 2.0}), ("llama3", LLAMA3 | {"factor": 8.0}), ("yarn", {"factor": 4.0})],
)
def test_old_and_new_spellings_of_rope_mean_the_same(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    new = read(tmp_path, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **options})
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"type": kind, **options})
    assert new.rope == old.rope
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == (kind, 5e5, options["factor"])


def test_yarn_stretches_the_longest_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert read(tmp_path, rope_scaling=scaling).max_model_len == 4096
    assert read(tmp_path, rope_scaling=scaling, max_position_embeddings=8192).max_model_len == 8192


def test_the_digest_names_the_content(tmp_path: Path) -> None:
    one = read(tmp_path).digest
    assert read(tmp_path).digest == one
    assert read(tmp_path, rms_norm_eps=1e-6).digest != one


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, 64),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            64,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            None,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            64,
        ),
    ],
)
def test_a_sliding_window_counts_where_it_is_in_effect(
    tmp_path: Path, changes: dict[str, Any], window: int | None
) -> None:
    assert read(tmp_path, **changes).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures \['GPT2LMHeadModel'\].*LlamaForCausalLM"),
        ({"architectures": ...}, r"architectures \[\]"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'.*yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' lacks low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"vocab_size": ...}, "vocab_size: None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({"intermediate_size": "128"}, "intermediate_size: '128'"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_file_that_is_no_configuration_is_refused_with_its_path(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_config(tmp_path)
