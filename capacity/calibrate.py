"""From a worker's notes of its steps to a cost model.

Owns: which steps count, the regression, and how good it is. Refuses to know: how the load was made
(`client.calibrate`), and what the figures are for.

    step logs -> observations -> robust fit with coefficients of at least 0 -> CostModel, residuals by regime

Where the load knows how much CPU time everything took, an observation is not what a step took, but what it would have
taken with nothing beside it (`core_use`): the model is then of workers with cores of their own, wherever it was made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.capacity import core_use
from baton.capacity.core_use import Occupation, Window
from baton.capacity.cost import (
    CoreCost,
    CostModel,
    Curve,
    Jitter,
    Origin,
    Residual,
    RoutingCost,
    Source,
    StepCost,
    TransferCost,
)
from baton.capacity.regression import ROUNDS, Vector, robust_nonnegative
from baton.proto.step_log import HandoffRecord, StepLogFile, StepRecord

WARM_UP_STEPS = 8
"""At the start of each worker: pages are touched, threads are made."""
MIN_STEPS = 100
_MIN_IN_SEGMENT = 12
_QUANTILES = 101
_SLOWEST, _COARSE, _FINE = 0.4, 0.1, 0.02
"""Speeds that are tried for a core among busy ones: from where on, and in which steps first and then."""
_WORST_LOG = 0.5
_ROUNDS_OF_SEARCH = 3


class TooLittleData(ValueError):
    """There are not enough steps or not enough kinds of them for a fit; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One request to an idle cluster on this machine: sent and answered by the clock of the step logs."""

    sent_s: float
    first_token_s: float


class UnlikeWorkers(ValueError):
    """The notes are of workers that differ in what their speed depends on."""


def origin_of(logs: Sequence[StepLogFile], machine: str, date: str) -> Origin:
    """What the workers say of themselves. Raises UnlikeWorkers, and TooLittleData if there is none."""
    if not logs:
        raise TooLittleData("there is no step log: is observability.step_log set, and the directory the right one?")
    kinds = {(log.header.model, log.header.dtype, log.header.device, log.header.threads) for log in logs}
    if len(kinds) > 1:
        shown = ", ".join(sorted(" ".join(map(str, kind)) for kind in kinds))
        raise UnlikeWorkers(
            f"workers of several kinds (model, dtype, device, threads): {shown}; fit each kind by itself"
        )
    ((model, dtype, device, threads),) = kinds
    note = f"{device}; {', '.join(sorted(f'{log.header.worker_id} ({log.header.role.value})' for log in logs))}"
    steps = [step for log in logs for step in log.steps[WARM_UP_STEPS:]]
    if device == "cpu" and threads == 1 and steps:
        note += f"; steps had a core for {core_share(steps):.0%} of their time"
    return Origin(Source.MEASURED, machine, model, dtype, date, threads, note)


def core_share(steps: Sequence[StepRecord]) -> float:
    """The part of the steps' time in which the step loop's thread had a core."""
    return sum(step.cpu_s for step in steps) / sum(step.busy_s for step in steps)


def fit(
    logs: Sequence[StepLogFile],
    probes: Sequence[Probe],
    origin: Origin,
    windows: Sequence[Window] = (),
    num_cores: int = 1,
) -> CostModel:
    """The cost model of all workers in `logs` together; they should be alike. Raises TooLittleData.

    `windows`: CPU time of all of the cluster while it was driven, on a machine with `num_cores`; none if that is not
    known: then steps are taken to have had cores of their own.
    """
    steps = [step for log in logs for step in log.steps[WARM_UP_STEPS:]]
    cores, seconds = CoreCost(), np.array([step.busy_s for step in steps])
    if windows and len(steps) >= MIN_STEPS:
        cores, seconds = _on_own_cores(logs, windows, num_cores)
    cost, ratios = fit_steps(steps, seconds)
    return CostModel(
        origin=origin,
        steps=cost,
        transfer=fit_transfer([handoff for log in logs for handoff in log.handoffs]),
        routing=fit_routing(logs, probes),
        cores=cores,
        jitter=_jitter(steps, ratios),
        residuals=_residuals(steps, ratios),
    )


def jitter_of(model: CostModel, steps: Sequence[StepRecord]) -> Jitter:
    """How these steps scatter about a model that was fitted to others."""
    predicted = [
        model.step_s(step.prefill_tokens, step.attention_pairs, step.decode_sequences, step.kv_tokens) for step in steps
    ]
    return _jitter(steps, np.array([step.busy_s for step in steps]) / np.maximum(predicted, 1e-9))


def fit_steps(
    steps: Sequence[StepRecord], seconds: Vector | None = None, rounds: int = ROUNDS
) -> tuple[StepCost, Vector]:
    """Coefficients, and measured over predicted time of each step. `seconds`: what to take for measured."""
    if len(steps) < MIN_STEPS:
        raise TooLittleData(f"{len(steps)} steps after warm-up, at least {MIN_STEPS} are needed: drive more load")
    if seconds is None:
        seconds = np.array([step.busy_s for step in steps])
    rows = np.array([step.prefill_tokens + step.decode_sequences for step in steps], dtype=float)
    knots = _knots(rows)
    # A segment's column is how far a step's rows reach into it: its coefficient is the slope there.
    segments = zip(knots, np.append(knots[1:], np.inf), strict=True)
    columns = [np.ones(len(steps)), *(np.clip(rows - low, 0, high - low) for low, high in segments)]
    columns += [
        np.array([getattr(step, name) for step in steps], dtype=float)
        for name in ("attention_pairs", "decode_sequences", "kv_tokens")
    ]
    matrix = np.column_stack(columns)
    found = robust_nonnegative(matrix, seconds, rounds)
    slopes = found[1 : 1 + len(knots)]
    curve_rows, curve_seconds = _curve(knots, slopes, float(rows.max()))
    pair_s, sequence_s, kv_token_s = (float(value) for value in found[1 + len(knots) :])
    cost = StepCost(Curve(curve_rows, curve_seconds), float(found[0]), pair_s, sequence_s, kv_token_s)
    return cost, seconds / np.maximum(matrix @ found, 1e-9)


def fit_transfer(handoffs: Sequence[HandoffRecord]) -> TransferCost:
    """What reads took, and what a hand-off took beside them; zeros where none was noted.

    Of many at a time each waits for the others' messages, so those that were alone are taken, if there are enough. The
    hand-offs must be of one worker, or of workers that have nothing in common.
    """
    read = _alone([handoff for handoff in handoffs if handoff.pulls and handoff.reading_s > 0])
    if len(read) < _MIN_IN_SEGMENT:
        return TransferCost()
    matrix = np.array([[handoff.pulls, handoff.bytes, handoff.runs] for handoff in read], dtype=float)
    found = robust_nonnegative(matrix, np.array([handoff.reading_s for handoff in read]))
    # With one read, all of it lies in `transfer_s`; of several only the last does.
    beside = [max(handoff.transfer_s - handoff.reading_s / handoff.pulls, 0.0) for handoff in read]
    single = [rest for rest, handoff in zip(beside, read, strict=True) if handoff.pulls == 1]
    control_s = statistics.median(single or beside)
    return TransferCost(float(found[0]), float(found[1]), float(found[2]), control_s)


def fit_routing(logs: Sequence[StepLogFile], probes: Sequence[Probe]) -> RoutingCost:
    """What lies before and after the step that answered a probe, by the median.

    The load report goes the way of the tokens up to the router, about half of it. Zeros where no step lies within a
    probe: the workers' clock is then not ours.
    """
    steps = sorted((step for log in logs for step in log.steps if step.gap_s is None), key=lambda step: step.start_s)
    before: list[float] = []
    after: list[float] = []
    for probe in probes:
        within = [step for step in steps if probe.sent_s < step.start_s and _end_s(step) < probe.first_token_s]
        if within:
            before.append(within[0].start_s - probe.sent_s)
            after.append(probe.first_token_s - _end_s(within[0]))
    if not before:
        return RoutingCost()
    delivery_s = statistics.median(after)
    return RoutingCost(statistics.median(before), delivery_s, delivery_s / 2)


def _on_own_cores(logs: Sequence[StepLogFile], windows: Sequence[Window], num_cores: int) -> tuple[CoreCost, Vector]:
    """What was computed beside steps, and how long each step after warm-up would have taken without that.

    How much a core slows down when all are busy is what makes steps that ran beside others most like those that did
    not; without enough of both, nothing is said of it.
    """
    cost = core_use.fit_cpu(logs, windows)
    occupation = Occupation(logs, cost, num_cores)
    steps = [step for log in logs for step in log.steps[WARM_UP_STEPS:]]
    beside = _warm(occupation.beside())

    def misfit(crowded_speed: float) -> float:
        _, ratios = fit_steps(steps, _warm(occupation.alone_s(crowded_speed)), _ROUNDS_OF_SEARCH)
        return float(np.minimum(np.abs(np.log(ratios)), _WORST_LOG).mean())

    crowded_speed = 1.0
    if min(int((beside < 0.2).sum()), int((beside > 0.5).sum())) >= MIN_STEPS // 2:
        coarse = min(np.arange(_SLOWEST, 1.0 + 1e-9, _COARSE), key=misfit)
        fine = np.arange(max(coarse - _COARSE, _SLOWEST), min(coarse + _COARSE, 1.0) + 1e-9, _FINE)
        crowded_speed = round(float(min(fine, key=misfit)), 2)
    return replace(cost, crowded_speed=crowded_speed), _warm(occupation.alone_s(crowded_speed))


def _warm(of_logs: Sequence[Vector]) -> Vector:
    return np.concatenate([of_log[WARM_UP_STEPS:] for of_log in of_logs])


def _alone(handoffs: Sequence[HandoffRecord]) -> Sequence[HandoffRecord]:
    """Those in whose time no other was under way; all of them if these are too few."""
    spans = sorted(
        ((each.landed_s - max(each.transfer_s, each.reading_s), each) for each in handoffs), key=lambda span: span[0]
    )
    found = []
    until_s = -math.inf
    for number, (start_s, handoff) in enumerate(spans):
        next_start_s = spans[number + 1][0] if number + 1 < len(spans) else math.inf
        if until_s < start_s and handoff.landed_s < next_start_s:
            found.append(handoff)
        until_s = max(until_s, handoff.landed_s)
    return found if len(found) >= _MIN_IN_SEGMENT else handoffs


def _knots(rows: Vector) -> Vector:
    """Where the curve may bend: powers of two, as long as each segment has enough steps in it."""
    low, high = float(rows.min()), float(rows.max())
    knots = [low]
    for power in range(1, 20):
        knot = 2.0**power
        if knot <= low or knot >= high:
            continue
        inside = int(((rows > knots[-1]) & (rows <= knot)).sum())
        beyond = int((rows > knot).sum())
        if inside >= _MIN_IN_SEGMENT and beyond >= _MIN_IN_SEGMENT:
            knots.append(knot)
    return np.array(knots)


def _curve(knots: Vector, slopes: Vector, high: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    ends = np.append(knots, max(high, float(knots[-1]) + 1))
    seconds = np.append(0.0, np.cumsum(np.diff(ends) * slopes))
    return tuple(map(float, ends)), tuple(map(float, seconds))


def _end_s(step: StepRecord) -> float:
    return step.start_s + step.plan_s + step.run_s + step.commit_s


def _jitter(steps: Sequence[StepRecord], ratios: Vector) -> Jitter:
    decodes = np.array([step.prefill_tokens == 0 for step in steps], dtype=bool)
    return Jitter(_scatter(ratios[decodes]), _scatter(ratios[~decodes]))


def _scatter(ratios: Vector) -> tuple[float, ...]:
    """Quantiles at even fractions; the last is set so that the mean of what lies above the one before it is kept."""
    if len(ratios) < MIN_STEPS:
        return ()
    quantiles = np.quantile(ratios, np.linspace(0, 1, _QUANTILES))
    top = ratios[ratios >= quantiles[-2]]
    quantiles[-1] = max(2 * float(top.mean()) - quantiles[-2], quantiles[-2])
    return tuple(round(float(value), 4) for value in np.maximum(quantiles, 1e-3))


_REGIMES: tuple[tuple[str, Callable[[StepRecord], bool]], ...] = (
    ("decode, up to 7", lambda step: not step.prefill_tokens and step.decode_sequences < 8),
    ("decode, 8 to 31", lambda step: not step.prefill_tokens and 8 <= step.decode_sequences < 32),
    ("decode, 32 and more", lambda step: not step.prefill_tokens and step.decode_sequences >= 32),
    ("prefill, up to 127", lambda step: 0 < step.prefill_tokens < 128 and not step.decode_sequences),
    ("prefill, 128 to 511", lambda step: 128 <= step.prefill_tokens < 512 and not step.decode_sequences),
    ("prefill, 512 and more", lambda step: step.prefill_tokens >= 512 and not step.decode_sequences),
    ("mixed", lambda step: step.prefill_tokens > 0 and step.decode_sequences > 0),
)


def _residuals(steps: Sequence[StepRecord], ratios: Vector) -> tuple[Residual, ...]:
    found = []
    for name, belongs in (*_REGIMES, ("all", lambda step: True)):
        errors = np.abs(ratios[np.array([belongs(step) for step in steps])] - 1)
        if len(errors):
            median, p90 = np.quantile(errors, (0.5, 0.9))
            found.append(Residual(name, len(errors), round(float(median), 4), round(float(p90), 4)))
    return tuple(found)
