"""What the command line shows: tables of a request's timeline, of a cluster's status and of a benchmark.

Owns: the words, units and widths. Takes values, gives things that rich can print; prints nothing itself.
Refuses to know: where values come from, and whether a terminal or a file is written to.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from baton.client.bench import Distribution, Report
from baton.client.result import Result
from baton.client.resume import Finish, Timeline
from baton.proto import cluster_pb2 as cluster
from baton.proto import worker_pb2 as wire

_STAGES = (
    ("router wait", "router_wait"),
    ("prefill queue", "prefill_queue"),
    ("prefill compute", "prefill_compute"),
    ("hand-off wait", "handoff_wait"),
    ("hand-off transfer", "handoff_transfer"),
    ("decode admission", "decode_admission"),
    ("decode", "decode"),
    ("retry", "retry"),
)
_EIGHTHS = " ▏▎▍▌▋▊▉"
_BAR_CELLS = 24
_USAGE_CELLS, _WIDE_USAGE_CELLS = 5, 20
_NARROW, _WIDE = 80, 130
_MIN_REQUESTS, _MAX_REQUESTS = 3, 10
_MAX_LANES = 8
_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "lost": "red"}


def printable(text: str) -> str:
    """The text without the control characters by which a model's output could steer a terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


# --- one request ----------------------------------------------------------------------------------------------------


def timeline(result: Result) -> RenderableType:
    """Where the first output's time went, and what it took."""
    finish = result.finish
    return Group(_stages(finish.timeline), *(Text(line, style="dim") for line in _facts(result, finish)))


def _stages(timeline: Timeline) -> Table:
    table = _table()
    table.add_column("STAGE")
    table.add_column("MS", justify="right")
    table.add_column("SHARE", justify="right")
    table.add_column("")
    for name, field in _STAGES:
        seconds: float = getattr(timeline, field)
        if seconds > 0 or field != "retry":
            share = seconds / timeline.total if timeline.total > 0 else 0.0
            table.add_row(name, f"{seconds * 1e3:.1f}", f"{share:.1%}", Text(bar(share, _BAR_CELLS).rstrip(), "cyan"))
    table.add_row(Text("total", "bold"), Text(f"{timeline.total * 1e3:.1f}", "bold"), "", "")
    return table


def _facts(result: Result, finish: Finish) -> Iterable[str]:
    usage = finish.usage
    notes = [f"{usage.cached_tokens} cached", f"{usage.transferred_tokens} transferred"]
    if usage.recomputed_tokens:
        notes.append(f"{usage.recomputed_tokens} recomputed")
    yield f"prompt {counted(usage.prompt_tokens, 'token')} ({', '.join(notes)})"
    ended = finish.reason.name.lower() + (f" {finish.stop!r}" if finish.stop else "")
    yield f"output {counted(usage.completion_tokens, 'token')}, {pace(result)}, ended by {ended}"
    if finish.prefill_worker or finish.decode_worker:
        path = f"{finish.prefill_worker or '-'} -> {finish.decode_worker or '-'}"
        if finish.prefill_worker == finish.decode_worker:
            path = finish.decode_worker
        over = f" over {finish.connector}" if finish.connector else ""
        again = f", {counted(finish.retries, 'retry', 'retries')}" if finish.retries else ""
        yield f"worked on by {path}{over}{again}"
    if result.num_resumes:
        yield f"the stream broke and was resumed {counted(result.num_resumes, 'time')}"


def pace(result: Result) -> str:
    """First-token time and speed, by the client's clock."""
    text = f"first after {result.ttft_s * 1e3:.0f} ms"
    gaps = len(result.token_ids) - 1
    decode_s = result.total_s - result.ttft_s
    return f"{text}, then {gaps / decode_s:.1f} tokens/s" if gaps > 0 and decode_s > 0 else text


def counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def bar(share: float, cells: int) -> str:
    """A bar that is `share` of `cells` characters long, to an eighth of one."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).ljust(cells)[:cells]


# --- the cluster ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """How one part of a stacked bar is drawn: a sign of its own, so that it can be read without colours too."""

    name: str
    field: str
    sign: str
    style: str


_BLOCKS = (
    Mark("held", "held_blocks", "█", "dodger_blue2"),
    Mark("lent", "lent_blocks", "▓", "orange_red1"),
    Mark("quarantined", "quarantined_blocks", "x", "plum3"),
    Mark("cached", "cached_blocks", "░", "sky_blue2"),
)
_REQUEST_STAGES = (
    Mark("retry", "retry", "x", "bold"),
    Mark("router wait", "router_wait", "·", "bright_black"),
    Mark("prefill queue", "prefill_queue", "░", "yellow"),
    Mark("prefill compute", "prefill_compute", "▓", "dark_orange"),
    Mark("hand-off wait", "handoff_wait", "~", "plum3"),
    Mark("hand-off transfer", "handoff_transfer", "=", "orange_red1"),
    Mark("decode admission", "decode_admission", "+", "sky_blue2"),
    Mark("decode", "decode", "█", "dodger_blue2"),
)


@dataclass(frozen=True, slots=True)
class Status:
    """Router, pools, workers and the last requests; as wide as the terminal, at least 80 columns, and no higher.

    QUEUED counts prompt tokens, MOVING hand-offs. On a wide terminal workers show more.
    """

    message: cluster.ClusterStatus

    def __rich_console__(self, terminal: RichConsole, options: ConsoleOptions) -> RenderResult:
        message, width = self.message, max(options.max_width, _NARROW)
        yield from _router(message)
        yield Text()
        yield _workers(message, is_wide=width >= _WIDE)
        if width >= _WIDE:
            yield _legend(_BLOCKS)
        notes = [
            f"{worker.worker_id}: {worker.note}" for pool in message.pools for worker in pool.workers if worker.note
        ]
        for note in notes:
            yield Text(printable(note), style="yellow")
        lanes = _shown_lanes(message)
        if lanes:
            yield Text()
            yield _lanes(lanes, width)
        yield Text()
        num_lines = (
            (2 + len(lanes) if lanes else 0)
            + 11
            + len(notes)
            + len(message.pools)
            + sum(len(pool.workers) for pool in message.pools)
        )
        num_rows = max(_MIN_REQUESTS, terminal.height - num_lines) if terminal.is_terminal else _MAX_REQUESTS
        if message.recent:
            yield _recent(message.recent[:num_rows], width)
            yield _legend(_REQUEST_STAGES)
        else:
            yield Text("no request has ended yet", style="dim")


def _workers(message: cluster.ClusterStatus, is_wide: bool) -> Table:
    table = _table(gap=2 if is_wide else 1)
    table.add_column("WORKER", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    for name in ("QUEUED", "RUN", "WAIT", "MOVING"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV USAGE", no_wrap=True)
    for name in ("STEP MS", *(("TOKENS/S", "PROMPT/S", "PULLED", "MEMORY") if is_wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("INCARN.", no_wrap=True)
    table.add_column("RESTARTS", justify="right", no_wrap=True)
    shows_hosts = is_wide and len({worker.host for pool in message.pools for worker in pool.workers if worker.host}) > 1
    if shows_hosts:
        table.add_column("HOST", no_wrap=True)
    for pool in message.pools:
        ready = sum(worker.state == "ready" for worker in pool.workers)
        name = pool.name if pool.name == pool.role else f"{pool.name} ({pool.role})"
        table.add_row(Text(f"{name} {ready}/{pool.size}", "bold"))
        for worker in pool.workers:
            cells = _worker(worker, is_wide, pool.role)
            table.add_row(*cells, *([printable(worker.host)] if shows_hosts else ()))
    return table


@dataclass(frozen=True, slots=True)
class _Lane:
    reader: str
    lane: wire.Lane

    @property
    def is_wrong(self) -> bool:
        return self.lane.state in ("refused", "lost") or self.lane.is_slow or bool(self.lane.reason)


def _shown_lanes(message: cluster.ClusterStatus) -> list[_Lane]:
    """The ways of KV between workers: those with something wrong, and others as far as there is room."""
    workers = [worker for pool in message.pools for worker in pool.workers]
    lanes = [_Lane(worker.worker_id, lane) for worker in workers for lane in worker.lanes]
    return sorted(lanes, key=lambda it: not it.is_wrong)[:_MAX_LANES]


def _lanes(lanes: Sequence[_Lane], width: int) -> Table:
    table = _table()
    for name in ("LANE", "STATE"):
        table.add_column(name, no_wrap=True)
    for name in ("GB/S", "ROUND TRIP"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("BY", no_wrap=True, overflow="ellipsis", max_width=width // 2)
    for shown in lanes:
        lane = shown.lane
        slow = f" of {lane.expected_gb_per_s:g}" if lane.is_slow else ""
        table.add_row(
            Text(f"{lane.source} > {shown.reader}"),
            Text(lane.state, "red" if shown.is_wrong else ""),
            Text(f"{lane.gb_per_s:.3g}{slow}" if lane.gb_per_s else "-", "red" if lane.is_slow else ""),
            latency(lane.round_trip_s) if lane.round_trip_s else "-",
            Text(printable(lane.reason or lane.transport)),
        )
    return table


def _router(message: cluster.ClusterStatus) -> Iterable[Text]:
    router = message.router
    head = Text.assemble((message.model or "no model", "bold"), f", router {router.incarnation[:8]}")
    head.append(f", up {duration(router.uptime_s)}")
    if router.draining:
        head.append(", draining", style="yellow")
    if message.router_replicas > 1:
        missing = message.router_replicas - len(message.routers)
        head.append(f", {len(message.routers)} of {message.router_replicas} routers", style="red" if missing else "")
    yield head
    routers = message.routers or [router]
    running, queued, requests, retries, failed, refused = (
        sum(getattr(it, name) for it in routers)
        for name in ("running", "queued", "requests_total", "retries_total", "failed_total", "refused_total")
    )
    yield Text(
        f"{counted(running, 'request')} running, {queued:,} queued, {requests:,} in all, "
        f"{counted(retries, 'retry', 'retries')}, {failed:,} failed, {refused:,} refused"
    )


def _worker(worker: cluster.WorkerStatus, is_wide: bool, pool_role: str) -> list[RenderableType]:
    cells: list[RenderableType] = [
        Text(f"  {worker.worker_id}" + (f" ({worker.role})" if worker.role not in ("", pool_role) else "")),
        Text(worker.state, _STATE_STYLES.get(worker.state, "")),
    ]
    load, pace = worker.load, worker.pace
    figures: list[RenderableType] = [
        f"{load.queued_tokens:,}",
        str(load.running),
        str(load.waiting),
        str(load.receiving + load.exported),
        _kv_usage(load, is_wide),
        f"{load.step_s * 1e3:.1f}",
    ]
    if is_wide:
        figures += [
            f"{pace.tokens_per_s:,.0f}",
            f"{pace.prompt_tokens_per_s:,.0f}",
            size(load.counters.bytes_pulled),
            size(worker.rss_bytes),
        ]
    cells += figures if worker.HasField("load") else ["-"] * len(figures)
    return [*cells, worker.incarnation[:8], str(worker.restarts)]


def _kv_usage(load: wire.LoadReport, is_wide: bool) -> Text:
    """The share in use; what is only cached is free to be taken."""
    if load.total_blocks == 0:
        return Text("-")
    share = 1 - load.free_blocks / load.total_blocks
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    if not is_wide:
        return Text.assemble((bar(share, _USAGE_CELLS), style), f" {share:4.0%}")
    shares = [getattr(load, mark.field) / load.total_blocks for mark in _BLOCKS]
    return Text.assemble(stacked(shares, _BLOCKS, _WIDE_USAGE_CELLS), (f" {share:4.0%}", style))


def _recent(requests: Sequence[cluster.RecentRequest], width: int) -> Table:
    table = _table(gap=1)
    longest = max(request.timeline.total for request in requests) or 1.0
    id_cells = 16 if width < _WIDE else 28
    for name, cells in (("REQUEST", id_cells), ("OUTCOME", 9)):
        table.add_column(name, width=cells, no_wrap=True)
    for name, cells in (("PROMPT", 6), ("OUTPUT", 6), ("TTFT", 7), ("TOTAL", 7)):
        table.add_column(name, width=cells, justify="right", no_wrap=True)
    bar_cells = width - id_cells - 9 - 26 - 6
    table.add_column(f"0 to {latency(longest)}", width=bar_cells, no_wrap=True)
    for request in requests:
        ended = request.timeline
        shares = [getattr(ended, mark.field) / longest for mark in _REQUEST_STAGES]
        is_well = request.outcome in ("stop", "length")
        table.add_row(
            Text(printable(request.request_id), overflow="ellipsis"),
            Text(request.outcome, "green" if is_well else "yellow" if request.outcome == "aborted" else "red"),
            f"{request.prompt_tokens:,}",
            f"{request.completion_tokens:,}",
            latency(request.ttft_s) if request.HasField("ttft_s") else "-",
            latency(ended.total),
            stacked(shares, _REQUEST_STAGES, bar_cells),
        )
    return table


def _legend(marks: Sequence[Mark]) -> Columns:
    return Columns([Text.assemble((mark.sign * 2, mark.style), (f" {mark.name}", "dim")) for mark in marks], (0, 2))


def stacked(shares: Sequence[float], marks: Sequence[Mark], cells: int) -> Text:
    """Parts one after another, each from where the sum of those before it falls on the cells: errors do not add up."""
    text, share, edge = Text(), 0.0, 0
    for part, mark in zip(shares, marks, strict=True):
        share += part
        end = min(round(share * cells), cells)
        text.append(mark.sign * (end - edge), mark.style)
        edge = end
    text.append(" " * (cells - edge))
    return text


def latency(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.09995 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 99.995 else f"{seconds:.0f} s"


def size(num_bytes: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    return f"{num_bytes:.{0 if units[0] == 'B' or num_bytes >= 99.95 else 1}f} {units[0]}"


def duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


# --- a benchmark ----------------------------------------------------------------------------------------------------


def report(report: Report) -> RenderableType:
    """Rates, then latencies with what each means."""
    rates = _table()
    rates.show_header = False
    rates.add_column("")
    rates.add_column("", justify="right")
    rates.add_column("", style="dim")
    for name, value, note in _rates(report):
        rates.add_row(name, value, note)
    latencies = _table()
    latencies.add_column("MS")
    for name in ("MEAN", "P50", "P90", "P99", "MAX"):
        latencies.add_column(name, justify="right")
    latencies.add_column("", style="dim")
    for name, distribution, meaning in (
        ("TTFT", report.ttft, "first token's arrival minus send"),
        ("TPOT", report.tpot, "(E2E - TTFT) / (output tokens - 1)"),
        ("ITL", report.itl, "gaps between token messages, of all requests"),
        ("E2E", report.e2e, "last token's arrival minus send"),
    ):
        latencies.add_row(name, *_milliseconds(distribution), meaning)
    parts: list[RenderableType] = [rates, Text(), latencies]
    if report.errors:
        parts += [Text(), _errors(report.errors)]
    return Group(*parts)


def _rates(report: Report) -> Iterable[tuple[str, str, str]]:
    yield "requests", f"{report.num_finished:,} of {report.num_requests:,}", f"in {report.duration_s:.1f} s"
    offered = f"{report.offered_rate:.2f} offered" if report.offered_rate is not None else "offered all at once"
    yield "requests/s", f"{report.requests_per_s:.2f}", offered
    yield "output tokens/s", f"{report.output_tokens_per_s:,.1f}", f"{report.output_tokens:,} tokens"
    yield "prompt tokens/s", f"{report.prompt_tokens_per_s:,.1f}", f"{report.prompt_tokens:,} tokens"
    if report.goodput_per_s is not None:
        limits = (("TTFT", report.slo_ttft_ms), ("TPOT", report.slo_tpot_ms))
        within = " and ".join(f"{name} <= {limit:g} ms" for name, limit in limits if limit is not None)
        yield "goodput/s", f"{report.goodput_per_s:.2f}", f"{report.attainment:.1%} of requests with {within}"
    if report.num_clipped:
        yield "shortened", f"{report.num_clipped:,}", "requests that were longer than the model allows"
    if report.num_other_length:
        yield "other length", f"{report.num_other_length:,}", "answers that had more or fewer tokens than asked for"


def _milliseconds(distribution: Distribution | None) -> list[str]:
    if distribution is None:
        return ["-"] * 5
    values = (distribution.mean, distribution.p50, distribution.p90, distribution.p99, distribution.max)
    return [f"{seconds * 1e3:,.1f}" for seconds in values]


def _errors(errors: Mapping[str, int]) -> Table:
    table = _table()
    table.add_column("ERROR")
    table.add_column("REQUESTS", justify="right")
    for code, number in sorted(errors.items(), key=lambda entry: -entry[1]):
        table.add_row(Text(code, "red"), f"{number:,}")
    return table


def _table(gap: int = 2) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", highlight=False)
