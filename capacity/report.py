"""The page that tells what a study found, to somebody who was not there.

Owns: the words and tables of the page, the CSV files, and what lies where in the output directory. The page needs
nothing beside itself: pictures are inside it.
Refuses to know: how figures came about, and how pictures are drawn (`plots`).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from baton.capacity import plots
from baton.capacity.steady import BACKLOGGED_GROWTH, END, OVERLOADED_GROWTH, PARTS, SIGNIFICANCE, WARM_UP, Share
from baton.capacity.study import Capacity, Level, Plan, Row, Study, Workload
from baton.capacity.summary import Distribution
from baton.proto.messages import Role

_PAGE, _LEVELS, _CONFIGURATIONS = "report.html", "levels.csv", "configurations.csv"

_CSS = """
:root { color-scheme: light dark; --edge: #d0d0d0; --soft: #f4f4f2; --dim: #666; }
@media (prefers-color-scheme: dark) { :root { --edge: #444; --soft: #242424; --dim: #a0a0a0; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--edge); text-align: right; white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; } td:first-child, th:first-child { text-align: left; }
table.facts td { text-align: left; white-space: normal; } tr.baseline td { background: var(--soft); }
th[colspan] { text-align: center; } .group { border-left: 1px solid var(--edge); }
.dim, figcaption { color: var(--dim); }
.lead { font-size: 1.1rem; background: var(--soft); padding: 0.8rem 1rem; border-left: 4px solid #0072B2; }
figure { margin: 1.5rem 0; } figure svg { background: #fff; max-width: 100%; height: auto; }
.STABLE { color: #1b7f3b; } .BACKLOGGED { color: #a86400; } .OVERLOADED { color: #c02020; }
dt { font-weight: 600; } dd { margin: 0 0 0.4rem 1.2rem; }
"""


def write(study: Study, directory: Path) -> Path:
    """Writes the page, its pictures as PNG and its tables as CSV; returns the page's path."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures = plots.pictures(study)
    for picture in pictures:
        (directory / f"{picture.name.replace('/', '-').replace(':', '-')}.png").write_bytes(picture.png())
    (directory / _LEVELS).write_text(levels_csv(study), encoding="utf-8")
    (directory / _CONFIGURATIONS).write_text(configurations_csv(study), encoding="utf-8")
    page = directory / _PAGE
    page.write_text(html(study, pictures), encoding="utf-8")
    return page


def html(study: Study, pictures: Sequence[plots.Picture]) -> str:
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Baton capacity: {escape(', '.join(each.name for each in study.workloads))}</title>",
        f"<style>{_CSS}</style>",
        "<h1>How many prefill and how many decode workers?</h1>",
        f'<p class="dim">{escape(_what(study))}</p>',
        *(f'<p class="lead">{escape(sentence)}</p>' for sentence in findings(study)),
        *(f"<p><strong>Note.</strong> {escape(note)}.</p>" for note in study.provenance.notes),
        _plan(study.plan) if study.plan is not None else "",
        *(_table(study, workload) for workload in study.workloads),
    ]
    parts += [
        f"<h2>{escape(picture.title)}</h2><figure>{picture.svg()}"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
        for picture in pictures
    ]
    if study.predictions:
        parts.append(_predictions(study))
    parts += [_role_changes(study), _provenance(study), _words(study), "</html>"]
    return "\n".join(parts)


def findings(study: Study) -> Iterator[str]:
    """What it comes to, one sentence for each workload."""
    if study.plan is not None:
        yield study.plan.sentence
        return
    for workload in study.workloads:
        rows = study.of(workload.name)
        pairs = [row for row in rows if not row.configuration.is_baseline]
        alone = [row for row in rows if row.configuration.is_baseline]
        prefix = f"{workload.name}: " if len(study.workloads) > 1 else ""
        if not any(row.capacity.rate for row in rows):
            best = max(rows, key=lambda row: row.levels[0].attainment.value)
            nearest = f"Nearest to it is {best.label}: {best.capacity.note}"
            yield f"{prefix}No configuration meets the objective at any rate. {nearest}."
        elif any(row.capacity.is_known for row in pairs) and any(row.capacity.is_known for row in alone):
            yield prefix + _verdict(max(pairs, key=_per_worker), max(alone, key=_per_worker))


def _verdict(pair: Row, alone: Row) -> str:
    here, there = pair.capacity, alone.capacity
    same_size = pair.shape.total == alone.shape.total
    unit = "requests/s" if same_size else "requests/s per worker"
    divide = (1.0, 1.0) if same_size else (pair.shape.total, alone.shape.total)
    said = (
        f"The best ratio is {pair.label}: it holds {_rate(here, divide[0])} {unit}; "
        f"{alone.label} workers hold {_rate(there, divide[1])}."
    )
    if not here.is_bounded and not there.is_bounded:
        return f"{said} Both still meet the objective at the highest rate tried: try higher ones to tell them apart."
    a, b = here.rate / divide[0], there.rate / divide[1]
    overlap = here.low / divide[0] <= there.high / divide[1] and there.low / divide[1] <= here.high / divide[0]
    if overlap:
        return f"{said} The intervals overlap: for this traffic and objective there is no clear difference."
    if a > b:
        return f"{said} Disaggregation wins{f' by {a / b - 1:.0%}' if b else ''}."
    return f"{said} Co-location wins{f' by {b / a - 1:.0%}' if a else ''}."


def _per_worker(row: Row) -> float:
    return row.capacity.rate / row.shape.total if row.capacity.is_known else -1.0


def _rate(capacity: Capacity, divide: float) -> str:
    more = "" if capacity.is_bounded else " or more"
    return f"{capacity.rate / divide:.3g}{more} ({capacity.low / divide:.3g} to {capacity.high / divide:.3g})"


def _what(study: Study) -> str:
    told = study.provenance
    how = "simulated" if told.backend == "simulate" else "measured on live workers"
    return f"Baton {told.version}, {how}, {told.started}. Objective: {study.objective.text}."


# --- (a) the table --------------------------------------------------------------------------------------------------


def _table(study: Study, workload: Workload) -> str:
    rows = study.of(workload.name)
    head = (
        '<tr><th rowspan="2">configuration<th rowspan="2">verdict<th rowspan="2">bottleneck'
        '<th rowspan="2">capacity<br>requests/s'
        '<th colspan="5" class="group">rates (requests/s)<th colspan="3" class="group">TTFT (ms)'
        '<th colspan="3" class="group">TPOT (ms)<th colspan="3" class="group">ITL (ms)'
        '<th colspan="3" class="group">E2E (s)<th colspan="3" class="group">pools'
        '<th colspan="3" class="group">hand-off<th colspan="3" class="group">tokens/s'
        '<th colspan="4" class="group">trouble'
        '<tr><th class="group">offered<th>achieved<th>goodput<th>attainment<th>queue wait<br>p90 (ms)'
        + '<th class="group">p50<th>p90<th>p99' * 4
        + '<th class="group">busy<th>KV held<th>queued<br>tokens<th class="group">share<br>of E2E<th>GB/s<th>cached'
        + '<th class="group">all<th>per worker<th>per user'
        + '<th class="group">pre-<br>empted<th>refused<th>failed<th>retries'
    )
    body = "".join(_row(row, level) for row in rows if (level := row.at(workload.reference_rate)) is not None)
    clipped = f" {workload.num_clipped} requests were cut to the model's length." if workload.num_clipped else ""
    notes = "".join(
        f'<p class="dim">{escape(row.label)}: {escape(row.capacity.note)}.</p>' for row in rows if row.capacity.note
    )
    return (
        f"<h2>{escape(workload.name)} at {workload.reference_rate:.3g} requests/s</h2>"
        f"<p>Prompts of {workload.mean_prompt:,.0f} and outputs of {workload.mean_output:,.0f} tokens on average."
        f"{clipped} Every row was sent the same requests at the same times, by the same seeds. In brackets and after "
        "±: 95 % confidence.</p>"
        f'<div class="wide"><table>{head}{body}</table></div>{notes}'
    )


def _row(row: Row, level: Level) -> str:
    verdict = level.verdict.value
    growth = _mean([run.steadiness.growth for run in level.runs])
    num_pools = len(level.runs[0].pools)
    cells = [
        f"<td>{escape(row.label)}",
        f'<td class="{verdict}">{verdict} ({growth:+.0%})',
        f"<td>{escape(_commonest([run.bottleneck for run in level.runs]))}",
        f"<td>{_capacity(row.capacity)}",
        f'<td class="group">{level.mean("offered_rate"):.3g}',
        f"<td>{level.mean('achieved_rate'):.3g}",
        f"<td>{_share(level.goodput)}",
        f"<td>{_share(level.attainment, percent=True)}",
        f"<td>{_number(level.latency('queue_wait').p90 * 1e3)}",
        *(_quantiles(level.latency(name), 1e3) for name in ("ttft", "tpot", "itl")),
        _quantiles(level.latency("e2e"), 1.0),
        f'<td class="group">{_per_pool(level, num_pools, "busy")}',
        f"<td>{_per_pool(level, num_pools, 'kv')}",
        f"<td>{_per_pool(level, num_pools, 'queued')}",
        f'<td class="group">{_percent(level.mean("handoff_share"))}',
        f"<td>{_number(level.mean('handoff_bytes_per_s') / 1e9)}",
        f"<td>{_percent(level.mean('cached_share'))}",
        f'<td class="group">{_number(level.mean("tokens_per_s"))}',
        f"<td>{_number(level.mean('tokens_per_s_per_worker'))}",
        f"<td>{_number(level.mean('tokens_per_s_per_user'))}",
        f'<td class="group">{level.mean("preemptions"):,.0f}',
        f"<td>{_ended(level, 'refused'):,}",
        f"<td>{_ended(level, 'failed') + _ended(level, 'deadline'):,}",
        f"<td>{level.mean('retries'):,.0f}",
    ]
    return f"<tr{' class=baseline' if row.configuration.is_baseline else ''}>" + "".join(cells)


def _per_pool(level: Level, num_pools: int, what: str) -> str:
    """One figure a pool, in the order of the cluster file."""
    found = []
    for index in range(num_pools):
        runs = [(run, run.pools[index]) for run in level.runs if index < len(run.pools)]
        if what == "busy":
            text = _percent(_mean([run.utilisation(pool) for run, pool in runs]))
        elif what == "kv":
            text = _percent(_mean([pool.kv_usage for _, pool in runs]))
        else:
            text = _number(_mean([pool.queued_tokens for _, pool in runs]))
        found.append(f"{_letter(runs[0][1].role)} {text}" if num_pools > 1 else text)
    return escape(" / ".join(found))


def _letter(role: Role) -> str:
    return {Role.PREFILL: "P", Role.DECODE: "D", Role.COLOCATED: "C"}[role]


def _quantiles(of: Distribution, factor: float) -> str:
    first, *rest = (_number(value * factor) for value in (of.p50, of.p90, of.p99))
    return f'<td class="group">{first}' + "".join(f"<td>{each}" for each in rest)


def _capacity(capacity: Capacity) -> str:
    if not capacity.is_known:
        return "-"
    if capacity.rate == 0:
        return "none"
    more = "" if capacity.is_bounded else "&ge; "
    return f'{more}{capacity.rate:.3g} <span class="dim">({capacity.low:.3g} to {capacity.high:.3g})</span>'


def _share(share: Share, percent: bool = False) -> str:
    half = max(share.high - share.value, share.value - share.low)
    if percent:
        return f'{share.value:.1%} <span class="dim">±{half * 100:.1f}</span>'
    return f'{share.value:.3g} <span class="dim">±{half:.2g}</span>'


# --- the rest of the page -------------------------------------------------------------------------------------------


def _plan(plan: Plan) -> str:
    rows = []
    for name, choice in (
        ("smallest, disaggregated", plan.smallest),
        ("best split of as many", plan.best),
        ("smallest, co-located", plan.colocated),
    ):
        if choice is None:
            rows.append(f"<tr><td>{name}<td>none of the sizes tried holds the rate<td><td><td>")
            continue
        size = (
            f"{choice.total_low}"
            if choice.total_low == choice.total_high
            else (f"{choice.total_low} to {choice.total_high}")
        )
        rows.append(
            f"<tr><td>{name}<td>{escape(choice.shape.label)}<td>{size}<td>{_share(choice.attainment, percent=True)}"
            f"<td>{_capacity(choice.capacity)}"
        )
    rows.append(
        f"<tr><td>rate-matched by formula<td>{escape(plan.analytic.label)}<td>{plan.analytic.total}<td>-"
        f"<td>{plan.analytic_share:.0%} prefill"
    )
    return (
        f"<h2>Sizes for {plan.rate:.3g} requests/s of {escape(plan.workload)}</h2>"
        "<table><tr><th><th>workers<th>number of workers<br>in 95 % of resamples<th>attainment"
        "<th>capacity<br>requests/s" + "".join(rows) + "</table>"
    )


def _predictions(study: Study) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.label)}<td>{each.rate:.3g}<td>{escape(each.metric)}<td>{each.predicted:.4g}"
        f"<td>{each.measured:.4g}<td>{each.error:+.1%}"
        for each in study.predictions
    )
    head = "<tr><th>configuration<th>requests/s<th>figure (s)<th>predicted<th>measured<th>error"
    return f"<details><summary>Every predicted figure</summary><table>{head}{rows}</table></details>"


def _role_changes(study: Study) -> str:
    rows = [
        f"<tr><td>{escape(row.label)}<td>{escape(change.worker_id)}<td>{change.before.value}<td>{change.after.value}"
        f"<td>{change.drain_s:.3f}<td>{change.total_s:.3f}"
        for row in study.rows
        for level in row.levels
        for run in level.runs
        for change in run.role_changes
    ]
    if not rows:
        return ""
    head = "<tr><th>configuration<th>worker<th>from<th>to<th>at rest<br>after (s)<th>serves<br>after (s)"
    return (
        "<h2>Changes of role</h2><p>Workers that took another role for a configuration, without a restart of their "
        "processes: how long until their requests had ended or moved, and until they served again.</p>"
        f"<table>{head}{''.join(rows)}</table>"
    )


def _provenance(study: Study) -> str:
    told = study.provenance
    facts = (
        ("command", told.command),
        ("started", f"{told.started}, took {told.took_s:,.0f} s"),
        ("backend", told.backend),
        ("model", told.model),
        ("cost model", told.cost_model),
        ("versions", f"Baton {told.version}, Python {told.python}"),
        ("machine", f"{told.machine}, {told.cores} cores"),
        ("seeds", ", ".join(map(str, told.seeds))),
        ("requests", f"{told.num_requests:,} a run and seed; lengths times {told.scale_lengths:g}"),
        ("objective", study.objective.text),
    )
    rows = "".join(f"<tr><td>{name}<td>{escape(text)}" for name, text in facts)
    return f'<h2>What ran</h2><table class="facts">{rows}</table>'


def _words(study: Study) -> str:
    words = (
        ("capacity", f"the highest rate at which {study.objective.text}; by bisection, the same arrivals for all"),
        ("TTFT", "first token's arrival minus send"),
        ("TPOT", "(E2E - TTFT) / (output tokens - 1), of requests with more than one output token"),
        ("ITL", "each gap between two token messages, of all requests of the run"),
        ("E2E", "last token's arrival minus send"),
        ("goodput, attainment", "good requests a second, and their share of those offered; a failed one is not good"),
        (
            "steady window",
            f"requests that came between {WARM_UP:.0%} and {END:.0%} of the time until the last arrival: neither the "
            "filling of the cluster nor its drain. Busy, KV held, queued tokens, ITL and trouble are of the whole run",
        ),
        (
            "verdict",
            f"from the backlog (requests come and not done) in {PARTS} parts of the window. Mann and Kendall's test "
            f"must see it grow at {SIGNIFICANCE:.0%}; by Theil and Sen's slope, growth above {OVERLOADED_GROWTH:.0%} "
            f"of the requests that came is OVERLOADED, above {BACKLOGGED_GROWTH:.0%} BACKLOGGED, else STABLE. In "
            "brackets: growth",
        ),
        ("confidence", "95 %: bootstrap over 40 blocks of requests a run, never narrower than Wilson's interval"),
        ("quantiles", "of each run and seed, then their mean"),
        ("tokens/s per user", "one over the median TPOT"),
        ("hand-off", "wait and transfer, as a share of E2E; GB/s while bytes move"),
        ("bottleneck", "what most of those requests waited for that missed the objective"),
    )
    listed = "".join(f"<dt>{name}<dd>{escape(text)}." for name, text in words)
    return f"<h2>What the words mean</h2><dl>{listed}</dl>"


# --- CSV ------------------------------------------------------------------------------------------------------------


def levels_csv(study: Study) -> str:
    """A line for each configuration, rate and seed."""
    head = ["workload", "configuration", "rate", "run", "offered_rate", "achieved_rate", "goodput", "attainment"]
    head += [f"{name}_{point}_s" for name in ("ttft", "tpot", "itl", "e2e") for point in ("p50", "p90", "p99")]
    head += ["tokens_per_s", "tokens_per_s_per_worker", "tokens_per_s_per_user", "preemptions", "handoff_share"]
    head += ["growth", "verdict", "bottleneck"]
    rows: list[list[object]] = []
    for row in study.rows:
        for level in row.levels:
            for number, run in enumerate(level.runs):
                cells: list[object] = [row.workload, row.label, level.rate, number, run.offered_rate, run.achieved_rate]
                cells += [run.goodput.value, run.attainment.value]
                cells += [
                    getattr(of, point)
                    for of in (run.ttft, run.tpot, run.itl, run.e2e)
                    for point in ("p50", "p90", "p99")
                ]
                cells += [run.tokens_per_s, run.tokens_per_s_per_worker, run.tokens_per_s_per_user, run.preemptions]
                cells += [run.handoff_share, run.steadiness.growth, run.steadiness.verdict.value, run.bottleneck]
                rows.append(cells)
    return _csv(head, rows)


def configurations_csv(study: Study) -> str:
    """A line for each configuration and workload."""
    head = ["workload", "configuration", "prefill", "decode", "colocated", "capacity", "capacity_low", "capacity_high"]
    head += ["is_bounded", "analytic_prefill_share", "analytic_rate", "note"]
    return _csv(
        head,
        [
            [
                row.workload,
                row.label,
                row.shape.prefill,
                row.shape.decode,
                row.shape.colocated,
                row.capacity.rate,
                row.capacity.low,
                row.capacity.high,
                row.capacity.is_bounded,
                row.analytic_share,
                row.analytic_rate,
                row.capacity.note,
            ]
            for row in study.rows
        ],
    )


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return out.getvalue()


# --- words for numbers ----------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "-"


def _ended(level: Level, how: str) -> int:
    return sum(run.ended.get(how, 0) for run in level.runs)


def _commonest(values: Sequence[str]) -> str:
    return max(values, key=values.count)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
