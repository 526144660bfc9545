"""`baton capacity`: how many prefill and how many decode workers a traffic needs.

Owns: its subcommands and options, the cost model that they take by default, what is printed while they run and at the
end. Composition: it puts `capacity`, the client and a live cluster together.
Refuses to know: how anything is measured, found or drawn.

    baton capacity calibrate cluster.yaml -o cost.json        fit a cost model to this machine
    baton capacity simulate  cluster.yaml --workload chat --rate 2
    baton capacity sweep     cluster.yaml --ratios 1:3,2:2,3:1 --workload chat
    baton capacity plan      cluster.yaml --workload chat --rate 2
    baton capacity report    DIRECTORY
"""

from __future__ import annotations

import argparse
import asyncio
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import baton
from baton.capacity import cluster_file, presets, sweep, workload
from baton.capacity.cost import CoreCost, CostModel, CostModelError
from baton.capacity.grid import (
    GridError,
    Model,
    Shape,
    configurations,
    knobs_of,
    parse_ratios,
    setup_of,
)
from baton.capacity.journal import Journal
from baton.capacity.outcome import Slo
from baton.capacity.plan import Wish, plan
from baton.capacity.simulate import SetupError
from baton.capacity.simulation import Simulated, simulation
from baton.capacity.study import Objective, Provenance, Row, Study, StudyError
from baton.capacity.summary import Summary
from baton.capacity.sweep import Experiment, Laboratory, Point, SweepError
from baton.capacity.trace import Trace, TraceError
from baton.capacity.traffic import Traffic
from baton.client import access, calibrate, live
from baton.client.console import counted, duration
from baton.router import config
from baton.router.config import ClusterConfig, ConfigError

_DEMO_COST = Path(__file__).resolve().parent.parent / "capacity" / "demo-cost.json"
_SLO_FACTOR = 3.0
_SLO_PROMPT = 0.9
_POINTS, _STUDY = "points.jsonl", "study.json"
_PLAIN_WIDTH = 120
_PLAIN_INTERVAL_S = 10.0


class CommandError(ValueError):
    """Options that do not go together; the message names them."""


def main(arguments: Sequence[str]) -> int:
    """Runs `baton capacity ARGUMENTS`; returns its exit code: 1 for a failure, 2 for what was asked wrongly."""
    options = build_parser().parse_args(arguments)
    options.words = list(arguments)
    try:
        code: int = options.command(options)
        return code
    except (
        CommandError,
        ConfigError,
        CostModelError,
        GridError,
        SetupError,
        StudyError,
        TraceError,
        presets.UnknownPreset,
        presets.DoesNotFit,
        workload.UnknownWorkload,
    ) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    except (SweepError, live.LiveError, calibrate.CalibrationError, calibrate.NotStarted) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1


# --- options --------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton capacity", allow_abbrev=False, description="How many prefill and how many decode workers?"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_simulate(commands)
    _add_sweep(commands)
    _add_plan(commands)
    _add_calibrate(commands)
    _add_report(commands)
    return parser


def _add_simulate(commands: Any) -> None:
    parser = _command(commands, "simulate", "one run on a virtual clock", _simulate)
    parser.add_argument(
        "--ratio", metavar="P:D", help="workers of each kind, or N co-located ones (default: the file's)"
    )
    _add_traffic(parser, rate_is_needed=True)
    _add_cost(parser)


def _add_sweep(commands: Any) -> None:
    parser = _command(commands, "sweep", "the capacity of several ratios, beside co-located workers", _sweep)
    parser.add_argument("--ratios", default="1:1", metavar="P:D,...", help="as 1:3,2:2,3:1; or all, with --total")
    parser.add_argument("--total", type=_whole, metavar="N", help="workers in all")
    parser.add_argument("--rates", type=_numbers, default=(), metavar="R,...", help="these rates; else search capacity")
    parser.add_argument("--chunk-budgets", type=_wholes, default=(), metavar="N,...", help="max_num_batched_tokens")
    parser.add_argument("--policies", type=_words, default=(), metavar="NAME,...", help="of placement")
    parser.add_argument("--bindings", type=_words, default=(), metavar="NAME,...", help="early, late")
    parser.add_argument("--backend", choices=("simulate", "live"), default="simulate")
    parser.add_argument("--target", metavar="HOST:PORT", help="live: re-shape this cluster (else one on this machine)")
    access.add_options(parser)
    _add_traffic(parser, rate_is_needed=False)
    _add_cost(parser)
    _add_output(parser, "capacity-sweep")


