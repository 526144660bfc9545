"""What a worker counts and shows to Prometheus, whatever its role.

Owns: the names of a worker's figures, and the last load report, which most of them are read from.
Refuses to know: when things happen. The worker tells; a scrape comes on a thread of its own and disturbs nobody.

vLLM's names stand where the thing is the same. What is seen of whole requests (TTFT, latency, tokens to clients) is the
router's to count, so that sums over engines count nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from baton import __version__
from baton.engine.description import ModelDescription
from baton.proto import worker_pb2 as wire
from baton.proto.messages import LoadReport
from baton.proto.settings import WorkerSettings
from baton.telemetry.metrics import BLOCKS, BYTES, LATENCY_S, STEP_TOKENS, Figures, Meter, Page

STAGES = ("prefill_queue", "prefill_compute", "handoff_wait", "handoff_transfer", "decode_admission", "decode")


class WorkerMetrics:
    """The figures of one worker's process; a collector. Any thread may tell, any may collect."""

    def __init__(
        self, settings: WorkerSettings, model: ModelDescription, incarnation: str, connector_name: str
    ) -> None:
        self._settings = settings
        self._model = model
        self._incarnation = incarnation
        self._connector_name = connector_name
        self._load: LoadReport | None = None
        self._lanes: tuple[wire.Lane, ...] = ()
        self._meter = meter = Meter(settings.model_name or model.name, settings.worker_id)
        self._step_tokens = meter.histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one engine step.", STEP_TOKENS
        )()
        self._step_s = meter.histogram("baton_step_seconds", "Wall time of one engine step.", LATENCY_S)()
        stage_s = meter.histogram(
            "baton_leg_stage_seconds", "Time that a leg spent in one stage on this worker.", LATENCY_S, "stage"
        )
        self._stage_s = {stage: stage_s(stage) for stage in STAGES}
        self._pull_s = meter.histogram(
            "vllm:nixl_xfer_time_seconds", "Time of one read of KV from another worker, by any connector.", LATENCY_S
        )()
        self._pull_bytes = meter.histogram(
            "vllm:nixl_bytes_transferred", "Bytes of one read of KV from another worker.", BYTES
        )()
        self._pull_blocks = meter.histogram(
            "vllm:nixl_num_descriptors", "Blocks that one read of KV from another worker names.", BLOCKS
        )()

    # --- told by the worker -----------------------------------------------------------------------------------------

    def stepped(self, num_tokens: int, seconds: float) -> None:
        self._step_tokens.observe(num_tokens)
        self._step_s.observe(seconds)

    def staged(self, stage: str, seconds: float) -> None:
        """A leg has left a stage, one of STAGES."""
        self._stage_s[stage].observe(seconds)

    def pulled(self, num_bytes: int, num_blocks: int, seconds: float) -> None:
        """A read of KV has ended well."""
        self._pull_bytes.observe(num_bytes)
        self._pull_blocks.observe(num_blocks)
        self._pull_s.observe(seconds)

    def reported(self, load: LoadReport) -> None:
        self._load = load

    def connected(self, lanes: tuple[wire.Lane, ...]) -> None:
        self._lanes = lanes

    def became(self, settings: WorkerSettings, incarnation: str) -> None:
        """The worker has another role from now on."""
        self._settings, self._incarnation, self._lanes = settings, incarnation, ()

    # --- asked by a scrape ------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        figures, load = self._meter.figures(), self._load
        self._describe(figures)
        if load is not None:
            _show_load(figures, load)
            _show_counters(figures, load)
        for lane in self._lanes:
            _show_lane(figures, lane)
        return Page(self._meter.registry, figures).collect()

    def _describe(self, figures: Figures) -> None:
        settings, model = self._settings, self._model
        figures.gauge(
            "baton_worker_info",
            "Always 1; the labels say what this process is.",
            1,
            worker_role=settings.role.value,
            worker_pool=settings.pool,
            incarnation=self._incarnation,
            version=__version__,
            dtype=model.dtype,
            connector=self._connector_name,
        )
        figures.gauge(
            "vllm:cache_config_info",
            "Always 1; the labels describe the KV cache.",
            1,
            block_size=str(model.block_size),
            num_gpu_blocks=str(model.num_blocks),
            cache_dtype=model.dtype,
            enable_prefix_caching=str(settings.scheduler.prefix_cache),
        )


