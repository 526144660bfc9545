"""Predicted against measured: what the simulator says of this machine, and what the machine then does.

Owns: the procedure, its table, and what explains the errors. `python benchmarks/prediction.py [--json FILE]`.

    for each shape (co-located, 1P1D) one cluster:
        drive it from all sides -> step logs -> cost model             known before the requests of the table
        for each rate (30, 60, 90 % of the simulated capacity):
            the same arrivals live, `--repeats` times, and simulated, `--seeds` times

Where workers, router and client want more threads than the machine has cores, the simulator shares these out among all
that computes at a moment. What router and client need, and what steps take on cores of their own, is calibrated.

Columns: `live`, `simulated`, its error, and `again`: by how much the machine misses itself, the spread of the live runs
over their mean. A prediction cannot be better than that. `apart` is the error with cores for every worker, as on a
larger machine: what it has more than `error` is what sharing explains. The lines below each table take the error apart:

    steps    measured over predicted time of the live run's own steps, had they had cores of their own. 1.10: steps took
             10 % longer than the model says, for what they had to compute. Of prefill workers it is told apart by
             whether a decode step ran meanwhile: on a machine with few cores the two, the router and the client take
             time from each other
    known    the error that is left if the simulator draws its steps' scatter from that very run, sharing included: what
             remains of it is not the steps' times, but their order and what lies beside them. It is no prediction
    core     for how much of its steps' time a worker's thread had a core; workers with one thread only
    send     how late the client sent; cpu: cores in use, out of those there are
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil
from clusters import Machine

from baton.capacity import calibrate
from baton.capacity.cluster import ClusterSetup, PoolSetup
from baton.capacity.cores import shared_cores
from baton.capacity.cost import CostModel, Jitter
from baton.capacity.outcome import End, RequestOutcome
from baton.capacity.simulate import simulate
from baton.capacity.traffic import Traffic
from baton.capacity.workload import Arrival
from baton.client import bench
from baton.client.calibrate import Driven, drive, fitted, running
from baton.client.client import Client
from baton.client.servers import GrpcServer
from baton.proto import step_log
from baton.proto.messages import Role
from baton.proto.step_log import StepLogFile, StepRecord
from baton.router.config import ClusterConfig, defaults

SHARES = (0.3, 0.6, 0.9)
TTFT_AIM, TPOT_AIM = 0.10, 0.05
_SATURATING = 400
_SETTLE_S = 1.0
_TIMEOUT_S = 300.0

_numbers = itertools.count(1)

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """One live run: its metrics, when it was, how late requests were sent (p50, p99), how many cores were busy."""

    metrics: Metrics
    start_s: float
    end_s: float
    late_p50_s: float
    late_p99_s: float
    busy_cores: float


@dataclass(frozen=True, slots=True)
class Point:
    """One rate of one shape."""

    shape: str
    share: float
    rate: float
    requests: int
    live: Metrics
    again: Metrics
    simulated: Metrics
    apart: Metrics
    known: Metrics
    core: dict[str, float]
    steps: dict[str, float]
    late_p50_s: float
    late_p99_s: float
    busy_cores: float

    def error(self, name: str, of: Metrics) -> float:
        return of[name] / self.live[name] - 1 if self.live[name] else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--scale-lengths", type=float, default=0.1)
    parser.add_argument("--calibrate", type=float, default=120.0, metavar="S", help="how long to drive each shape")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of arrivals, at each rate")
    parser.add_argument("--repeats", type=int, default=2, help="live runs at each rate")
    parser.add_argument("--seeds", type=int, default=5, help="simulated runs at each rate")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--shapes", default="co-located,1P1D")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shapes = {
        "co-located": defaults(prefill=0, decode=0, colocated=1, model=options.model),
        "1P1D": defaults(prefill=1, decode=1, model=options.model),
    }
    machine = Machine.now()
    print(f"{machine} at the start", flush=True)
    points: list[Point] = []
    models: dict[str, CostModel] = {}
    for name in options.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="baton-steps-") as directory:
            laboratory = _Laboratory(name, shapes[name], Path(directory), options)
            models[name] = laboratory.model
            points += laboratory.points
    aims_met = [abs(point.error(name, point.simulated)) <= aim for point in points for name, aim in _AIMS.items()]
    print(f"\naims met: {sum(aims_met)} of {len(aims_met)} (TTFT p50, p90 within 10 %, TPOT p50, p90 within 5 %)")
    if options.json:
        content = {
            "date": datetime.date.today().isoformat(),
            "machine": asdict(machine),
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "points": [asdict(point) for point in points],
            "cost_models": {name: json.loads(model.to_json()) for name, model in models.items()},
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


_AIMS = {"ttft_p50": TTFT_AIM, "ttft_p90": TTFT_AIM, "tpot_p50": TPOT_AIM, "tpot_p90": TPOT_AIM}


class _Laboratory:
    """One shape, from its start to its end."""

    def __init__(self, shape: str, config: ClusterConfig, directory: Path, options: argparse.Namespace) -> None:
        self._shape = shape
        self._directory = directory
        self._options = options
        config = replace(config, observability=replace(config.observability, step_log=str(directory)))
        with running(config.with_port(0, 0)) as target:
            self._target = target
            self._setup = _setup(shape, config, target)
            driven = asyncio.run(drive(target, options.calibrate, options.seed))
            self._driven = driven
            self.model = fitted(directory, driven)
            workers = sum(pool.size for pool in self._setup.pools)
            cores = shared_cores(len(os.sched_getaffinity(0)), workers * max(1, self.model.origin.threads))
            self._shared = replace(self._setup, shared_cores=cores)
            _print_model(shape, self.model, driven, cores)
            capacity = self._capacity()
            print(f"\n{shape}: {capacity:.2f} requests a second if all come at once, by the simulator", flush=True)
            self.points = [self._point(share, share * capacity) for share in SHARES]

    def _arrivals(self, rate: float, number: int) -> list[Arrival]:
        options = self._options
        traffic = Traffic(options.workload, rate, number, options.seed, options.scale_lengths, options.scale_lengths)
        return list(traffic.arrivals(self._setup.max_model_len))

    def _capacity(self) -> float:
        arrivals = [replace(arrival, time_s=0.0) for arrival in self._arrivals(1.0, _SATURATING)]
        return _simulated(self._shared, self.model, arrivals, 1)["requests_per_s"]

    def _point(self, share: float, rate: float) -> Point:
        arrivals = self._arrivals(rate, max(round(rate * self._options.seconds), 20))
        runs = [self._live(arrivals) for _ in range(self._options.repeats)]
        time.sleep(_SETTLE_S)  # idle workers bring their notes to the disk
        logs = step_log.read_directory(self._directory)
        during = [_between(log, run) for log in logs for run in runs]
        seeds = self._options.seeds
        point = Point(
            shape=self._shape,
            share=share,
            rate=rate,
            requests=len(arrivals),
            live=_mean([run.metrics for run in runs]),
            again=_spread([run.metrics for run in runs]),
            simulated=_simulated(self._shared, self.model, arrivals, seeds),
            apart=_simulated(self._setup, self.model, arrivals, seeds),
            known=_simulated(self._setup, _knowing(self.model, during), arrivals, seeds),
            core=_core_shares(during),
            steps=_steps(self.model, during),
            late_p50_s=statistics.fmean(run.late_p50_s for run in runs),
            late_p99_s=statistics.fmean(run.late_p99_s for run in runs),
            busy_cores=statistics.fmean(run.busy_cores for run in runs),
        )
        _print_point(point)
        return point

    def _live(self, arrivals: Sequence[Arrival]) -> Run:
        psutil.cpu_percent()
        start_s = time.monotonic()
        samples = asyncio.run(_ask(self._target, arrivals, next(_numbers)))
        end_s = time.monotonic()
        busy = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
        failed = [sample for sample in samples if sample.error]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0].error} {failed[0].message}")
        late = [sample.sent_s - sample.planned_s for sample in samples]
        return Run(
            metrics=_metrics(
                [sample.ttft_s for sample in samples],
                [sample.tpot_s for sample in samples if sample.tpot_s is not None],
                [sample.e2e_s for sample in samples],
                max(sample.ended_s for sample in samples) - samples[0].planned_s,
            ),
            start_s=start_s,
            end_s=end_s,
            late_p50_s=float(np.quantile(late, 0.5)),
            late_p99_s=float(np.quantile(late, 0.99)),
            busy_cores=busy,
        )


async def _ask(target: str, arrivals: Sequence[Arrival], seed: int) -> list[bench.Sample]:
    """Each run has a seed of its own: prompts of the run before would be found in a prefix cache."""
    server = GrpcServer(target, None, _TIMEOUT_S)
    try:
        return await bench.run(server, bench.jobs(arrivals, await server.model(), seed), seed=seed)
    finally:
        await server.close()


def _setup(shape: str, config: ClusterConfig, target: str) -> ClusterSetup:
    """The cluster that runs, as the simulator takes it."""
    with Client(target) as client:
        status, model = client.status(), client.model()
    workers = [worker for pool in status.pools for worker in pool.workers]
    blocks = {worker.role: worker.load.total_blocks for worker in workers}
    return ClusterSetup(
        label=shape,
        pools=tuple(PoolSetup(pool.role, pool.size, blocks[pool.role.value], pool.scheduler) for pool in config.pools),
        max_model_len=model.max_model_len,
        block_size=workers[0].block_size,
        kv_bytes_per_token=workers[0].kv_bytes_per_token,
        router=config.router,
        lease_s=config.transfer.lease_s,
    )


def _simulated(setup: ClusterSetup, model: CostModel, arrivals: Sequence[Arrival], seeds: int) -> Metrics:
    """The mean over seeds of the steps' scatter."""
    found = []
    for seed in range(seeds):
        outcomes: list[RequestOutcome] = []
        run = simulate(setup, model, arrivals, seed, sink=outcomes.append)
        bad = [outcome for outcome in outcomes if outcome.end is not End.FINISHED]
        if bad:
            raise SystemExit(f"{len(bad)} simulated requests failed, the first with: {bad[0].reason}")
        found.append(
            _metrics(
                [outcome.ttft_s for outcome in outcomes],
                [outcome.tpot_s for outcome in outcomes if outcome.output_tokens > 1],
                [outcome.e2e_s for outcome in outcomes],
                run.duration_s - arrivals[0].time_s,
            )
        )
    return _mean(found)


