"""What a checkpoint's config.json says about a decoder, checked and with every default filled in.

Owns: `ModelConfig`, `RopeConfig` and the reading of config.json and generation_config.json. What Baton cannot compute
exactly is refused here, by name, before a weight is read. Refuses to know: weights, and what a family makes of it all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class UnsupportedModel(ValueError):
    """A model that Baton does not compute, or a config.json that makes no sense."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and, for the scaled kinds, their parameters under Hugging Face's names."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    `max_model_len`: the most tokens that the position embedding serves. `sliding_window`: tokens that a layer can look
    back, None where all see everything. `digest`: 16 hex digits that name the content of config.json.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_model_len: int
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    digest: str


def read_config(directory: Path) -> ModelConfig:
    """Reads a checkpoint's configuration; raises UnsupportedModel with the file and the key."""
    raw = _read_json(directory / "config.json")
    generation = _read_json(directory / "generation_config.json", optional=True)
    try:
        return _parse(raw, generation)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{directory / 'config.json'}: {error}") from None


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{path}: not a JSON object")
    return raw


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architectures = raw.get("architectures") or []
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if family is None:
        raise UnsupportedModel(f"architectures {architectures}: supported are {', '.join(FAMILIES)}")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r}: supported is 'silu'")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: quantized weights are not supported")
    hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    num_layers = _count(raw, "num_hidden_layers")
    num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModel(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    head_dim = _count(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd")
    max_positions = _count(raw, "max_position_embeddings", 2048)
    rope = _parse_rope(raw, max_positions)
    if rope.kind == "yarn":
        max_positions = max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    return ModelConfig(
        family=family,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        max_model_len=max_positions,
        sliding_window=_sliding_window(raw, family, num_layers),
        bos_token_id=_first(_token_ids(raw.get("bos_token_id"))),
        eos_token_ids=tuple(
            dict.fromkeys(_token_ids(raw.get("eos_token_id")) + _token_ids(generation.get("eos_token_id")))
        ),
        digest=hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16],
    )


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key}: {value!r} is not a positive integer")
    return value


def _token_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _first(values: list[int]) -> int | None:
    return values[0] if values else None


def _sliding_window(raw: Mapping[str, Any], family: str, num_layers: int) -> int | None:
    window = raw.get("sliding_window")
    if window is None or family == "llama":
        return None
    if family == "mistral":
        return int(window)
    if not raw.get("use_sliding_window", False):
        return None
    kinds = raw.get("layer_types") or []
    slides = "sliding_attention" in kinds if kinds else raw.get("max_window_layers", 28) < num_layers
    return int(window) if slides else None


def _parse_rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Both spellings: `rope_parameters` holds everything; before it, `rope_theta` stood beside `rope_scaling`."""
    scaling: dict[str, Any] = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if isinstance(scaling.get("full_attention"), dict):
        scaling = dict(scaling["full_attention"])
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope_type {kind!r}: supported are {', '.join(ROPE_KINDS)}")
    if (scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: only whole heads can be rotated")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if kind == "default":
        return RopeConfig(theta=float(theta))
    original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    original = int(original or max_positions)
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = max_positions / original
    required = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [key for key in required if scaling.get(key) is None and not (key == "factor" and factor is not None)]
    if missing:
        raise UnsupportedModel(f"rope_type {kind!r} lacks {', '.join(missing)}")
    return RopeConfig(
        kind=kind,
        theta=float(theta),
        factor=float(factor or 1.0),
        original_max_position_embeddings=original,
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        attention_factor=_number(scaling.get("attention_factor")),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
    )


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)
