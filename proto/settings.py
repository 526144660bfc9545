"""What a worker process is told when it starts, as frozen dataclasses; the configuration file's vocabulary.

Owns: names, types, defaults and bounds of every setting that crosses from the configuration to a worker. Field metadata
carries the bounds (`minimum`, `maximum`, `choices`), which `router.config` checks with the key's path in the error.
Refuses to know: files, YAML, and what the settings do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.proto.messages import Role


def bounded(default: Any, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A dataclass field with a numeric range, both ends included."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def one_of(default: str, choices: Sequence[str]) -> Any:
    """A dataclass field that takes one of a few names."""
    return field(default=default, metadata={"choices": tuple(choices)})


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Budgets and policies of one worker's scheduler.

    `long_prefill_token_threshold` caps one sequence's chunk; 0 is off. `async_scheduling`: whether a step is planned
    while another runs; `auto` does so on a GPU.
    """

    max_num_batched_tokens: int = bounded(2048, minimum=1)
    max_num_seqs: int = bounded(256, minimum=1)
    long_prefill_token_threshold: int = bounded(0, minimum=0)
    prefix_cache: bool = True
    policy: str = one_of("fcfs", ("fcfs", "priority", "deadline"))
    preemption: str = one_of("recompute", ("recompute",))
    async_scheduling: str = one_of("auto", ("auto", "on", "off"))


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The model and the memory that one worker computes with.

    `model`: a directory, a Hugging Face id or `demo`. `max_model_len` 0 takes the model's own. `num_blocks` 0 derives
    the pool's size from `kv_cache_gib`. `threads` 0 shares the machine's cores among the workers on it. `cpu_kernels`:
    `auto` compiles kernels for the CPU once and uses those known to be faster there, `native` uses all of them, `torch`
    does without. `cuda_graphs`: whether decode steps on a GPU are recorded when a worker starts.
    """

    model: str = "demo"
    dtype: str = one_of("bfloat16", ("bfloat16", "float16", "float32"))
    device: str = one_of("cpu", ("cpu", "cuda"))
    block_size: int = bounded(16, minimum=1, maximum=256)
    num_blocks: int = bounded(0, minimum=0)
    kv_cache_gib: float = bounded(1.0, minimum=0.001)
    max_model_len: int = bounded(0, minimum=0)
    threads: int = bounded(0, minimum=0, maximum=1024)
    cuda_graphs: bool = True
    cpu_kernels: str = one_of("auto", ("auto", "native", "torch"))
    tensor_parallel: int = bounded(1, minimum=1, maximum=64)


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How a further rank of a worker finds rank 0, on the same machine. `key` is a secret of that worker's start."""

    rank: int
    size: int
    port: int
    store_port: int
    key: bytes


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How KV moves and how long each side waits for the other.

    `lease_s`: how long the source keeps lent blocks without a heartbeat. `peer_timeout_s`: silence after which a peer
    is given up. `transport`: UCX_TLS for the nixl connector, empty lets UCX choose. `network_device`: UCX_NET_DEVICES
    for nixl, the name of a network interface for nccl; empty lets UCX, or the machine's routes, choose.
    `expected_gb_per_s`: below which rate a lane between two workers is warned of, 0 expects nothing. `probe_mib`: what
    a decode worker reads of a prefill worker that it has just met, to measure the lane; 0 measures by requests alone.
    """

    connector: str = one_of("nixl", ("nixl", "nccl", "local"))
    checksums: str = one_of("off", ("off", "sampled", "always"))
    lease_s: float = bounded(10.0, minimum=0.2)
    heartbeat_s: float = bounded(0.25, minimum=0.01)
    peer_timeout_s: float = bounded(3.0, minimum=0.1)
    transport: str = ""
    network_device: str = ""
    expected_gb_per_s: float = bounded(0.0, minimum=0.0)
    probe_mib: int = bounded(8, minimum=0, maximum=64)


@dataclass(frozen=True, slots=True)
class ObservabilitySettings:
    """What every process tells about itself, router and workers alike.

    `trace_endpoint`: URL of an OTLP collector (http://host:4318), empty traces nothing. `trace_ratio`: the part of
    requests without a trace of their own that is traced. `worker_metrics`: whether each worker opens a Prometheus
    endpoint, on a port of its own choice. `log_prompts`: whether logs and traces may contain prompts and outputs.
    `step_log`: a directory in which each worker notes every step, for `baton capacity calibrate`; empty notes nothing.
    `log_dir`: a directory of each machine in which every process keeps its log in a file, beside writing it to stderr.
    `targets_file`: a file on the router's machine that names every Prometheus endpoint, as `file_sd_configs` read it.
    """

    trace_endpoint: str = ""
    trace_ratio: float = bounded(1.0, minimum=0.0, maximum=1.0)
    worker_metrics: bool = True
    log_format: str = one_of("text", ("text", "json"))
    log_level: str = one_of("info", ("debug", "info", "warning", "error"))
    log_prompts: bool = False
    step_log: str = ""
    log_dir: str = ""
    targets_file: str = ""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """What clients meet at the router's two ports: a certificate (PEM, with its chain) and its key; empty: plain text.

    `client_ca_file`: clients must show a certificate of one of these authorities, beside whatever key they show.
    """

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""


@dataclass(frozen=True, slots=True)
class ClusterTlsSettings:
    """What Baton's own processes show each other, each to each; empty: plain text.

    `ca_file` holds the authority of this cluster and of nothing else: whoever has a certificate of it is a member. The
    files have the same paths on every machine.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """Who may connect, and who can read along. `require_auth`: nothing starts while anybody could call unasked."""

    require_auth: bool = False
    tls: TlsSettings = field(default_factory=TlsSettings)
    cluster_tls: ClusterTlsSettings = field(default_factory=ClusterTlsSettings)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All that one worker process needs to know at its start.

    `model_name`: what its metrics call the model, empty for the model's own name. `ports`: those that it may listen at,
    empty for any.
    """

    worker_id: str
    pool: str
    role: Role
    engine: EngineSettings = field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    observability: ObservabilitySettings = field(default_factory=ObservabilitySettings)
    host: str = "127.0.0.1"
    ports: Collection[int] = ()
    idle_report_s: float = 0.1
    model_name: str = ""
    cluster_tls: ClusterTlsSettings = field(default_factory=ClusterTlsSettings)
