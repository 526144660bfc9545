"""What time things take: steps, hand-offs, the router. Measured on a machine or estimated for one.

Owns: `CostModel`, the form of its formulas, and its file. Refuses to know: where the figures come from
(`capacity.calibrate` fits them, `capacity.presets` estimates them) and who asks.

    step      overhead + rows(prefill tokens + decode sequences)      products of matrices: reading weights, arithmetic
              + pair x attention pairs                                each token of a chunk attends to what is before it
              + sequence x decode sequences + kv_token x KV tokens    a decoding row samples, and reads its context
    transfer  start + byte x bytes + run x runs                       a run is a stretch of adjacent blocks

Every coefficient is at least 0 and `rows` never falls, so more work never takes less time.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.proto.settings import bounded
from baton.router.schema import ConfigError, as_section, checked_number, filled, subsection

FORMAT = "baton-cost-model"
VERSION = 2
_READS = (1, 2)
"""Version 1 had no `cores`."""


class CostModelError(ValueError):
    """A file that is no cost model; the message names file, field, value and bound."""


class Source(StrEnum):
    MEASURED = "measured"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the figures come from. `threads`: compute threads of a worker, 0 where that says nothing."""

    source: Source
    machine: str = ""
    model: str = ""
    dtype: str = ""
    date: str = ""
    threads: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by number of rows: linear between its points, and beyond the last one as between the last two.

    Below the first point it is flat: weights are read whole, however few rows there are.
    """

    rows: tuple[float, ...] = (0.0,)
    seconds: tuple[float, ...] = (0.0,)
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise ValueError(f"{len(self.rows)} rows and {len(self.seconds)} seconds: there must be as many, and one")
        numbers = (*self.rows, *self.seconds)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("rows and seconds must be finite and not negative")
        if any(a >= b for a, b in pairwise(self.rows)) or any(a > b for a, b in pairwise(self.seconds)):
            raise ValueError("rows must ascend, and seconds must not descend")
        points = pairwise(zip(self.rows, self.seconds, strict=True))
        slopes = [(s1 - s0) / (r1 - r0) for (r0, s0), (r1, s1) in points]
        object.__setattr__(self, "_slopes", (*slopes, slopes[-1] if slopes else 0.0))

    def at(self, rows: float) -> float:
        index = bisect_right(self.rows, rows) - 1
        if index < 0:
            return self.seconds[0]
        return self.seconds[index] + self._slopes[index] * (rows - self.rows[index])


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of a step, in seconds; see the module's formula."""

    rows: Curve = Curve()
    overhead_s: float = bounded(0.0, minimum=0)
    pair_s: float = bounded(0.0, minimum=0)
    sequence_s: float = bounded(0.0, minimum=0)
    kv_token_s: float = bounded(0.0, minimum=0)


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Coefficients of one read of KV. `control_s`: a hand-off message there and its answer back."""

    start_s: float = bounded(0.0, minimum=0)
    byte_s: float = bounded(0.0, minimum=0)
    run_s: float = bounded(0.0, minimum=0)
    control_s: float = bounded(0.0, minimum=0)


@dataclass(frozen=True, slots=True)
class RoutingCost:
    """What lies between client and workers.

    `routing_s`: from a client's send until the leg is in a worker's inbox, where nothing waits. `delivery_s`: from the
    end of a step until the client holds its tokens. `report_delay_s`: from the end of a step until the router knows the
    worker's load. `token_cpu_s`: by how much a token makes a step longer, where router and client share the workers'
    cores and the steps were measured without them. Calibration measures them together and leaves it at 0.
    """

    routing_s: float = bounded(0.0, minimum=0)
    delivery_s: float = bounded(0.0, minimum=0)
    report_delay_s: float = bounded(0.0, minimum=0)
    token_cpu_s: float = bounded(0.0, minimum=0)


@dataclass(frozen=True, slots=True)
class CoreCost:
    """What processes take from each other where they share cores, and a cluster's set-up says so (`shared_cores`).

    `request_cpu_s`, `step_cpu_s`, `token_cpu_s`: CPU time of router and client, and of workers beside their steps, for
    a request, for what a step has to say, and for each of its tokens. `crowded_speed`: of a core when all are busy,
    over that of one which is busy alone.
    """

    request_cpu_s: float = bounded(0.0, minimum=0)
    step_cpu_s: float = bounded(0.0, minimum=0)
    token_cpu_s: float = bounded(0.0, minimum=0)
    crowded_speed: float = bounded(1.0, minimum=0.01, maximum=1)


@dataclass(frozen=True, slots=True)
class Jitter:
    """How steps scatter: quantiles of measured over predicted time, at even fractions from 0 to 1; empty: not at all.

    Steps that only decode are short and scatter more than others. The mean is not 1: a robust fit describes the usual
    step, and what it set aside (a core taken away for a moment) comes back here.
    """

    decode: tuple[float, ...] = ()
    prefill: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, ratios in (("decode", self.decode), ("prefill", self.prefill)):
            if any(not (math.isfinite(ratio) and ratio > 0) for ratio in ratios):
                raise ValueError(f"{name}: every ratio must be finite and above 0")
            if any(a > b for a, b in pairwise(ratios)):
                raise ValueError(f"{name}: quantiles must not descend")

    def at(self, fraction: float, prefill_tokens: int) -> float:
        """The factor of a step for an even draw from [0, 1]."""
        ratios = self.prefill if prefill_tokens else self.decode
        if not ratios:
            return 1.0
        position = fraction * (len(ratios) - 1)
        below = min(int(position), len(ratios) - 2)
        return ratios[below] + (position - below) * (ratios[below + 1] - ratios[below]) if below >= 0 else ratios[0]


@dataclass(frozen=True, slots=True)
class Residual:
    """How well a fit describes the measured steps of one regime: |measured / predicted - 1|, its median and p90."""

    regime: str
    steps: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """All that the simulator knows about time."""

    origin: Origin
    steps: StepCost
    transfer: TransferCost = TransferCost()
    routing: RoutingCost = RoutingCost()
    cores: CoreCost = CoreCost()
    jitter: Jitter = Jitter()
    residuals: tuple[Residual, ...] = ()

    def step_s(self, prefill_tokens: int, attention_pairs: int, decode_sequences: int, kv_tokens: int) -> float:
        """A whole turn of the step loop: plan, run, commit; its tokens leave at its end.

        `attention_pairs`: for each token of each chunk the tokens that it attends to, itself included. `kv_tokens`: the
        context of all decoding rows together.
        """
        cost = self.steps
        return (
            cost.overhead_s
            + cost.rows.at(prefill_tokens + decode_sequences)
            + cost.pair_s * attention_pairs
            + cost.sequence_s * decode_sequences
            + cost.kv_token_s * kv_tokens
        )

    def transfer_s(self, num_bytes: int, num_runs: int) -> float:
        """One read of KV, from its start until it has settled."""
        cost = self.transfer
        return cost.start_s + cost.byte_s * num_bytes + cost.run_s * num_runs

    def scaled(self, factor: float) -> CostModel:
        """Of a device on which every step takes `factor` times as long."""
        steps = self.steps
        return replace(
            self,
            steps=StepCost(
                rows=Curve(steps.rows.rows, tuple(seconds * factor for seconds in steps.rows.seconds)),
                overhead_s=steps.overhead_s * factor,
                pair_s=steps.pair_s * factor,
                sequence_s=steps.sequence_s * factor,
                kv_token_s=steps.kv_token_s * factor,
            ),
        )

    # --- its file ---------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        data = asdict(self)
        del data["steps"]["rows"]["_slopes"]
        return json.dumps({"format": FORMAT, "version": VERSION, **data}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_json(cls, text: str, source: str = "cost model") -> CostModel:
        """`source` goes in front of every complaint. Raises CostModelError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise CostModelError(f"{source}: is not JSON: {error}") from error
        try:
            return _read(data)
        except ConfigError as error:
            raise CostModelError(f"{source}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Raises CostModelError, or OSError where there is no such file."""
        return cls.from_json(path.read_text(encoding="utf-8", errors="replace"), str(path))


_SECTIONS = ("format", "version", *(each.name for each in fields(CostModel)))


def _read(data: object) -> CostModel:
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ConfigError("", f"is no cost model: it must be an object whose format is {FORMAT!r}")
    version = data.get("version")
    if version not in _READS:
        known = " or ".join(map(str, _READS))
        raise ConfigError("version", f"is {version!r}, must be {known}: calibrate again")
    if version == 1:
        data = {"cores": asdict(CoreCost()), **data}
    for key in data:
        if key not in _SECTIONS:
            raise ConfigError(str(key), f"is not a field; known are {', '.join(_SECTIONS)}")
    for name in _SECTIONS:
        _present(data, name, name)
    steps = dict(subsection(data, "steps", "steps"))
    curve = subsection(steps, "rows", "steps.rows")
    rows, seconds = (_numbers(curve, name, f"steps.rows.{name}") for name in ("rows", "seconds"))
    for each in fields(StepCost):
        _present(steps, each.name, f"steps.{each.name}")
    del steps["rows"]
    jitter = subsection(data, "jitter", "jitter")
    try:
        scatter = Jitter(*(_numbers(jitter, name, f"jitter.{name}") for name in ("decode", "prefill")))
    except ValueError as error:
        raise ConfigError("jitter", str(error)) from error
    try:
        made = StepCost(rows=Curve(rows, seconds))
    except ValueError as error:
        raise ConfigError("steps.rows", str(error)) from error
    return CostModel(
        origin=_origin(subsection(data, "origin", "origin")),
        steps=filled(made, steps, "steps"),
        transfer=_section(TransferCost(), data, "transfer"),
        routing=_section(RoutingCost(), data, "routing"),
        cores=_section(CoreCost(), data, "cores"),
        jitter=scatter,
        residuals=_residuals(data["residuals"]),
    )


def _section(base: Any, data: Mapping[str, Any], name: str) -> Any:
    """A dataclass of numbers, all of which must be there."""
    section = subsection(data, name, name)
    for each in fields(base):
        _present(section, each.name, f"{name}.{each.name}")
    return filled(base, section, name)


def _origin(section: Mapping[str, Any]) -> Origin:
    sources = [source.value for source in Source]
    if section.get("source") not in sources:
        raise ConfigError("origin.source", f"is {section.get('source')!r}, must be one of {', '.join(sources)}")
    rest = {key: value for key, value in section.items() if key != "source"}
    return filled(Origin(Source(section["source"])), rest, "origin")


def _residuals(data: object) -> tuple[Residual, ...]:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ConfigError("residuals", "must be a list")
    return tuple(
        filled(Residual("", 0, 0.0, 0.0), as_section(row, f"residuals[{i}]"), f"residuals[{i}]")
        for i, row in enumerate(data)
    )


def _numbers(section: Mapping[str, Any], name: str, path: str) -> tuple[float, ...]:
    _present(section, name, path)
    values = section[name]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(path, "must be a list of numbers")
    return tuple(checked_number(value, float, f"{path}[{i}]", 0) for i, value in enumerate(values))


def _present(section: Mapping[str, Any], name: str, path: str) -> None:
    if name not in section:
        raise ConfigError(path, "is missing")
