"""S2: one prefill and one decode worker, a core each, behind their router, under load, beside vLLM's on the same cores.

Owns: the loads, the turns and the rows. The client is that of `baton bench`, over HTTP, and the same for all; it is not
pinned and shares the two cores, as each side's router does.

    ours           a cluster of `baton serve`, KV by NIXL. Each round starts a new one.
    disaggregated  vLLM 1P1D: NixlConnector and its Rust router, with the settings that suit it best here
    colocated      one vLLM server with a thread on each core; only its inter-token latency is compared

vLLM's servers take minutes to start, so they start once; who is not measured is halted by SIGSTOP and takes no CPU.
Each side answers a few requests of the kind before each load, which do not count. All sides get the same requests
at the same times, greedy and of exact lengths; each round has its own, so that no prefix cache helps.

A rate below saturation bounds throughput and goodput for both sides: where the peer keeps up with what is offered,
those two are shown without a bar.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from bars import Better, Measure, Row
from case import Options
from clusters import await_memory, local_ray, pin_workers, serving, shape, worker_pids
from peers import KV_GIB, MAX_MODEL_LEN, SERVER_BUDGET, Servers, vllm_servers

from baton.capacity import workload
from baton.client import bench
from baton.client.errors import BatonError
from baton.client.servers import OpenAIServer
from baton.engine.checkpoint import resolve_model
from baton.router.config import ClusterConfig

BAR = 1.3
KV_BLOCK_BYTES = 16 * 23_040
TIMEOUT_S = 300.0
WARM_UPS = 2
TOKEN_IDS = range(1_000, 20_000)


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` in requests a second; infinite sends all at once. Beside which servers of the peer it is measured."""

    name: str
    workload: str
    scale: float
    rate: float
    requests: int
    objectives: bench.Objectives
    beside: tuple[str, ...] = ("disaggregated",)

    @property
    def what(self) -> str:
        return f"{self.name}, {'saturation' if math.isinf(self.rate) else f'{self.rate:g}/s'}"


