"""The pictures of a study.

Owns: what each picture shows, its axes, and a look that is told apart without colours: every configuration keeps one
colour (Okabe and Ito's, made for colour-blind eyes), one marker and one kind of line in all pictures.
Refuses to know: pages and files (`report`). Needs matplotlib, which only this file imports.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from baton.capacity.outcome import Slo
from baton.capacity.study import Level, Prediction, Row, Study
from baton.capacity.summary import MARGINS

matplotlib.use("Agg")

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#8C6D31")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)))
_BASELINE = "#000000"
_GREY = "#666666"
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "baton",
    "font.family": ["DejaVu Sans", "sans-serif"],
}
# Up to the first token, and what follows it before the second one.
_STAGES = (
    ("router_wait", "router wait", "#999999", ""),
    ("prefill_queue", "prefill queue", "#E69F00", "//"),
    ("prefill_compute", "prefill compute", "#0072B2", ""),
    ("handoff_wait", "hand-off wait", "#CC79A7", "xx"),
    ("handoff_transfer", "hand-off transfer", "#D55E00", ""),
    ("decode_admission", "decode admission", "#56B4E9", ".."),
)
_FIRST_TOKEN_STAGES = 3
_LEGEND_LETTERS = 100


@dataclass(frozen=True, slots=True)
class Picture:
    """`name` is that of its file. `caption`: what a reader should see in it, in a sentence or two."""

    name: str
    title: str
    caption: str
    figure: Figure

    def png(self) -> bytes:
        with matplotlib.rc_context(_STYLE):
            out = io.BytesIO()
            self.figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
        return out.getvalue()

    def svg(self) -> str:
        """To be put into a page: without the head of a file of its own."""
        with matplotlib.rc_context(_STYLE):
            out = io.StringIO()
            self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        return text[text.index("<svg") :]


def pictures(study: Study) -> list[Picture]:
    """All that there is something to show for."""
    with matplotlib.rc_context(_STYLE):
        found = []
        for workload in study.workloads:
            rows = study.of(workload.name)
            if any(len(row.levels) > 1 for row in rows):
                found.append(_goodput(rows, workload.name, study))
            found.append(_frontier(rows, workload.name))
            found.append(_breakdown(rows, workload.name, workload.reference_rate, study.objective.slo))
            found.append(_margins(rows, workload.name, workload.reference_rate, study))
        if len([row for row in study.rows if _is_point(row)]) > 1:
            found.insert(0, _capacities(study))
        if study.plan is not None and study.plan.drifts:
            found.append(_drift(study))
        if study.predictions:
            found.append(_predictions(study.predictions))
        for picture in found:
            # Where everything goes is worked out once, and not again for each format.
            picture.figure.draw_without_rendering()
            picture.figure.set_layout_engine("none")
        return found


def _goodput(rows: Sequence[Row], workload: str, study: Study) -> Picture:
    figure, axes = _figure(7.6, 4.6)
    best = max((row.capacity.rate for row in rows), default=0.0)
    tried = [level.rate for row in rows for level in row.levels]
    most = min(best * 1.5, max(tried)) if best else max(tried)
    for index, row in enumerate(rows):
        look = _look(index, row)
        levels = [level for level in row.levels if level.rate <= most]
        rates = [level.rate for level in levels]
        shares = [level.attainment.scaled(level.rate) for level in levels]
        axes.plot(rates, [share.value for share in shares], label=row.label, ms=4, **look)
        axes.fill_between(
            rates,
            [share.low for share in shares],
            [share.high for share in shares],
            color=look["color"],
            alpha=0.12,
            lw=0,
        )
        if row.capacity.rate > 0:
            axes.axvline(row.capacity.rate, 0, 0.04, color=look["color"], lw=3)
    edge = [0, most]
    axes.plot(edge, edge, color=_GREY, lw=0.8, ls=":", label="every request good")
    target = [rate * study.objective.share for rate in edge]
    axes.plot(edge, target, color=_GREY, lw=1.4, label=f"objective: {study.objective.share:.0%} good")
    axes.set(xlabel="offered rate (requests/s)", ylabel="goodput (good requests/s)", xlim=(0, most), ylim=(0, most))
    _legend(figure, axes)
    caption = (
        f"A request is good if it meets {_bounds(study.objective.slo)}. A configuration holds a rate as long as its "
        "curve stays above the grey line; a thick tick on the axis marks where it leaves it, its capacity. Bands: 95 % "
        "confidence."
    )
    return Picture(f"goodput-{workload}", f"Goodput against offered rate: {workload}", caption, figure)


def _frontier(rows: Sequence[Row], workload: str) -> Picture:
    figure, axes = _figure(7.6, 4.6)
    for index, row in enumerate(rows):
        points = [
            (level.mean("tokens_per_s_per_user"), level.mean("tokens_per_s_per_worker"))
            for level in row.levels
            if math.isfinite(level.mean("tokens_per_s_per_user"))
        ]
        axes.plot([x for x, _ in points], [y for _, y in points], label=row.label, ms=4, **_look(index, row))
    axes.set(xlabel="output tokens/s per user (1 / median TPOT)", ylabel="output tokens/s per worker")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    caption = (
        "Each point is one offered rate, the lightest at the lower right. Further up, a worker earns more; further "
        "right, each user reads faster. A curve that lies outside another one is better at both."
    )
    return Picture(f"frontier-{workload}", f"Throughput against speed for the user: {workload}", caption, figure)


def _capacities(study: Study) -> Picture:
    figure, axes = _figure(7.6, 4.6)
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in study.rows:
        if _is_point(row):
            groups.setdefault((row.workload, row.shape.total, row.configuration.knobs.label), []).append(row)
    several = len({workload for workload, _, _ in groups}) > 1
    for index, ((workload, total, knobs), rows) in enumerate(sorted(groups.items())):
        look = _look(index)
        ordered = sorted(rows, key=lambda row: row.shape.prefill_share)
        shares = [row.shape.prefill_share for row in ordered]
        heights = [row.capacity.rate / total for row in ordered]
        errors = [
            [height - row.capacity.low / total for height, row in zip(heights, ordered, strict=True)],
            [row.capacity.high / total - height for height, row in zip(heights, ordered, strict=True)],
        ]
        name = ", ".join(
            [*([workload] if several else []), f"prefill:decode of {total} workers", *([knobs] if knobs else [])]
        )
        axes.errorbar(shares, heights, yerr=errors, capsize=3, ms=6, label=name, **look)
        for row, x, y in zip(ordered, shares, heights, strict=True):
            axes.annotate(
                row.shape.label, (x, y), (7, -13), textcoords="offset points", fontsize=9, color=look["color"]
            )
        if math.isfinite(analytic := ordered[0].analytic_share):
            axes.axvline(analytic, color=look["color"], lw=1.2, ls=":")
            axes.annotate(
                f"rate-matched {analytic:.2f}",
                (analytic, 0.02 + 0.06 * index),
                (4 if analytic < 0.7 else -4, 0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize=9,
                color=look["color"],
                ha="left" if analytic < 0.7 else "right",
            )
        baseline = _baseline_of(study, ordered[0])
        if baseline is not None and baseline.capacity.is_known:
            axes.axhline(
                baseline.capacity.rate / total,
                color=look["color"] if several or len(groups) > 1 else _BASELINE,
                lw=1.2,
                ls="--",
                label=f"{baseline.label}{f' ({workload})' if several else ''}",
            )
    axes.set(xlabel="prefill workers / all workers", ylabel="capacity per worker (requests/s)", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    caption = (
        f"Capacity is the highest rate at which {study.objective.text}. Bars: 95 % confidence. Dashed: as many "
        "co-located workers. Dotted: the share of prefill workers by which a formula without queues would match both "
        "pools."
    )
    return Picture("capacity", "Capacity against the share of prefill workers", caption, figure)


def _breakdown(rows: Sequence[Row], workload: str, rate: float, slo: Slo) -> Picture:
    found = [(row, level) for row in rows if (level := row.at(rate)) is not None]
    figure, axes = _figure(7.6, 1.5 + 0.42 * max(len(found), 2))
    for position, (_, level) in enumerate(found):
        left = 0.0
        for number, (field, name, colour, hatch) in enumerate(_STAGES):
            width = _stage(level, field)
            axes.barh(
                position,
                width,
                left=left,
                height=0.62,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.4,
                label=name if position == 0 else None,
            )
            left += width
            if number == _FIRST_TOKEN_STAGES - 1:
                axes.plot([left, left], [position - 0.42, position + 0.42], color="black", lw=1.8, zorder=5)
    if math.isfinite(slo.ttft_s):
        axes.axvline(slo.ttft_s, color="#B00020", lw=1.2, ls="--", label=f"TTFT bound {slo.ttft_s:g} s")
    axes.set_yticks(range(len(found)), [row.label for row, _ in found])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="seconds, mean over finished requests")
    axes.set_xlim(left=0)
    _legend(figure, axes)
    caption = (
        f"At {rate:.3g} requests/s. Up to the black mark: until the first token (TTFT). Behind it: what lies between "
        "first and second token, while KV moves and the decode worker finds room."
    )
    return Picture(f"breakdown-{workload}", f"Where the time to the first tokens goes: {workload}", caption, figure)


def _margins(rows: Sequence[Row], workload: str, rate: float, study: Study) -> Picture:
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    slo = study.objective.slo
    bounds = (("by_ttft", "TTFT", slo.ttft_s), ("by_tpot", "TPOT", slo.tpot_s))
    for axes, (field, name, bound_s) in zip(both, bounds, strict=True):
        for index, row in enumerate(rows):
            level = row.at(rate)
            if level is None:
                continue
            means = [_mean([getattr(run, field)[at] for run in level.runs]) for at in range(len(MARGINS))]
            unit = bound_s * 1e3 if math.isfinite(bound_s) else 1.0
            axes.plot([margin * unit for margin in MARGINS], means, label=row.label, ms=4, **_look(index, row))
        axes.axhline(study.objective.share, color=_GREY, lw=1.4)
        if math.isfinite(bound_s):
            axes.axvline(bound_s * 1e3, color="#B00020", lw=1.2, ls="--")
        axes.set_xscale("log")
        unit_s = bound_s * 1e3 if math.isfinite(bound_s) else 1.0
        ticks = [margin * unit_s for margin in (0.25, 0.5, 1.0, 2.0, 4.0)]
        axes.set_xticks(ticks, [f"{tick:,.0f}" if tick >= 100 else f"{tick:.3g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(
            xlabel=f"bound on {name} (ms)" if math.isfinite(bound_s) else f"no bound on {name}", ylim=(-0.02, 1.02)
        )
    both[0].set_ylabel("share of good requests")
    handles, labels = both[0].get_legend_handles_labels()
    _outside(figure, handles, labels)
    caption = (
        f"At {rate:.3g} requests/s, if one bound were stricter or milder and the other stayed. Red: the bound that was "
        f"asked for. Grey: the share that must be met ({study.objective.share:.0%}). Where the black curve lies above "
        "the others, co-located workers are the better choice for such a bound."
    )
    return Picture(f"margins-{workload}", f"With stricter and milder bounds: {workload}", caption, figure)


def _drift(study: Study) -> Picture:
    assert study.plan is not None
    drifts = study.plan.drifts
    figure, axes = _figure(7.6, 1.4 + 0.42 * len(drifts))
    names = [_drift_name(drift.prompts, drift.outputs) for drift in drifts]
    for position, drift in enumerate(drifts):
        share = drift.held
        axes.errorbar(
            [share.value],
            [position],
            xerr=[[share.value - share.low], [share.high - share.value]],
            fmt="o",
            color=_COLOURS[0],
            capsize=3,
            label="the sizes recommended" if position == 0 else None,
        )
        needed = drift.choice.label if drift.choice is not None else "more than tried"
        axes.annotate(f"then needed: {needed}", (1.02, position), xycoords=("axes fraction", "data"), va="center")
    axes.axvline(study.objective.share, color=_GREY, lw=1.4, label=f"objective: {study.objective.share:.0%}")
    axes.set_yticks(range(len(drifts)), names)
    axes.invert_yaxis()
    axes.set(xlabel="share of good requests, if sizes stay as recommended", xlim=(-0.02, 1.02))
    _legend(figure, axes)
    caption = (
        f"At {study.plan.rate:.3g} requests/s, with lengths that moved away from those planned for. Right: the "
        "smallest sizes that would hold then."
    )
    return Picture("drift", "If lengths drift", caption, figure)


def _predictions(predictions: Sequence[Prediction]) -> Picture:
    metrics = list(dict.fromkeys(_kind(each) for each in predictions))
    figure = Figure(figsize=(7.6, 3.6 * math.ceil(len(metrics) / 2)), layout="constrained")
    panels = figure.subplots(math.ceil(len(metrics) / 2), 2, squeeze=False).flatten()
    for axes in panels[len(metrics) :]:
        axes.remove()
    panels = panels[: len(metrics)]
    labels = list(dict.fromkeys(each.label for each in predictions))
    for axes, metric in zip(panels, metrics, strict=True):
        of_metric = [each for each in predictions if _kind(each) == metric and each.measured > 0 < each.predicted]
        for index, label in enumerate(labels):
            points = [each for each in of_metric if each.label == label]
            look = {**_look(index), "linestyle": "none"}
            axes.plot([p.measured for p in points], [p.predicted for p in points], label=label, ms=5, **look)
        if of_metric:
            ends = [
                min(min(each.measured, each.predicted) for each in of_metric) * 0.8,
                max(max(each.measured, each.predicted) for each in of_metric) * 1.25,
            ]
            axes.plot(ends, ends, color=_GREY, lw=1)
            axes.fill_between(
                ends, [end * 0.9 for end in ends], [end * 1.1 for end in ends], color=_GREY, alpha=0.15, lw=0
            )
            axes.set(xlim=ends, ylim=ends)
        axes.set(xscale="log", yscale="log", title=metric, xlabel="measured" + _unit(metric))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.title.set_fontsize(10)
        axes.set_ylabel("predicted" + _unit(metric))
    handles, names = panels[0].get_legend_handles_labels()
    _outside(figure, handles, names)
    caption = (
        "The same arrivals, simulated and measured: median and 90th percentile of each latency. On the line: no "
        "error. Grey: within 10 %."
    )
    return Picture("prediction", "Predicted against measured", caption, figure)


# --- what pictures have in common -----------------------------------------------------------------------------------


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _legend(figure: Figure, axes: Axes) -> None:
    _outside(figure, *axes.get_legend_handles_labels())


def _outside(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Below the picture, in as many columns as its width has room for."""
    columns = min(max(_LEGEND_LETTERS // (max(map(len, labels), default=0) + 8), 1), 4)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, handlelength=2.6)


def _look(index: int, row: Row | None = None) -> dict[str, Any]:
    if row is not None and row.configuration.is_baseline:
        return {"color": _BASELINE, "marker": _MARKERS[index % len(_MARKERS)], "linestyle": "--", "linewidth": 1.6}
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINES[index // len(_COLOURS) % len(_LINES)],
        "linewidth": 1.6,
    }


def _is_point(row: Row) -> bool:
    return row.capacity.is_known and not row.configuration.is_baseline


def _baseline_of(study: Study, row: Row) -> Row | None:
    knobs = row.configuration.knobs
    for other in study.of(row.workload):
        same = (other.configuration.knobs.chunk_budget, other.configuration.knobs.policy)
        is_equal = other.configuration.is_baseline and other.shape.total == row.shape.total
        if is_equal and same == (knobs.chunk_budget, knobs.policy):
            return other
    return None


def _stage(level: Level, field: str) -> float:
    value = _mean([getattr(run.stages, field) for run in level.runs])
    return value if math.isfinite(value) else 0.0


def _bounds(slo: Slo) -> str:
    bounds = [
        f"{name} <= {bound_s:g} s"
        for name, bound_s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
        if math.isfinite(bound_s)
    ]
    return " and ".join(bounds) or "no bound but to finish"


def _drift_name(prompts: float, outputs: float) -> str:
    parts = [
        f"{name} {factor - 1:+.0%}" for name, factor in (("prompts", prompts), ("outputs", outputs)) if factor != 1
    ]
    return ", ".join(parts) or "as planned"


def _kind(prediction: Prediction) -> str:
    """The metric without its quantile."""
    return prediction.metric.removesuffix(" p50").removesuffix(" p90")


def _unit(metric: str) -> str:
    return " (s)" if metric in ("TTFT", "TPOT", "E2E") else ""


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