def _add_plan(commands: Any) -> None:
    parser = _command(commands, "plan", "the sizes of pools that a rate needs", _plan)
    parser.add_argument("--max-workers", type=_whole, default=64, metavar="N", help="give up beyond (default 64)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a copy of the cluster file with these sizes")
    _add_traffic(parser, rate_is_needed=True)
    _add_cost(parser)
    _add_output(parser, "capacity-plan")


def _add_calibrate(commands: Any) -> None:
    parser = _command(commands, "calibrate", "fit a cost model to the workers of this machine", _calibrate)
    parser.add_argument("--seconds", type=_positive, default=90.0, metavar="S", help="of load (default 90)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, metavar="DIR", help="fit step logs that are there; start nothing")
    parser.add_argument("-o", "--output", type=Path, default=Path("cost.json"), metavar="FILE")


def _add_report(commands: Any) -> None:
    parser = commands.add_parser("report", allow_abbrev=False, help="write the page of a sweep or plan again")
    parser.add_argument("directory", type=Path)
    parser.set_defaults(command=_report)


def _command(commands: Any, name: str, about: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, allow_abbrev=False, help=about)
    parser.add_argument("config", nargs="?", type=Path, help="a cluster file; without one, the defaults")
    parser.set_defaults(command=run)
    return parser


def _add_traffic(parser: argparse.ArgumentParser, rate_is_needed: bool) -> None:
    names = ", ".join(workload.NAMES)
    parser.add_argument(
        "--workload", default="chat", metavar="NAME,...", help=f"{names}, random:IN/OUT or fixed:IN/OUT"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay a Mooncake .jsonl or Azure .csv file instead"
    )
    parser.add_argument(
        "--rate",
        type=_positive,
        required=rate_is_needed,
        metavar="R",
        help="requests a second" if rate_is_needed else "the rate of the table (default: the best capacity)",
    )
    parser.add_argument("--num-requests", type=_whole, metavar="N", help="of one run (default 300; live 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=_whole, default=2, metavar="N", help="seeds, from --seed on (default 2)")
    parser.add_argument("--scale-lengths", type=_positive, default=1.0, metavar="F", help="multiply all lengths by F")
    default = f"default: {_SLO_FACTOR:g} times what the cost model says for"
    parser.add_argument(
        "--slo-ttft-ms", type=_positive, metavar="MS", help=f"{default} a prompt of the 90th percentile, alone"
    )
    parser.add_argument("--slo-tpot-ms", type=_positive, metavar="MS", help=f"{default} a decode step of one sequence")
    parser.add_argument(
        "--attainment", type=_share, default=0.9, metavar="F", help="share of requests that must meet it (default 0.9)"
    )


def _add_cost(parser: argparse.ArgumentParser) -> None:
    known = f"{', '.join(presets.MODELS)} @ {', '.join(presets.DEVICES)}"
    parser.add_argument(
        "--cost",
        metavar="FILE|PRESET",
        help=f"a file that calibrate wrote, or MODEL@DEVICE[xTP] of {known} (default: the demo model, a core each)",
    )
    parser.add_argument("--link", default="peer", choices=presets.NAMES_OF_LINKS, help="of a preset (default peer)")


def _add_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help=f"page, tables, finished points ({default})",
    )
    parser.add_argument("--jobs", type=_whole, metavar="N", help="processes that simulate (default: the cores)")


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a finite number above 0")
    return number


def _share(text: str) -> float:
    number = _positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be at most 1")
    return number


def _whole(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a whole number from 1 to {2**31 - 1}")
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(sorted({_positive(part) for part in _words(text)}))


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(map(_whole, _words(text)))


# --- what the options mean ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    """What every command but `report` and `calibrate` starts from."""

    config: ClusterConfig
    cost: CostModel
    cost_text: str
    model: Model
    traffics: tuple[Traffic, ...]
    objective: Objective


def _given(options: argparse.Namespace, num_requests: int) -> _Given:
    cluster = config.load(options.config) if options.config is not None else config.defaults()
    cost, cost_text, model = _cost(options, cluster)
    traffics = _traffics(options, options.num_requests or num_requests)
    setup = setup_of(cluster, model, Shape(1, 1))
    objective = Objective(_slo(options, cost, traffics, setup.max_model_len), options.attainment)
    return _Given(cluster, cost, cost_text, model, traffics, objective)


def _cost(options: argparse.Namespace, cluster: ClusterConfig) -> tuple[CostModel, str, Model]:
    """The cost model, what it is in words, and the model that it is of."""
    if options.cost is not None and "@" in options.cost and not Path(options.cost).exists():
        preset = presets.preset(options.cost)
        engine = cluster.pools[0].engine
        model = Model(
            options.cost.partition("@")[0],
            preset.shape.kv_bytes_per_token,
            preset.shape.max_model_len,
            preset.num_blocks(engine.block_size),
        )
        text = f"preset {options.cost} over {options.link}: an estimate from data sheets, not measured"
        return presets.estimate(options.cost, options.link), text, model
    path = _DEMO_COST if options.cost is None else Path(options.cost)
    cost = CostModel.load(path)
    origin = cost.origin
    words = (origin.source.value, origin.model, origin.dtype, origin.machine, origin.date, origin.note)
    return cost, f"{path.name}: {', '.join(word for word in words if word)}", Model.of(cluster.pools[0].engine)


def _traffics(options: argparse.Namespace, num_requests: int) -> tuple[Traffic, ...]:
    rate, scale = options.rate or 1.0, options.scale_lengths
    if options.trace is not None:
        try:
            trace = Trace.open(options.trace)
        except OSError as error:
            raise CommandError(f"--trace: {options.trace} cannot be read: {error.strerror}") from None
        number = min(num_requests, trace.num_requests)
        return (Traffic(options.trace.name, rate, number, options.seed, scale, scale, trace),)
    names = _words(options.workload)
    for name in names:
        next(workload.arrivals(name))
    return tuple(Traffic(name, rate, num_requests, options.seed, scale, scale) for name in names)


def _slo(options: argparse.Namespace, cost: CostModel, traffics: Sequence[Traffic], max_model_len: int) -> Slo:
    """As asked for, or so many times what one request would get that is alone: a bound that can be met."""
    prompt, context = 1, 1
    for traffic in traffics:
        found = islice(replace(traffic, rate=1.0).arrivals(max_model_len), 1000)
        prompts = sorted(arrival.prompt_tokens for arrival in found)
        prompt = max(prompt, prompts[int(_SLO_PROMPT * (len(prompts) - 1))])
        context = max(context, sum(prompts) // len(prompts))
    alone = Slo(
        cost.step_s(prompt, prompt * (prompt + 1) // 2, 0, 0) + cost.routing.routing_s + cost.routing.delivery_s,
        cost.step_s(0, 0, 1, context),
    )
    ttft_s, tpot_s = (_two_digits(_SLO_FACTOR * bound_s) for bound_s in (alone.ttft_s, alone.tpot_s))
    return Slo(
        options.slo_ttft_ms / 1e3 if options.slo_ttft_ms is not None else ttft_s,
        options.slo_tpot_ms / 1e3 if options.slo_tpot_ms is not None else tpot_s,
    )


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _shape(text: str | None, cluster: ClusterConfig) -> Shape:
    if text is None:
        sizes = {pool.role.value: cluster.size(pool.role) for pool in cluster.pools}
        if sizes.get("colocated") and (sizes.get("prefill") or sizes.get("decode")):
            raise CommandError("the cluster file mixes co-located workers with others: say which with --ratio")
        return Shape(sizes.get("prefill", 0), sizes.get("decode", 0), sizes.get("colocated", 0))
    if text.isdigit() and int(text) > 0:
        return Shape(colocated=int(text))
    (shape,) = parse_ratios(text)[:1]
    return shape


# --- commands -------------------------------------------------------------------------------------------------------


def _simulate(options: argparse.Namespace) -> int:
    given = _given(options, 300)
    shape = _shape(options.ratio, given.config)
    setup = setup_of(given.config, given.model, shape)
    out = _console()
    for traffic in given.traffics:
        summary = Simulated(given.cost)(Point(setup, traffic, given.objective.slo))
        _show(out, f"{traffic.name}, {shape.label}, {traffic.rate:g} requests/s", summary, given.objective)
    out.print(f"cost model: {given.cost_text}", style="dim", markup=False)
    return 0


def _sweep(options: argparse.Namespace) -> int:
    is_live = options.backend == "live"
    given = _given(options, 60 if is_live else 300)
    shapes = parse_ratios(options.ratios, options.total)
    knobs = knobs_of(options.chunk_budgets, options.policies, options.bindings)
    compared = configurations(given.config, given.model, shapes, knobs)
    if is_live and len(knobs) > 1 and options.target is not None:
        raise CommandError("--target: a running cluster keeps its settings; vary the ratio only, or leave --target out")
    experiment = Experiment(
        compared, given.traffics, given.objective, options.repeats, options.rates, compare_at=options.rate
    )
    out, began, started = _console(), time.monotonic(), datetime.now(UTC)
    with _opened(options.output) as journal, _progress(out) as on_progress:
        if is_live:
            measuring = live.backend(given.config, options.target, access.token_of(options), access.tls_of(options))
        else:
            measuring = simulation(given.cost, options.jobs)
        with measuring as backend:
            laboratory = Laboratory(backend, journal, on_progress)
            workloads, rows = asyncio.run(sweep.sweep(experiment, laboratory, given.cost))
        predicted = _predicted(experiment, rows, given, options, journal) if is_live else ()
    predictions = sweep.compare(predicted, rows)
    if is_live:
        notes = chain(live.notes(given.config, [each.shape for each in compared]), _notes_of_prediction(predicted))
    else:
        notes = chain(_notes(given))
    provenance = _provenance(options, given, started, time.monotonic() - began, options.backend, notes)
    study = Study(provenance, given.objective, workloads, rows, predictions)
    return _written(study, options.output, out)


def _predicted(
    experiment: Experiment,
    rows: Sequence[Row],
    given: _Given,
    options: argparse.Namespace,
    journal: Journal,
) -> tuple[Row, ...]:
    """The same rates and arrivals as were measured, simulated; on shared cores, if those were."""
    rates = tuple(sorted({level.rate for row in rows for level in row.levels}))
    here = asyncio.run(
        live.is_on_this_machine(given.config, options.target, access.token_of(options), access.tls_of(options))
    )
    compared = tuple(
        replace(each, setup=live.on_this_machine(each.setup, given.cost)) if here else each
        for each in experiment.configurations
    )
    again = replace(experiment, configurations=compared, rates=rates, compare_at=rates[0])
    with simulation(given.cost, options.jobs) as backend:
        _, found = asyncio.run(sweep.sweep(again, Laboratory(backend, journal), given.cost))
    return found


def _notes_of_prediction(rows: Sequence[Row]) -> Iterator[str]:
    """How cores were shared in what was simulated."""
    if any(row.configuration.setup.shared_cores is not None for row in rows):
        yield (
            "Predicted figures are of workers, router and client that share these cores fairly. What router and client "
            "need is in the cost model only if it was calibrated on a machine that held all of them"
        )


def _plan(options: argparse.Namespace) -> int:
    given = _given(options, 300)
    if len(given.traffics) > 1:
        raise CommandError("--workload: plan takes one workload at a time")
    if options.write is not None and options.config is None:
        raise CommandError("--write: needs a cluster file to copy")
    wish = Wish(given.config, given.model, given.traffics[0], given.objective, options.repeats, options.max_workers)
    out, began, started = _console(), time.monotonic(), datetime.now(UTC)
    with (
        _opened(options.output) as journal,
        simulation(given.cost, options.jobs) as backend,
        _progress(out) as on_progress,
    ):
        laboratory = Laboratory(backend, journal, on_progress)
        found, sent, rows = asyncio.run(plan(wish, laboratory, given.cost))
    provenance = _provenance(options, given, started, time.monotonic() - began, "simulate", _notes(given))
    study = Study(provenance, given.objective, (sent,), rows, plan=found)
    chosen = found.chosen
    if options.write is not None and chosen is not None:
        text = cluster_file.resized(options.config.read_text(encoding="utf-8"), chosen)
        options.write.write_text(text, encoding="utf-8")
    code = _written(study, options.output, out)
    if options.write is not None:
        done = f"{options.write}: {chosen.label}" if chosen is not None else "no sizes were found to be written"
        out.print(done, markup=False)
    return code if chosen is not None else 1


def _calibrate(options: argparse.Namespace) -> int:
    if options.logs is not None:
        cost = calibrate.fitted(options.logs)
    else:
        cluster = config.load(options.config) if options.config is not None else config.defaults()
        out = _console()
        with _bar(out) as bar:
            task = bar.add_task("", total=1.0)
            cost = calibrate.calibrated(
                cluster,
                options.seconds,
                options.seed,
                lambda share, doing: bar.update(task, completed=share, description=doing),
            )
    cost.save(options.output)
    out = _console()
    for residual in cost.residuals:
        out.print(
            f"{residual.regime:>24}: {residual.steps:6,} steps, error of the median step {residual.median:.1%}, "
            f"p90 {residual.p90:.1%}",
            markup=False,
        )
    beside = cost.cores
    if beside != CoreCost():
        out.print(
            f"{'beside steps':>24}: {1e3 * beside.request_cpu_s:.2f} ms of CPU a request, "
            f"{1e3 * beside.step_cpu_s:.2f} a step, {1e3 * beside.token_cpu_s:.3f} a token",
            markup=False,
        )
        out.print(f"{'a core among busy ones':>24}: {beside.crowded_speed:.0%} of its speed alone", markup=False)
    out.print(f"{options.output}", markup=False)
    return 0


def _report(options: argparse.Namespace) -> int:
    try:
        study = Study.load(options.directory / _STUDY)
    except FileNotFoundError:
        raise CommandError(f"{options.directory} has no {_STUDY}: name the directory of a sweep or plan") from None
    return _written(study, options.directory, _console())


def _written(study: Study, directory: Path, out: Console) -> int:
    # matplotlib takes a while to import, and not everybody installs it.
    try:
        from baton.capacity import report
    except ImportError as error:
        raise CommandError(f"the page needs matplotlib ({error}): pip install 'baton-serve[capacity]'") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        study.save(directory / _STUDY)
        page = report.write(study, directory)
    except OSError as error:
        raise SweepError(
            f"{error.filename or directory}: cannot be written: {error.strerror}; finished points are kept: the same "
            "command goes on with them"
        ) from error
    _print_rows(study, out)
    for sentence in report.findings(study):
        out.print(f"\n{sentence}", markup=False)
    out.print(f"\nwritten to {page}", style="dim", markup=False)
    return 0


def _opened(directory: Path) -> closing[Journal]:
    return closing(Journal(directory / _POINTS))


def _provenance(
    options: argparse.Namespace, given: _Given, started: datetime, took_s: float, backend: str, notes: Iterator[str]
) -> Provenance:
    traffic = given.traffics[0]
    return Provenance(
        command=shlex.join(["baton", "capacity", *access.without_token(options.words)]),
        started=started.strftime("%Y-%m-%d %H:%M UTC"),
        took_s=took_s,
        backend=backend,
        version=baton.__version__,
        python=platform.python_version(),
        machine=calibrate.machine().partition(", ")[2],
        cores=live.num_cores(),
        cost_model=given.cost_text,
        seeds=tuple(range(options.seed, options.seed + options.repeats)),
        num_requests=traffic.num_requests,
        scale_lengths=traffic.scale_prompts,
        model=given.model.name,
        notes=tuple(notes),
    )


def _notes(given: _Given) -> Iterator[str]:
    if given.cost.origin.source.value == "estimate":
        yield (
            "The cost model is an estimate. Trust the order of configurations before the figures, and calibrate on the "
            "machines that will serve"
        )


# --- what is printed ------------------------------------------------------------------------------------------------


def _print_rows(study: Study, out: Console) -> None:
    for sent in study.workloads:
        rows = study.of(sent.name)
        out.print(f"\n{sent.name} at {sent.reference_rate:.3g} requests/s; {study.objective.text}", markup=False)
        out.print(
            f"{'':24} {'CAPACITY':>9} {'95 %':>15} {'GOOD':>6} {'TTFT P50':>9} {'P90':>8} {'TPOT P50':>9} {'P90':>8}"
            "  VERDICT",
            markup=False,
            style="dim",
        )
        for row in rows:
            level = row.at(sent.reference_rate)
            if level is None:
                continue
            ttft, tpot, capacity = level.latency("ttft"), level.latency("tpot"), row.capacity
            interval = f"{capacity.low:.3g} to {capacity.high:.3g}"
            out.print(
                f"{row.label:24} {capacity.rate:9.3g} {interval:>15} {level.attainment.value:6.1%} "
                f"{ttft.p50 * 1e3:6,.0f} ms {ttft.p90 * 1e3:5,.0f} ms {tpot.p50 * 1e3:6.1f} ms {tpot.p90 * 1e3:5.1f} ms"
                f"  {level.verdict.value}",
                markup=False,
            )


def _show(out: Console, title: str, summary: Summary, objective: Objective) -> None:
    out.print(title, style="bold", markup=False)
    good = summary.attainment
    out.print(
        f"{summary.achieved_rate:.3g} of {summary.offered_rate:.3g} requests/s, {summary.tokens_per_s:,.0f} tokens/s; "
        f"good {good.value:.1%} ({good.low:.1%} to {good.high:.1%}) by TTFT <= {objective.slo.ttft_s * 1e3:g} ms, "
        f"TPOT <= {objective.slo.tpot_s * 1e3:g} ms; {summary.steadiness.verdict.value}, bottleneck: "
        f"{summary.bottleneck}",
        markup=False,
    )
    out.print(f"{'MS':12} {'P50':>10} {'P90':>10} {'P99':>10}", style="dim", markup=False)
    for name in ("ttft", "tpot", "itl", "e2e"):
        of = getattr(summary, name)
        out.print(f"{name.upper():12} {of.p50 * 1e3:10,.1f} {of.p90 * 1e3:10,.1f} {of.p99 * 1e3:10,.1f}", markup=False)
    for pool in summary.pools:
        out.print(
            f"{pool.name:12} {counted(pool.workers, 'worker')}, busy {summary.utilisation(pool):.0%}, KV held "
            f"{pool.kv_usage:.0%}, {counted(pool.preemptions, 'preemption')}",
            markup=False,
        )


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def _bar(out: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )


@contextmanager
def _progress(out: Console) -> Iterator[Callable[[sweep.Progress], None]]:
    """A bar on a terminal; elsewhere a line now and then."""
    if not out.is_terminal:
        yield _PlainProgress(out)
        return
    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda seen: bar.update(task, completed=seen.done, total=seen.expected, description=seen.doing)


class _PlainProgress:
    def __init__(self, out: Console) -> None:
        self._out = out
        self._began = self._told = time.monotonic()

    def __call__(self, seen: sweep.Progress) -> None:
        now = time.monotonic()
        if now - self._told < _PLAIN_INTERVAL_S:
            return
        self._told = now
        fresh = seen.done - seen.kept
        left = f", about {duration((now - self._began) / fresh * (seen.expected - seen.done))} left" if fresh else ""
        self._out.print(f"{seen.done} of about {seen.expected} runs{left}: {seen.doing}", style="dim", markup=False)
        self._out.file.flush()