def _show_load(figures: Figures, load: LoadReport) -> None:
    figures.gauge("vllm:num_requests_running", "Sequences that take part in steps.", load.running)
    figures.gauge(
        "vllm:num_requests_waiting", "Sequences that wait for blocks, or for KV.", load.waiting + load.receiving
    )
    usage = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    figures.gauge("vllm:kv_cache_usage_perc", "Part of the KV blocks in use; 1 is all of them.", usage)
    sequences = {
        "running": load.running,
        "waiting": load.waiting,
        "receiving": load.receiving,
        "exported": load.exported,
    }
    for state, number in sequences.items():
        figures.gauge("baton_sequences", "Sequences on the worker.", number, state=state)
    blocks = {
        "free": load.free_blocks - load.cached_blocks,
        "cached": load.cached_blocks,
        "held": load.held_blocks,
        "lent": load.lent_blocks,
        "quarantined": load.quarantined_blocks,
    }
    for state, number in blocks.items():
        figures.gauge("baton_blocks", "KV blocks, each in one state.", number, state=state)
    figures.gauge("baton_queued_tokens", "Prompt tokens accepted but not computed.", load.queued_tokens)
    figures.gauge("baton_context_tokens", "Tokens with KV of the running sequences.", load.running_context_tokens)
    figures.gauge("baton_draining", "1 while the worker takes nothing new.", load.draining)


def _show_lane(figures: Figures, lane: wire.Lane) -> None:
    labels = {"source": lane.source, "transport": lane.transport}
    figures.gauge("baton_lane_up", "1 while a prefill worker can be read from.", lane.state == "open", **labels)
    figures.gauge("baton_lane_slow", "1 while KV comes below the expected rate.", lane.is_slow, **labels)
    figures.gauge(
        "baton_lane_bytes_per_second", "Best rate of the last large reads; 0: none yet.", lane.gb_per_s * 1e9, **labels
    )
    figures.gauge(
        "baton_lane_round_trip_seconds", "Best of the last round trips of control.", lane.round_trip_s, **labels
    )


def _show_counters(figures: Figures, load: LoadReport) -> None:
    counters = load.counters
    computed, cached = counters.prompt_tokens_computed, counters.prompt_tokens_cached
    moved = counters.prompt_tokens_transferred
    figures.counter("vllm:num_preemptions", "Sequences that lost their blocks.", counters.preemptions_recompute)
    figures.counter(
        "vllm:prefix_cache_queries", "Tokens looked up in the worker's prefix cache.", counters.prefix_queries
    )
    figures.counter("vllm:prefix_cache_hits", "Tokens found in the worker's prefix cache.", counters.prefix_hits)
    for source, tokens in {"computed": computed, "cached": cached, "transferred": moved}.items():
        figures.counter("baton_prompt_tokens", "Where the KV of prompt tokens came from.", tokens, source=source)
    vllm = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": moved}
    for source, tokens in vllm.items():
        figures.counter(
            "vllm:prompt_tokens_by_source", "As baton_prompt_tokens_total, in vLLM's words.", tokens, source=source
        )
    figures.counter(
        "baton_tokens_recomputed", "Tokens computed once more after a preemption.", counters.tokens_recomputed
    )
    figures.counter("baton_tokens_generated", "Tokens sampled by this worker.", counters.tokens_generated)
    figures.counter("baton_steps", "Engine steps that computed something.", counters.steps)
    figures.counter("baton_budget_tokens_used", "Tokens computed in steps.", counters.budget_tokens_used)
    figures.counter("baton_budget_tokens_offered", "Tokens that steps had room for.", counters.budget_tokens_offered)
    figures.counter("baton_legs", "Legs that have ended.", counters.requests_finished, outcome="finished")
    figures.counter("baton_legs", "Legs that have ended.", counters.requests_aborted, outcome="aborted")
    figures.counter("baton_chunks_pulled", "Reads of KV that ended well.", counters.chunks_pulled)
    figures.counter(
        "baton_chunks_pulled_early",
        "Reads of KV that began while the prompt was still being computed.",
        counters.chunks_pulled_early,
    )
    figures.counter("vllm:nixl_num_failed_transfers", "Reads of KV that failed.", counters.pulls_failed)
    figures.counter(
        "baton_validations_refused", "Reads whose blocks were not lent any more.", counters.validations_refused
    )
    figures.counter(
        "vllm:nixl_num_kv_expired_reqs", "Lent prompts that nobody fetched in time.", counters.leases_expired
    )
    figures.counter(
        "baton_unknown_completions", "Hand-off messages of which nothing was known.", counters.unknown_completions
    )