def _metrics(ttft_s: Sequence[float], tpot_s: Sequence[float], e2e_s: Sequence[float], duration_s: float) -> Metrics:
    """In seconds, and requests a second from the first request's arrival to the last one's end."""
    figures: Metrics = {}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s), ("e2e", e2e_s)):
        distribution = bench.Distribution.of(values)
        assert distribution is not None
        figures |= {f"{name}_p50": distribution.p50, f"{name}_p90": distribution.p90}
    figures["requests_per_s"] = len(ttft_s) / duration_s
    return figures


def _mean(runs: Sequence[Metrics]) -> Metrics:
    return {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}


def _spread(runs: Sequence[Metrics]) -> Metrics:
    """Largest minus smallest, over the mean."""
    mean = _mean(runs)
    return {
        name: (max(run[name] for run in runs) - min(run[name] for run in runs)) / mean[name] if mean[name] else math.nan
        for name in mean
    }


# --- what explains the errors ---------------------------------------------------------------------------------------


def _between(log: StepLogFile, run: Run) -> StepLogFile:
    """What a worker noted during a run."""
    return replace(
        log,
        steps=tuple(step for step in log.steps if run.start_s <= step.start_s <= run.end_s),
        handoffs=tuple(handoff for handoff in log.handoffs if run.start_s <= handoff.landed_s <= run.end_s),
    )


