"""Every prompt token's KV reaches the decode worker exactly once, and most of it before the prompt is read.

    python benchmarks/handoff.py [--requests 500] [--concurrency 32] [--model tiny|demo] [--json OUT]

A real cluster of 2 prefill and 2 decode workers answers a mix of lengths and shared prefixes, then rests. Checked on
the workers' own counters, as differences over the run:

    decode     transferred + cached = prompt tokens of all requests that have a decode leg (more than one output token)
    decode     recomputed = 0 and computed = 0: no prompt token was read twice
    prefill    computed + cached = prompt tokens of all requests
    transfer   NIXL moved the bytes, some chunks while their prompt was still being read; no pull failed
    at rest    every block of every pool is free, nothing is in flight

Owns: the mix and the checks. The exit code is 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from clusters import Machine, await_rest, local_ray, model_directory, running, shape, workers

from baton.client.client import AsyncClient, Client
from baton.client.result import Result
from baton.proto import cluster_pb2 as cluster
from baton.proto.messages import Role

COUNTERS = (
    "prompt_tokens_computed",
    "prompt_tokens_cached",
    "prompt_tokens_transferred",
    "tokens_recomputed",
    "tokens_generated",
    "preemptions_recompute",
    "chunks_pulled",
    "chunks_pulled_early",
    "bytes_pulled",
    "pulls_failed",
    "validations_refused",
    "leases_expired",
    "unknown_completions",
    "requests_finished",
    "requests_aborted",
)
NUM_PREFIXES = 6
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 300, 40


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Check:
    """One equation or bound that must hold. `what` names it with its figures."""

    what: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the counters of each role say of a run, summed over its workers."""

    prefill: dict[str, int]
    decode: dict[str, int]
    checks: list[Check]
    duration_s: float

    @property
    def violations(self) -> list[str]:
        return [check.what for check in self.checks if not check.holds]


def mix(num_requests: int, seed: int, token_ids: range) -> list[Ask]:
    """Prompts of 1 to 300 tokens for 1 to 40; two in five begin with one of six shared prefixes, one in ten repeats."""
    random = Random(seed)
    prefixes = [random.choices(token_ids, k=random.randint(48, 200)) for _ in range(NUM_PREFIXES)]
    asks: list[Ask] = []
    for number in range(num_requests):
        num_tokens = 1 if number % 25 == 3 else random.randint(2, MAX_OUTPUT_TOKENS)
        if asks and random.random() < 0.1:
            prompt = random.choice(asks).prompt
        else:
            length = random.choice((1, 2, 15, 16, 17, 31, 33, 300, *(random.randint(1, 300) for _ in range(16))))
            own = random.choices(token_ids, k=length)
            prefix = random.choice(prefixes) if random.random() < 0.4 else []
            prompt = tuple((prefix + own)[:MAX_PROMPT_TOKENS])
        asks.append(Ask(prompt, num_tokens))
    return asks


async def send(address: str, asks: Sequence[Ask], concurrency: int) -> list[Result]:
    """The answers, in the order of `asks`. The client refuses tokens with a gap or a repeat."""
    slots = asyncio.Semaphore(concurrency)

    async def one(client: AsyncClient, ask: Ask) -> Result:
        async with slots:
            generation = client.generate(
                token_ids=ask.prompt, max_tokens=ask.num_tokens, temperature=0.0, ignore_eos=True, timeout_s=300.0
            )
            return await generation.result()

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(one(client, ask) for ask in asks))


def run(address: str, num_requests: int, concurrency: int, seed: int = 1) -> Outcome:
    """Sends the mix to a cluster at rest and checks what its counters say afterwards."""
    before, unrest = await_rest(address)
    assert not unrest, unrest
    with Client(address) as client:
        token_ids = range(min(client.model().vocab_size, 256))
    asks = mix(num_requests, seed, token_ids)
    started_s = time.monotonic()
    results = asyncio.run(send(address, asks, concurrency))
    duration_s = time.monotonic() - started_s
    after, unrest = await_rest(address)
    prefill = _counted(before, after, Role.PREFILL)
    decode = _counted(before, after, Role.DECODE)
    checks = [*_checks(asks, results, prefill, decode), Check(f"at rest: {'; '.join(unrest) or 'yes'}", not unrest)]
    return Outcome(prefill, decode, checks, duration_s)


