"""C4: how much of a hand-off over a slow wire is hidden behind the prompt's computation.

    PYTHONPATH=tests python benchmarks/slow_link.py [--mbit 1000] [--rtt-ms 10] [--prompt 4096] [--json OUT]

One prefill and one decode host out of namespaces, on a wire of that rate and round trip, brought up by `ray up`; the
demo model (SmolLM2-135M, bf16, 22.5 KiB of KV a token), a thread a worker, prompts read in chunks. First with early
binding, where decode pulls each chunk while the next one is computed, then with late binding, where it pulls all of it
when the prompt is read. A hand-off's exposed time is from the end of the prompt's computation to the first decode step:

    hidden = 1 - exposed time with early binding / time of the transfer with late binding          (medians)

Needs root's rights, as `make test-hosts` does. Owns: the wire's figures and the two rounds. The exit code is 1 if less
than BAR of the transfer is hidden.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from case_handoff import Moments, collecting, handoff
from clusters import Machine
from hosts.bed import Bed
from hosts.launcher import CLIENT, RayHosts, Shape, bed_of, workers

from baton.engine.checkpoint import resolve_model

BAR = 0.7
OUTPUT_TOKENS = 4
WARM_UP = 2
PREFILL, DECODE = "h1", "h2"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one binding: medians, and every hand-off in milliseconds."""

    binding: str
    exposed_ms: float
    transfer_ms: float
    mb_per_s: float
    moments: list[Moments]


@dataclass(frozen=True, slots=True)
class Report:
    mbit_per_s: int
    rtt_ms: float
    connect_ms: float
    prompt_tokens: int
    chunk_tokens: int
    kv_mb: float
    early: Outcome
    late: Outcome
    hidden: float


def measure(options: argparse.Namespace, binding: str, model: Path) -> tuple[Outcome, float, float]:
    """Of one binding; with the megabytes of one hand-off and the time of a TCP connection on the wire."""
    sections = {
        "engine": {"dtype": "bfloat16", "num_blocks": options.prompt // 16 * 3, "threads": 1},
        "scheduler": {"max_num_batched_tokens": options.chunk, "prefix_cache": False},
        "kvtransfer": {"transport": "tcp", "network_device": "eth0"},
        "router": {"binding": binding, "short_output_tokens": 0},
    }
    shape = Shape([PREFILL], [DECODE], 1, 1, model)
    with bed_of(shape) as bed, collecting(bed.address(CLIENT)) as collected:
        sections["observability"] = {"trace_endpoint": collected.endpoint}
        bed.delay(PREFILL, options.rtt_ms / 2, options.mbit)
        connect_ms = connection_ms(bed)
        hosts = RayHosts(bed, replace(shape, sections=sections))
        hosts.up()
        kv_mb = workers(hosts.status())[0].kv_bytes_per_token * options.prompt / 1e6
        ask(options, hosts)
        traces = collected.traces(options.rounds + WARM_UP, {"baton.prefill", "baton.decode", "baton.handoff"})
        found = [handoff(spans) for spans in traces]
        hosts.down()
    return summed(binding, found[WARM_UP:], kv_mb), kv_mb, connect_ms


def ask(options: argparse.Namespace, hosts: RayHosts) -> None:
    """Requests one after the other."""
    rng = random.Random(4)
    with hosts.operator(timeout_s=600.0) as client:
        for _ in range(options.rounds + WARM_UP):
            prompt = [rng.randrange(100, 40_000) for _ in range(options.prompt)]
            client.generate(token_ids=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True).result()


def connection_ms(bed: Bed) -> float:
    """The median time of a TCP connection from the decode to the prefill host: one round trip of the real wire."""
    code = (
        "import socket, time\n"
        "for _ in range(7):\n"
        "    began = time.perf_counter()\n"
        f"    socket.create_connection(('{bed.address(PREFILL)}', 22), 5).close()\n"
        "    print(time.perf_counter() - began)\n"
    )
    return 1e3 * statistics.median(map(float, bed.run(DECODE, sys.executable, "-c", code).stdout.split()))


def summed(binding: str, moments: list[Moments], kv_mb: float) -> Outcome:
    exposed = statistics.median(found.exposed_ms for found in moments)
    transfer = statistics.median(found.transfer_ms for found in moments)
    return Outcome(binding, exposed, transfer, kv_mb / transfer * 1e3, moments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000, help="of the wire, each way")
    parser.add_argument("--rtt-ms", type=float, default=10.0)
    parser.add_argument("--prompt", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--chunk", type=int, default=512, metavar="TOKENS", help="max_num_batched_tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    print(f"before: {Machine.now()}", flush=True)
    model, began = resolve_model(options.model), time.monotonic()
    early, kv_mb, connect_ms = measure(options, "early", model)
    late, _, _ = measure(options, "late", model)
    hidden = 1 - early.exposed_ms / late.transfer_ms
    print(
        f"{options.prompt} tokens, {kv_mb:.1f} MB of KV; {options.mbit} Mbit/s, a connection takes {connect_ms:.1f} ms"
    )
    print(f"{'binding':8} {'exposed ms':>11} {'transfer ms':>12} {'MB/s':>7}")
    for found in (early, late):
        print(f"{found.binding:8} {found.exposed_ms:11.0f} {found.transfer_ms:12.0f} {found.mb_per_s:7.0f}")
    print(f"hidden: {hidden:.0%} (bar {BAR:.0%}); {time.monotonic() - began:.0f} s; after: {Machine.now()}")
    if options.json is not None:
        report = Report(
            options.mbit, options.rtt_ms, connect_ms, options.prompt, options.chunk, kv_mb, early, late, hidden
        )
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return 0 if hidden >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
