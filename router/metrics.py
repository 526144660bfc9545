"""What the router counts and shows to Prometheus: requests as clients see them, and the cluster as the router sees it.

Owns: the names of the router's figures, and the list of everything that is to be scraped.
Refuses to know: HTTP (`http.metrics_route`), and what workers show themselves (`engine.metrics`).

    observer of each request -> counters and histograms --+
                                                          +--> page -> written on another thread
    router's books, as they stand at a scrape ------------+

vLLM's names stand where the thing is the same. Labels are bounded: words of ours, and workers' names. Nothing that a
client sends is one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.registry import Collector

from baton.proto.messages import FailureKind, Role
from baton.router.cluster import Member, WorkerState, Workforce
from baton.router.journey import Trouble
from baton.router.ledger import Timeline
from baton.router.observe import Call, Face, OutputRecord, RequestRecord
from baton.router.placement import WorkerView
from baton.router.router import Router
from baton.telemetry.metrics import LATENCY_S, TOKEN_GAP_S, TOKENS, Figures, Meter, Page, Tally

ENGINE = "router"
STAGES = tuple(name for name in Timeline.__dataclass_fields__ if name != "total")
FINISHED_REASONS = {"stop": "stop", "length": "length", "aborted": "abort"}
"""vLLM's word for each end of an output; any other end is an error."""


@dataclass(frozen=True, slots=True)
class Target:
    """One endpoint to scrape: host:port, and what is there. `incarnation`: of the process, as far as it is known."""

    address: str
    role: str
    pool: str
    worker_id: str
    incarnation: str = ""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")