def _knowing(model: CostModel, during: Sequence[StepLogFile]) -> CostModel:
    """With the run's own scatter, of those kinds of steps of which there were enough."""
    own = calibrate.jitter_of(model, [step for log in during for step in log.steps])
    return replace(model, jitter=Jitter(own.decode or model.jitter.decode, own.prefill or model.jitter.prefill))


def _core_shares(during: Sequence[StepLogFile]) -> dict[str, float]:
    steps: dict[str, list[StepRecord]] = {}
    for log in during:
        if log.header.threads == 1:
            steps.setdefault(log.header.role.value, []).extend(log.steps)
    return {role: calibrate.core_share(of) for role, of in sorted(steps.items()) if of}


def _steps(model: CostModel, during: Sequence[StepLogFile]) -> dict[str, float]:
    """Measured over predicted time of all steps of a kind together."""
    decoding = [
        (step.start_s, step.start_s + step.plan_s + step.run_s)
        for log in during
        if log.header.role is Role.DECODE
        for step in log.steps
    ]
    kinds: dict[str, list[StepRecord]] = {}
    for log in during:
        for step in log.steps:
            kind = "mixed" if step.prefill_tokens and step.decode_sequences else "prefill"
            kind = kind if step.prefill_tokens else "decode"
            kinds.setdefault(f"{log.header.role.value} {kind}", []).append(step)
            if log.header.role is Role.PREFILL:
                beside = _shared(step, decoding) > 0.5
                kinds.setdefault(f"prefill {'beside decode' if beside else 'alone'}", []).append(step)
    return {kind: _ratio(model, steps) for kind, steps in sorted(kinds.items())}


