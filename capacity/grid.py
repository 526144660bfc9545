"""The configurations that a sweep compares, from a cluster file and what is to vary.

Owns: shapes (`2:1` is two prefill workers and one decode worker, `4` is four co-located ones), the grid over them, and
the baseline that every shape is held against: as many co-located workers.
Refuses to know: traffic, and how a configuration is measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.capacity.cluster import ClusterSetup, PoolSetup
from baton.proto.settings import EngineSettings
from baton.router.config import MAX_POOL_SIZE, ClusterConfig, ConfigError
from baton.router.placement import POLICIES

BINDINGS = ("early", "late")
_RATIO = re.compile(r"(\d+):(\d+)")
_GIB = 1 << 30
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class GridError(ValueError):
    """A configuration that cannot be; the message names option, value and bound."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many workers of each kind. Either prefill and decode workers, or co-located ones."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.colocated

    @property
    def prefill_share(self) -> float:
        return self.prefill / self.total

    @property
    def label(self) -> str:
        return f"{self.colocated} co-located" if self.colocated else f"{self.prefill}:{self.decode}"

    @property
    def baseline(self) -> Shape:
        return Shape(colocated=self.total)


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides how much KV a worker holds. `num_blocks`, if not 0, is that of a worker: the cluster
    file's memory is then that of another device."""

    name: str
    kv_bytes_per_token: int
    max_model_len: int
    num_blocks: int = 0

    @classmethod
    def of(cls, engine: EngineSettings) -> Model:
        """Of the demo model, or from the `config.json` of a model's directory. Raises GridError."""
        num_bytes = _ELEMENT_BYTES[engine.dtype]
        if engine.model == "demo":
            return cls("demo", 2 * 30 * 3 * 64 * num_bytes, 8192)
        path = Path(engine.model).expanduser() / "config.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            heads = found["num_attention_heads"]
            head_dim = found.get("head_dim") or found["hidden_size"] // heads
            kv_heads = found.get("num_key_value_heads") or heads
            per_token = 2 * found["num_hidden_layers"] * kv_heads * head_dim * num_bytes
            return cls(engine.model, per_token, found["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GridError(
                f"model {engine.model!r}: {path} does not tell its shape ({type(error).__name__}: {error}); name a "
                "directory with a Hugging Face config.json, or demo"
            ) from None


@dataclass(frozen=True, slots=True)
class Knobs:
    """What may vary besides the shape; None leaves it as the cluster file has it.

    `chunk_budget`: `max_num_batched_tokens` of those who read prompts.
    """

    chunk_budget: int | None = None
    policy: str | None = None
    binding: str | None = None

    @property
    def label(self) -> str:
        parts = [f"chunk {self.chunk_budget}"] if self.chunk_budget is not None else []
        return ", ".join([*parts, *(each for each in (self.policy, self.binding) if each is not None)])


@dataclass(frozen=True, slots=True)
class Configuration:
    """A row of a sweep."""

    shape: Shape
    setup: ClusterSetup
    knobs: Knobs = field(default_factory=Knobs)

    @property
    def label(self) -> str:
        return f"{self.shape.label}, {self.knobs.label}" if self.knobs.label else self.shape.label

    @property
    def is_baseline(self) -> bool:
        return self.shape.colocated > 0


def parse_ratios(text: str, total: int | None = None) -> tuple[Shape, ...]:
    """`1:3,2:2,3:1`, or `all` ways to share out `total` workers. Raises GridError."""
    if text == "all":
        if total is None:
            raise GridError("--ratios all: needs --total, the number of workers to share out")
        if not 2 <= total <= MAX_POOL_SIZE:
            raise GridError(f"--total: is {total}, must be from 2 to {MAX_POOL_SIZE}")
        return tuple(Shape(prefill, total - prefill) for prefill in range(1, total))
    shapes = []
    for part in text.split(","):
        found = _RATIO.fullmatch(part.strip())
        if found is None:
            raise GridError(f"--ratios: {part.strip()!r} is no ratio, must be PREFILL:DECODE as 1:3, or all")
        shape = Shape(int(found[1]), int(found[2]))
        for role, size in (("prefill", shape.prefill), ("decode", shape.decode)):
            if not 1 <= size <= MAX_POOL_SIZE:
                problem = f"has {size} {role} workers, must have 1 to {MAX_POOL_SIZE}"
                raise GridError(f"--ratios: {part.strip()!r} {problem}: prefill and decode work in pairs")
        if total is not None and shape.total != total:
            raise GridError(f"--ratios: {part.strip()!r} has {shape.total} workers, must have --total {total}")
        if shape not in shapes:
            shapes.append(shape)
    return tuple(shapes)


def configurations(
    config: ClusterConfig, model: Model, shapes: Sequence[Shape], knobs: Sequence[Knobs] = (Knobs(),)
) -> tuple[Configuration, ...]:
    """Every shape with every setting of the knobs, then the baselines of as many workers. Raises GridError."""
    baselines = dict.fromkeys(shape.baseline for shape in shapes)
    found: dict[Configuration, None] = {}
    for shape in (*shapes, *baselines):
        for knob in knobs:
            # A co-located worker is not chosen twice, so there is nothing to bind early or late.
            knob = replace(knob, binding=None) if shape.colocated else knob
            found[Configuration(shape, setup_of(config, model, shape, knob), knob)] = None
    return tuple(found)


def knobs_of(
    chunk_budgets: Sequence[int] = (), policies: Sequence[str] = (), bindings: Sequence[str] = ()
) -> tuple[Knobs, ...]:
    """All combinations. Raises GridError for a value that there is not."""
    for option, values, known in (("--policies", policies, POLICIES), ("--bindings", bindings, BINDINGS)):
        for value in values:
            if value not in known:
                raise GridError(f"{option}: {value!r} is not one of {', '.join(known)}")
    return tuple(
        Knobs(budget, policy, binding)
        for budget in chunk_budgets or (None,)
        for policy in policies or (None,)
        for binding in bindings or (None,)
    )


def setup_of(config: ClusterConfig, model: Model, shape: Shape, knobs: Knobs | None = None) -> ClusterSetup:
    """The cluster of the file in another shape. Raises GridError."""
    knobs = knobs or Knobs()
    try:
        resized = config.resized(prefill=shape.prefill, decode=shape.decode, colocated=shape.colocated)
    except ConfigError as error:
        raise GridError(f"ratio {shape.label}: {error}") from None
    router = config.router
    if knobs.policy is not None:
        router = replace(router, policy=knobs.policy)
    if knobs.binding is not None:
        router = replace(router, binding=knobs.binding)
    pools = tuple(_pools(resized, model, knobs))
    engine = resized.pools[0].engine
    longest = engine.max_model_len or model.max_model_len
    return ClusterSetup(
        label=shape.label,
        pools=pools,
        max_model_len=min(longest, *(pool.num_blocks * engine.block_size for pool in pools)),
        block_size=engine.block_size,
        kv_bytes_per_token=model.kv_bytes_per_token,
        router=router,
        lease_s=config.transfer.lease_s,
    )


def _pools(config: ClusterConfig, model: Model, knobs: Knobs) -> Iterator[PoolSetup]:
    for pool in config.pools:
        if not pool.size:
            continue
        engine, scheduler = pool.engine, pool.scheduler
        block_bytes = engine.block_size * model.kv_bytes_per_token
        num_blocks = model.num_blocks or engine.num_blocks or int(engine.kv_cache_gib * _GIB) // block_bytes
        if num_blocks < 1:
            raise GridError(
                f"pool {pool.name}: kv_cache_gib {engine.kv_cache_gib:g} holds no block of {block_bytes} bytes"
            )
        if knobs.chunk_budget is not None and pool.role.value != "decode":
            scheduler = replace(scheduler, max_num_batched_tokens=knobs.chunk_budget)
        yield PoolSetup(pool.role, pool.size, num_blocks, scheduler)