def _counted(before: cluster.ClusterStatus, after: cluster.ClusterStatus, role: Role) -> dict[str, int]:
    def total(status: cluster.ClusterStatus, name: str) -> int:
        return sum(getattr(worker.load.counters, name) for worker in workers(status, role))

    return {name: total(after, name) - total(before, name) for name in COUNTERS}


def _checks(
    asks: Sequence[Ask], results: Sequence[Result], prefill: dict[str, int], decode: dict[str, int]
) -> list[Check]:
    prompt_tokens = sum(len(ask.prompt) for ask in asks)
    handed_on = sum(
        len(ask.prompt)
        for ask, result in zip(asks, results, strict=True)
        if ask.num_tokens > 1 and result.finish.decode_worker != result.finish.prefill_worker
    )
    generated = sum(ask.num_tokens for ask in asks)
    answered = sum(len(result.token_ids) for result in results)
    told = sum(result.finish.usage.transferred_tokens for result in results)
    retries = sum(result.finish.retries for result in results)
    transferred, cached = decode["prompt_tokens_transferred"], decode["prompt_tokens_cached"]
    computed, hits = prefill["prompt_tokens_computed"], prefill["prompt_tokens_cached"]
    troubles = ("preemptions_recompute", "pulls_failed", "leases_expired", "unknown_completions", "requests_aborted")
    return [
        Check(f"every token asked for came: {answered} of {generated}", answered == generated),
        Check(
            f"each handed-on prompt token reached decode once: transferred {transferred} + cached {cached} = "
            f"{transferred + cached} of {handed_on}",
            transferred + cached == handed_on,
        ),
        Check(f"the requests' own figures agree: {told} transferred", told == transferred),
        Check(
            f"decode read no prompt: computed {decode['prompt_tokens_computed']}, "
            f"recomputed {decode['tokens_recomputed']}",
            decode["prompt_tokens_computed"] == 0 and decode["tokens_recomputed"] == 0,
        ),
        Check(
            f"prefill read each prompt once: computed {computed} + cached {hits} = {computed + hits} of "
            f"{prompt_tokens}, recomputed {prefill['tokens_recomputed']}",
            computed + hits == prompt_tokens and prefill["tokens_recomputed"] == 0,
        ),
        Check(
            f"pulls overlap with reading: {decode['chunks_pulled_early']} of {decode['chunks_pulled']} chunks early",
            decode["chunks_pulled_early"] > 0,
        ),
        Check(
            f"KV was moved: {decode['bytes_pulled']} bytes by {_connectors(results)}",
            decode["bytes_pulled"] > 0 and _connectors(results) == "nixl",
        ),
        Check(
            f"nothing went wrong on the way: {retries} retries, "
            + ", ".join(f"{prefill[name] + decode[name]} {name}" for name in troubles),
            retries == 0 and not any(prefill[name] + decode[name] for name in troubles),
        ),
    ]


def _connectors(results: Sequence[Result]) -> str:
    return ", ".join(sorted({r.finish.connector for r in results if r.finish.usage.transferred_tokens})) or "nothing"


def _show(outcome: Outcome) -> None:
    print("| counter | prefill | decode |")
    print("|---|---|---|")
    for name in COUNTERS:
        print(f"| {name} | {outcome.prefill[name]} | {outcome.decode[name]} |")
    print()
    for check in outcome.checks:
        print(f"{'ok  ' if check.holds else 'FAIL'}  {check.what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--budget", type=int, default=64, help="max_num_batched_tokens of every worker")
    parser.add_argument("--model", default="tiny", help="tiny, demo, a directory or a Hugging Face id")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the outcome to this file too")
    arguments = parser.parse_args()
    print(f"before: {Machine.now()}", flush=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        model_directory(arguments.model, Path(directory)) as model,
        local_ray(),
        running(shape(model, arguments.prefill, arguments.decode, budget=arguments.budget, all_move=True)) as address,
    ):
        outcome = run(address, arguments.requests, arguments.concurrency, arguments.seed)
    _show(outcome)
    print(f"\n{arguments.requests} requests in {outcome.duration_s:.1f} s; after: {Machine.now()}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