def _ratio(model: CostModel, steps: Sequence[StepRecord]) -> float:
    predicted = sum(
        model.step_s(step.prefill_tokens, step.attention_pairs, step.decode_sequences, step.kv_tokens) for step in steps
    )
    return sum(step.busy_s for step in steps) / predicted


def _shared(step: StepRecord, others: Sequence[tuple[float, float]]) -> float:
    """The share of a step's time during which one of the others ran; those of one worker follow one another."""
    start_s, end_s = step.start_s, step.start_s + step.plan_s + step.run_s
    overlap = sum(max(0.0, min(end_s, until_s) - max(start_s, from_s)) for from_s, until_s in others)
    return overlap / max(end_s - start_s, 1e-9)


# --- output ---------------------------------------------------------------------------------------------------------


def _print_model(shape: str, model: CostModel, driven: Driven, cores: float | None) -> None:
    routing, transfer, beside = model.routing, model.transfer, model.cores
    print(f"\n{shape}: {model.origin.machine}, {model.origin.threads} threads a worker; {model.origin.note}")
    print(
        f"  to a worker {1e3 * routing.routing_s:.2f} ms, back {1e3 * routing.delivery_s:.2f} ms; a read "
        f"{1e3 * transfer.start_s:.2f} ms + {1e9 * transfer.byte_s:.3f} ns a byte, its messages "
        f"{1e3 * transfer.control_s:.2f} ms; {driven.tokens} tokens driven"
    )
    sharing = f"all share {cores:g} cores" if cores is not None else "every worker has cores of its own"
    print(
        f"  {sharing}; beside steps {1e3 * beside.request_cpu_s:.2f} ms of CPU a request, "
        f"{1e3 * beside.step_cpu_s:.2f} a step, {1e3 * beside.token_cpu_s:.3f} a token; a core among busy ones has "
        f"{beside.crowded_speed:.2f} of its speed"
    )
    print("  | steps | number | error p50 | error p90 |\n  |---|---|---|---|")
    for residual in model.residuals:
        print(f"  | {residual.regime} | {residual.steps} | {residual.median:.1%} | {residual.p90:.1%} |")
    sys.stdout.flush()


def _print_point(point: Point) -> None:
    print(f"\n{point.shape} at {point.share:.0%}, {point.rate:.2f} a second, {point.requests} requests")
    print("| metric | live | simulated | error | apart | again | known |\n|---|---|---|---|---|---|---|")
    for name in point.live:
        unit = "" if name == "requests_per_s" else " ms"
        scale = 1.0 if name == "requests_per_s" else 1e3
        print(
            f"| {name} | {scale * point.live[name]:.4g}{unit} | {scale * point.simulated[name]:.4g}{unit} | "
            f"{point.error(name, point.simulated):+.1%} | {point.error(name, point.apart):+.1%} | "
            f"{point.again[name]:.1%} | "
            f"{point.error(name, point.known):+.1%} |"
        )
    steps = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in point.steps.items())
    cores = ", ".join(f"{role} {share:.0%}" for role, share in point.core.items())
    print(f"steps {steps}" + (f"; core {cores}" if cores else ""))
    late = f"{1e3 * point.late_p50_s:.1f} ms p50, {1e3 * point.late_p99_s:.1f} ms p99"
    print(f"send {late} late; cpu {point.busy_cores:.2f} of {psutil.cpu_count()} cores busy", flush=True)


if __name__ == "__main__":
    sys.exit(main())