class RouterMetrics:
    """The figures of one router; an `Observer`. Belongs to the router's event loop, all but the page that it gives."""

    def __init__(self, router: Router, workforce: Workforce) -> None:
        self._router = router
        self._workforce = workforce
        self._num_tokens = 0
        self._restarts: dict[str, int] = {}
        self._restarts_seen: dict[str, int] = {}
        self._meter = meter = Meter(router.model_name, ENGINE)
        self._ttft_s = meter.histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", LATENCY_S
        )()
        self._gap_s = Tally(TOKEN_GAP_S)
        self._e2e_s = meter.histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its end, if it went well.", LATENCY_S
        )()
        self._per_token_s = meter.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of an output's tokens after its first.",
            TOKEN_GAP_S,
        )()
        self._queue_s = meter.histogram(
            "vllm:request_queue_time_seconds", "Time of an output in the router's and the worker's queue.", LATENCY_S
        )()
        self._prefill_s = meter.histogram(
            "vllm:request_prefill_time_seconds", "From an output's first step to its first token.", LATENCY_S
        )()
        self._decode_s = meter.histogram(
            "vllm:request_decode_time_seconds",
            "From an output's first token to its last, with the hand-off.",
            LATENCY_S,
        )()
        self._inference_s = meter.histogram(
            "vllm:request_inference_time_seconds", "From an output's first step to its last token.", LATENCY_S
        )()
        stage_s = meter.histogram(
            "baton_request_stage_seconds", "Time of an output in each stage; they add up.", LATENCY_S, "stage"
        )
        self._stage_s = {stage: stage_s(stage) for stage in STAGES}
        self._prompt_tokens = meter.counter("vllm:prompt_tokens", "Prompt tokens of outputs that got a token.")()
        self._prompt_size = meter.histogram("vllm:request_prompt_tokens", "Prompt tokens of an output.", TOKENS)()
        self._computed_size = meter.histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of an output that no prefix cache had.", TOKENS
        )()
        self._output_size = meter.histogram("vllm:request_generation_tokens", "Tokens of an output.", TOKENS)()
        self._longest_size = meter.histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest output.", TOKENS
        )()
        self._n = meter.histogram("vllm:request_params_n", "Outputs that a request asked for.", TOKENS[:6])()
        self._max_tokens = meter.histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request, as admitted.", TOKENS
        )()
        success = meter.counter("vllm:request_success", "Outputs that have ended.", "finished_reason")
        self._success = {reason: success(reason) for reason in (*FINISHED_REASONS.values(), "error")}
        requests = meter.counter("baton_requests", "Requests that are over, or were refused.", "face", "outcome")
        outcomes = ("ok", "aborted", *(trouble.value for trouble in Trouble))
        self._requests = {(face, outcome): requests(face, _word(outcome)) for face in Face for outcome in outcomes}
        accounted = meter.counter(
            "baton_request_tokens", "Tokens as the last messages of outputs account for them.", "source"
        )
        self._cached, self._transferred, self._recomputed = map(accounted, ("cached", "transferred", "recomputed"))

    # --- Observer ---------------------------------------------------------------------------------------------------

    def began(self, request_id: str, call: Call) -> str:
        return ""

    def refused(self, trouble: str, call: Call, fields: Sequence[str]) -> None:
        self._requests[call.face, trouble].inc()

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        if num_tokens:
            self._num_tokens += num_tokens
            if gap_s is not None:
                self._gap_s.observe(gap_s)

    def ended(self, record: RequestRecord) -> None:
        aborted = any(output.finish == "aborted" for output in record.outputs)
        self._requests[record.call.face, record.trouble or ("aborted" if aborted else "ok")].inc()
        if record.ttft_s is not None:
            self._ttft_s.observe(record.ttft_s)
        for output in record.outputs:
            self._output_ended(output, record.prompt_tokens)
        if record.trouble or aborted:
            return
        self._e2e_s.observe(record.duration_s)
        self._n.observe(len(record.outputs))
        self._max_tokens.observe(record.max_tokens)
        self._longest_size.observe(max(output.completion_tokens for output in record.outputs))

    def _output_ended(self, output: OutputRecord, prompt_tokens: int) -> None:
        went_well = output.finish in ("stop", "length")
        self._success[FINISHED_REASONS.get(output.finish, "error")].inc()
        self._cached.inc(output.cached_tokens)
        self._transferred.inc(output.transferred_tokens)
        self._recomputed.inc(output.recomputed_tokens)
        if went_well or output.completion_tokens:
            self._prompt_tokens.inc(prompt_tokens)
        if not went_well:
            return
        self._prompt_size.observe(prompt_tokens)
        self._computed_size.observe(prompt_tokens - output.cached_tokens)
        self._output_size.observe(output.completion_tokens)
        timeline = output.timeline
        for stage, histogram in self._stage_s.items():
            histogram.observe(getattr(timeline, stage))
        decode_s = timeline.handoff_wait + timeline.handoff_transfer + timeline.decode_admission + timeline.decode
        self._queue_s.observe(timeline.router_wait + timeline.prefill_queue)
        self._prefill_s.observe(timeline.prefill_compute)
        self._decode_s.observe(decode_s)
        self._inference_s.observe(timeline.prefill_compute + decode_s)
        if output.completion_tokens > 1:
            self._per_token_s.observe(decode_s / (output.completion_tokens - 1))

    # --- a scrape ---------------------------------------------------------------------------------------------------

    def page(self) -> Collector:
        """All figures. The books are read now; the page may be written on any thread."""
        figures = self._meter.figures()
        self._show_router(figures)
        views = self._router.book.views(time.monotonic())
        for view in views:
            _show_credit(figures, view)
        self._show_workers(figures, self._workforce.members())
        return Page(self._meter.registry, figures)

    def targets(self, own_address: str) -> list[Target]:
        """Everything there is to scrape, routers first; workers that are lost or show nothing are left out."""
        replicas = self._router.replicas
        incarnation = self._router.incarnation
        found = [Target(own_address, ENGINE, "", ENGINE, incarnation)]
        if replicas.count > 1:
            # By the shared address a scrape would meet any of them.
            there = {it.number: (it.http_address, it.incarnation) for it in replicas.others}
            there[replicas.number] = replicas.http_address, incarnation
            found = [
                Target(address, ENGINE, "", f"{ENGINE}-{number}", life)
                for number, (address, life) in sorted(there.items())
            ]
        for member in self._workforce.members():
            description = member.description
            if description is not None and description.metrics_address and member.state is not WorkerState.LOST:
                address, role = description.metrics_address, member.role.value
                found.append(Target(address, role, member.pool, member.worker_id, description.incarnation))
        return found

    def _show_router(self, figures: Figures) -> None:
        router, counts = self._router, self._router.book.counts
        figures.gauge("baton_router_ready", "1 once a request has gone through.", router.ready.is_set())
        figures.gauge("baton_router_draining", "1 while no new requests are taken.", router.draining)
        figures.gauge("baton_requests_in_progress", "Clients' requests in the router.", router.num_running)
        figures.counter("vllm:generation_tokens", "Tokens that left the router.", self._num_tokens)
        figures.histogram(
            "vllm:inter_token_latency_seconds", "Between two messages with tokens of one output.", self._gap_s
        )
        queued = router.dispatcher.num_requests
        figures.gauge("vllm:num_requests_waiting", "Outputs that wait for a worker.", queued)
        figures.gauge("baton_dispatch_queue_requests", "Outputs that wait for a worker.", queued)
        figures.gauge(
            "baton_dispatch_queue_tokens",
            "Prompt tokens of the outputs that wait for a start.",
            router.dispatcher.num_tokens,
        )
        for kind in FailureKind:
            figures.counter(
                "baton_retries", "Attempts after a failed leg.", counts.retries[kind], kind=kind.name.lower()
            )
        for choice, number in counts.choices.items():
            figures.counter(
                "baton_placements",
                "Decisions of the placement policy.",
                number,
                policy=router.config.router.policy,
                reason=choice.reason,
                leg=choice.leg.name.lower(),
                worker=choice.worker_id,
            )

    def _show_workers(self, figures: Figures, members: list[Member]) -> None:
        numbers = {(role, state): 0 for role in Role for state in WorkerState}
        for member in members:
            labels = {"worker": member.worker_id, "worker_role": member.role.value}
            numbers[member.role, member.state] += 1
            up = member.state in (WorkerState.READY, WorkerState.DRAINING)
            figures.gauge("baton_worker_up", "1 while the router hears of the worker.", up, **labels)
            restarts = self._num_restarts(member)
            figures.counter("baton_worker_restarts", "Times that the worker was lost.", restarts, **labels)
        for (role, state), number in numbers.items():
            figures.gauge(
                "baton_workers", "Workers by role and state.", number, worker_role=role.value, state=state.value
            )
        self._restarts_seen = {member.worker_id: member.restarts for member in members}

    def _num_restarts(self, member: Member) -> int:
        """Of all workers that had this name: one that takes a name over begins at zero, and a counter may not fall."""
        seen = self._restarts_seen.get(member.worker_id, 0)
        new = member.restarts - seen if member.restarts >= seen else member.restarts
        self._restarts[member.worker_id] = self._restarts.get(member.worker_id, 0) + new
        return self._restarts[member.worker_id]


def _word(outcome: str) -> str:
    return outcome.replace(" ", "_")


def _show_credit(figures: Figures, view: WorkerView) -> None:
    name = view.worker_id
    figures.gauge(
        "baton_worker_credit_tokens", "Prompt tokens that the worker may be sent now.", view.credit_tokens, worker=name
    )
    figures.gauge(
        "baton_worker_credit_sequences",
        "Sequences that the worker may be sent now.",
        view.credit_sequences,
        worker=name,
    )
    figures.gauge("baton_worker_in_flight", "Legs of this router on the worker.", view.in_flight, worker=name)
    if view.age_s is not None:
        figures.gauge(
            "baton_worker_report_age_seconds", "Age of the worker's last load report.", view.age_s, worker=name
        )