BOTH = ("disaggregated", "colocated")
FIXED = ("512/64", "fixed:512/64", 1.0)
CHAT = ("chat x 0.1", "chat", 0.1)
SLO_FIXED = bench.Objectives(ttft_ms=1000.0, tpot_ms=50.0)
SLO_CHAT = bench.Objectives(ttft_ms=500.0, tpot_ms=50.0)
LOADS = (
    Load(*FIXED, 1.0, 16, SLO_FIXED),
    Load(*FIXED, 2.0, 32, SLO_FIXED, BOTH),
    Load(*FIXED, 4.0, 48, SLO_FIXED),
    Load(*FIXED, math.inf, 40, SLO_FIXED, BOTH),
    Load(*CHAT, 4.0, 48, SLO_CHAT),
    Load(*CHAT, math.inf, 96, SLO_CHAT, BOTH),
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a report. `offered`: what of it was asked for, which no server can go beyond; None if unbounded."""

    name: str
    unit: str
    better: Better
    peer: str = "disaggregated"
    offered: Callable[[bench.Report], float] | None = None

    def room(self, report: bench.Report) -> float:
        """How many times as much any server could reach as that of a report did: all that was offered."""
        reached = self.of(report)
        return self.offered(report) / reached if self.offered is not None and reached else math.inf

    def of(self, report: bench.Report) -> float:
        match self.name.split():
            case ["tokens"]:
                return report.output_tokens_per_s
            case ["goodput"]:
                return report.goodput_per_s or 0.0
            case [name, percentile]:
                distribution = getattr(report, name.lower())
                return 1e3 * getattr(distribution, percentile) if distribution is not None else math.nan
        raise ValueError(f"no figure is called {self.name!r}")


def _requests_offered(report: bench.Report) -> float:
    return report.offered_rate if report.offered_rate is not None else math.inf


def _tokens_offered(report: bench.Report) -> float:
    return _requests_offered(report) * report.output_tokens / report.num_requests


METRICS = (
    Metric("TTFT p50", "ms", Better.LESS),
    Metric("TTFT p99", "ms", Better.LESS),
    Metric("TPOT p50", "ms", Better.LESS),
    Metric("TPOT p99", "ms", Better.LESS),
    Metric("tokens", "per s", Better.MORE, offered=_tokens_offered),
    Metric("goodput", "per s", Better.MORE, offered=_requests_offered),
    Metric("ITL p99", "ms", Better.LESS, peer="colocated"),
)
NAMES = {"disaggregated": "vLLM 1P1D", "colocated": "vLLM colocated"}

Reports = dict[tuple[Load, str], list[bench.Report]]


def rows(options: Options) -> Iterator[Row]:
    loads = LOADS
    if options.quick:
        loads = tuple(replace(load, requests=4, rate=4.0) for load in (LOADS[1], LOADS[4]))
    found: Reports = {}
    with ExitStack() as stack:
        stack.enter_context(local_ray())
        peers: dict[str, Servers] = {}
        if options.peers is not None:
            model = resolve_model(options.model)
            peers = stack.enter_context(vllm_servers(options.peers, model, SERVER_BUDGET, options.cores))
            for servers in peers.values():
                servers.halt()
        trouble = None
        try:
            for number in range(options.rounds_or(3)):
                with serving(_cluster(options.model)) as addresses:
                    pin_workers(addresses.grpc, options.cores)
                    pids = worker_pids(addresses.grpc)
                    await_memory(pids)
                    _measure(f"http://{addresses.http}", "ours", loads, number, found)
                    if worker_pids(addresses.grpc) != pids:
                        raise RuntimeError("a worker of ours was restarted: its figures are not those of two cores")
                for name, servers in peers.items():
                    servers.resume()
                    _measure(servers.url, name, loads, number, found)
                    servers.halt()
        except (RuntimeError, BatonError) as error:
            trouble = error  # told when what is known has been
    for load in loads:
        for metric in METRICS:
            if metric.peer in load.beside:
                yield _row(load, metric, found)
    if trouble is not None:
        raise trouble


def _cluster(model: str) -> ClusterConfig:
    """The defaults of `baton serve --prefill 1 --decode 1`, with the peer's budget and KV, and a thread a worker."""
    return shape(model, 1, 1, dtype="bfloat16", num_blocks=(KV_GIB << 30) // KV_BLOCK_BYTES, budget=SERVER_BUDGET)


def _measure(url: str, side: str, loads: Sequence[Load], number: int, into: Reports) -> None:
    """A round of one side. No two loads have a seed in common, so no prompt begins like one that was asked before."""
    for index, load in enumerate(loads):
        if side in ("ours", *load.beside):
            into.setdefault((load, side), []).append(asyncio.run(_report(url, load, number * len(loads) + index)))


class GreedyServer(OpenAIServer):
    """Asks each server for as little as possible beside the tokens: no draws, no floor of tokens, usage at the end."""

    def settings(self, output_tokens: int, seed: int) -> dict[str, Any]:
        return {
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def prompts(load: Load, seed: int, model: bench.ServedModel) -> tuple[list[bench.Job], list[bench.Job]]:
    """What is sent to warm up, all at once, and what is measured."""
    parts = []
    for number, rate, own_seed in ((WARM_UPS, math.inf, 2 * seed + 1), (load.requests, load.rate, 2 * seed)):
        plan = workload.requests(load.workload, number, rate, seed=own_seed, scale_lengths=load.scale)
        parts.append(bench.jobs(plan, model, own_seed))
    return parts[0], parts[1]


async def _report(url: str, load: Load, seed: int) -> bench.Report:
    """Of one load. Raises RuntimeError if a request failed: figures of the others would be too good."""
    server = GreedyServer(url, None, TIMEOUT_S)
    try:
        model = await server.model()
        model = replace(model, max_model_len=MAX_MODEL_LEN, token_ids=TOKEN_IDS)
        warm_up, work = prompts(load, seed, model)
        await bench.run(server, warm_up)
        samples = await bench.run(server, work)
    finally:
        await server.close()
    report = bench.summarize(work, samples, load.objectives)
    if report.errors or report.num_other_length:
        message = next((sample.message for sample in samples if sample.error), "")
        raise RuntimeError(f"{load.what} at {url}: {report.errors}, {report.num_other_length} other lengths; {message}")
    return report


def _row(load: Load, metric: Metric, found: Reports) -> Row:
    ours = found.get((load, "ours"), [])
    theirs = found.get((load, metric.peer), [])
    room = statistics.median(map(metric.room, theirs)) if theirs else math.inf
    bar = BAR if room >= BAR else None
    measure = Measure(
        NAMES[metric.peer], metric.better, bar, tuple(map(metric.of, ours)), tuple(map(metric.of, theirs))
    )
    slo = f" at TTFT {load.objectives.ttft_ms:g}, TPOT {load.objectives.tpot_ms:g} ms"
    what = f"{load.what}: {metric.name}{slo if metric.name == 'goodput' else ''}"
    note = "" if bar is not None else f"{room:.2f} would be all that is offered"
    return Row("S2", what, metric.unit, (measure,), note)
