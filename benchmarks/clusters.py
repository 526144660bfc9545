"""Real clusters for the benchmarks that need one: Ray, one process a worker, NIXL, a router at an address.

Owns: their start and end, the tiny model that some of them serve, and what "at rest" means.
Refuses to know: what is asked of the cluster, and what is measured.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import transformers
from peers import pin
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.client.client import Client
from baton.engine.checkpoint import resolve_model
from baton.fleet.launch import close_ray, open_ray, start_router
from baton.fleet.worker import FACTORIES
from baton.proto import cluster_pb2 as cluster
from baton.proto.messages import Role
from baton.proto.settings import EngineSettings, SchedulerSettings
from baton.router.config import ClusterConfig, defaults
from baton.router.server import Addresses

READY_TIMEOUT_S = 300.0
REST_TIMEOUT_S = 60.0
RAY_CPUS = 64
RESULTS = Path(__file__).parent / "results"

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures were taken on; a busy machine explains odd ones."""

    cores: int
    load_average: tuple[float, ...]

    @classmethod
    def now(cls) -> Machine:
        return cls(len(os.sched_getaffinity(0)), tuple(round(load, 2) for load in os.getloadavg()))

    def __str__(self) -> str:
        return f"{self.cores} cores, load average {' '.join(f'{load:.2f}' for load in self.load_average)}"


def shape(
    model: str,
    prefill: int,
    decode: int,
    *,
    dtype: str = "float32",
    num_blocks: int = 1024,
    budget: int = 2048,
    policy: str = "queue_depth",
    all_move: bool = False,
) -> ClusterConfig:
    """A cluster on this machine, on a free port, with one thread a worker. `budget`: max_num_batched_tokens.

    `all_move`: however short an output is, its KV is handed over.
    """
    config = defaults(prefill=prefill, decode=decode, model=model)
    engine = EngineSettings(model=model, dtype=dtype, num_blocks=num_blocks, threads=1)
    scheduler = SchedulerSettings(max_num_batched_tokens=budget)
    pools = tuple(replace(pool, engine=engine, scheduler=scheduler, num_cpus=0.1) for pool in config.pools)
    router = replace(config.router, port=0, http_port=0, policy=policy)
    return replace(config, pools=pools, router=replace(router, short_output_tokens=0) if all_move else router)


@contextmanager
def local_ray() -> Iterator[None]:
    """One Ray, which any number of clusters may share one after the other."""
    open_ray(RAY_CPUS)
    try:
        yield
    finally:
        close_ray()


@contextmanager
def running(config: ClusterConfig) -> Iterator[str]:
    """A cluster in a Ray that runs already; the router's address for gRPC."""
    with serving(config) as addresses:
        yield addresses.grpc


@contextmanager
def serving(config: ClusterConfig) -> Iterator[Addresses]:
    """The same, with all of the router's addresses."""
    namespace = f"benchmark-{os.getpid()}-{next(_numbers)}"
    handle = start_router(config, resolve_model(config.model), FACTORIES, namespace=namespace)
    try:
        addresses = handle.ready(READY_TIMEOUT_S, threading.Event())
        assert addresses is not None
        yield addresses
    finally:
        handle.stop(0.0)


def workers(status: cluster.ClusterStatus, role: Role | None = None) -> list[cluster.WorkerStatus]:
    return [worker for pool in status.pools for worker in pool.workers if role is None or worker.role == role.value]


def pin_workers(address: str, cores: Sequence[int]) -> None:
    """Each worker to a core of its own, in the order of their roles' names backwards: prefill before decode."""
    for index, pid in enumerate(worker_pids(address)):
        pin(pid, {cores[index % len(cores)]})


def worker_pids(address: str) -> list[int]:
    """In that order; another list than before tells that a worker was restarted."""
    with Client(address) as client:
        found = sorted(workers(client.status()), key=lambda worker: worker.role, reverse=True)
    return [worker.pid for worker in found]


def await_memory(pids: Sequence[int], timeout_s: float = 120.0) -> None:
    """Until the system has given workers the memory of their KV pools: a first write to it takes longer."""
    deadline = time.monotonic() + timeout_s
    before, steady = 0, 0
    while steady < 3 and time.monotonic() < deadline:
        time.sleep(0.5)
        now = sum(psutil.Process(pid).memory_info().rss for pid in pids)
        steady = steady + 1 if now - before < 1 << 20 else 0
        before = now


def unrest(status: cluster.ClusterStatus) -> list[str]:
    """What keeps a cluster from being at rest: every block free or cached, and nothing in progress or queued."""
    router = {"queued": status.router.queued, "running": status.router.running}
    found = [f"router: {name} {value}" for name, value in router.items() if value]
    for worker in workers(status):
        load = worker.load
        figures = {
            "in flight": worker.in_flight,
            "running": load.running,
            "waiting": load.waiting,
            "receiving": load.receiving,
            "exported": load.exported,
            "held blocks": load.held_blocks,
            "lent blocks": load.lent_blocks,
            "quarantined blocks": load.quarantined_blocks,
            "blocks not free": load.total_blocks - load.free_blocks,
        }
        found += [f"{worker.worker_id}: {name} {value}" for name, value in figures.items() if value]
    return found


def await_rest(address: str, timeout_s: float = REST_TIMEOUT_S) -> tuple[cluster.ClusterStatus, list[str]]:
    """The status at rest, or at the end of the time with what is still not at rest."""
    deadline = time.monotonic() + timeout_s
    with Client(address) as client:
        while True:
            status = client.status()
            found = unrest(status)
            if not found or time.monotonic() > deadline:
                return status, found
            time.sleep(0.05)


def save_tiny_model(directory: Path, max_model_len: int = 512) -> None:
    """Writes a random fp32 llama of 320 tokens, of which 0 to 255 are bytes and 257 ends a sequence."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_model_len,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=None,
    )
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([f"<word{number}>" for number in range(tokenizer.get_vocab_size(), 320)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "model_max_length": max_model_len,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


@contextmanager
def model_directory(name: str, directory: Path) -> Iterator[str]:
    """What to serve: `tiny` is made in `directory`, any other name stands for itself."""
    if name == "tiny":
        save_tiny_model(directory)
        yield str(directory)
    else:
        yield name
