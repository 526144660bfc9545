"""Mixed traffic for a long time on a real cluster, a sixth of it cancelled at random moments: nothing may be left over.

    python benchmarks/soak.py [--minutes 20] [--model tiny|demo] [--cancel 0.15] [--json OUT]

8 to 32 callers at a time send prompts of 1 to 300 tokens for 1 to 100: greedy and seeded, repeated, with shared
prefixes, stop strings, n = 2, logprobs, and bad ones. The cancelled ones hang up or call Abort.

    checked on every answer   indices without gap or repeat, one end for each output, the promised number of tokens,
                              a repeated request has the same tokens, a bad one is refused as such
    checked at the end        every block of every pool is free, nothing is in flight, no worker was restarted, file
                              descriptors and threads have not grown
    shown                     totals, and how fast each process's memory grows over the second half (least squares)

Owns: the traffic, the checks and the samples. The exit code is 1 after any violation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from clusters import Machine, await_rest, local_ray, model_directory, running, shape, workers

from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto import inference_pb2 as inference

MIN_CALLERS, MAX_CALLERS = 8, 32
SAMPLE_S = 10.0
WAVE_S = 20.0
CALL_TIMEOUT_S = 120.0
NUM_REPEATED, NUM_PREFIXES = 40, 8
REQUESTS_PER_CHANNEL = 200
MAX_FD_GROWTH, MAX_THREAD_GROWTH = 8, 4
STOPS = ("e", "\n", "ab", " the", "Q")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `key` names it among the repeated ones, whose answers must be equal; empty: it comes only once."""

    kind: str
    message: inference.GenerateRequest
    key: str = ""
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """`after_s` from the send, by hanging up or by Abort."""

    after_s: float
    by_abort: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one process."""

    at_s: float
    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(slots=True)
class Tally:
    """All that was seen; `violations` is what should not have been."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    violations: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    answers: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def complain(self, violation: str) -> None:
        self.counts["violations"] += 1
        if len(self.violations) < 50:
            self.violations.append(violation)
            print(f"VIOLATION {violation}", flush=True)


class Traffic:
    """An endless row of requests that depends on the seed alone."""

    def __init__(self, seed: int, model: inference.ModelInfo) -> None:
        self._random = random.Random(seed)
        self._token_ids = range(min(model.vocab_size, 256))
        self._model = model
        self._prefixes = [self._tokens(self._random.randint(32, 200)) for _ in range(NUM_PREFIXES)]
        self._repeated = [self._repeatable(number) for number in range(NUM_REPEATED)]
        self._number = 0

    def next(self) -> Ask:
        self._number += 1
        kinds = {
            self._again: 30,
            self._greedy: 20,
            self._seeded: 15,
            self._stopping: 10,
            self._several: 8,
            self._scored: 8,
            self._text: 4,
            self._ending_at_once: 2,
            self._bad: 5,
        }
        make = self._random.choices(list(kinds), weights=list(kinds.values()))[0]
        ask = make()
        ask.message.request_id = f"soak-{self._number}"
        return ask

    def cancel(self, share: float) -> Cancel | None:
        """Whether and how to cancel: some before anything can have come, most while it runs."""
        if self._random.random() >= share:
            return None
        return Cancel(self._random.choice((0.0, 0.01, self._random.expovariate(4.0))), self._random.random() < 0.5)

    def _again(self) -> Ask:
        kept = self._random.choice(self._repeated)
        message = inference.GenerateRequest()
        message.CopyFrom(kept.message)
        return Ask(kept.kind, message, kept.key)

    def _repeatable(self, number: int) -> Ask:
        sampling = {"temperature": 0.0} if number % 4 else {"temperature": 0.9, "top_p": 0.95, "seed": number}
        return Ask("repeated", self._message(**sampling), key=f"repeated-{number}")

    def _greedy(self) -> Ask:
        return Ask("greedy", self._message(temperature=0.0))

    def _seeded(self) -> Ask:
        return Ask("seeded", self._message(temperature=1.0, top_k=50, seed=self._random.randrange(1 << 40)))

    def _stopping(self) -> Ask:
        stop = self._random.sample(STOPS, self._random.randint(1, 3))
        return Ask("stop strings", self._message(temperature=1.0, stop=stop, ignore_eos=False))

    def _several(self) -> Ask:
        return Ask("n = 2", self._message(temperature=0.8, n=2, seed=self._random.randrange(1 << 40)))

    def _scored(self) -> Ask:
        more = {"prompt_logprobs": 1} if self._random.random() < 0.3 else {}
        return Ask("logprobs", self._message(temperature=0.0, logprobs=self._random.randint(0, 5), **more))

    def _text(self) -> Ask:
        message = self._message(temperature=0.0)
        message.text = "Tell me more. " * self._random.randint(1, 12)
        return Ask("text", message)

    def _ending_at_once(self) -> Ask:
        """The first token, sampled by the prefill worker, is the last."""
        ends = dict.fromkeys(self._model.eos_token_ids, 100.0)
        return Ask("ends at once", self._message(temperature=0.0, ignore_eos=False, max_tokens=50, logit_bias=ends))

    def _bad(self) -> Ask:
        message = self._message(temperature=0.0)
        fault = self._random.randrange(6)
        if fault == 0:
            message.token_ids.ids.append(self._model.vocab_size)
        elif fault == 1:
            message.sampling.temperature = -1.0
        elif fault == 2:
            message.sampling.max_tokens = 0
        elif fault == 3:
            message.ClearField("prompt")
        elif fault == 4:
            message.token_ids.ids.extend([1] * self._model.max_model_len)
        else:
            message.sampling.n = 99
        return Ask("bad", message, is_bad=True)

    def _message(self, **sampling: object) -> inference.GenerateRequest:
        prompt = self._tokens(self._random.choice((1, 16, self._random.randint(1, 300))))
        if self._random.random() < 0.4:
            prompt = (self._random.choice(self._prefixes) + prompt)[:300]
        options = {"max_tokens": self._random.choice((1, 2, self._random.randint(1, 100))), "ignore_eos": True}
        return inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=prompt),
            sampling=inference.SamplingParams(**(options | sampling)),  # type: ignore[arg-type]
            priority=self._random.choice((0, 0, 0, 1)),
        )

    def _tokens(self, number: int) -> list[int]:
        return self._random.choices(self._token_ids, k=number)


class Answer:
    """What one call brings, checked message by message. `fault` is the first thing that was wrong, empty if none."""

    def __init__(self, ask: Ask) -> None:
        sampling = ask.message.sampling
        self._sampling = sampling
        n = sampling.n if sampling.HasField("n") else 1
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self._finishes: list[inference.Finish | None] = [None] * n
        self.fault = ""

    def take(self, message: inference.GenerateResponse) -> None:
        if not 0 <= message.index < len(self.tokens):
            self._note(f"output {message.index} was not asked for")
            return
        tokens = self.tokens[message.index]
        if self._finishes[message.index] is not None:
            self._note(f"output {message.index} goes on after its end")
        if message.token_ids and message.first_token_index != len(tokens):
            self._note(f"token index {message.first_token_index} after {len(tokens)} tokens")
        tokens.extend(message.token_ids)
        if self._sampling.HasField("logprobs") and len(message.logprobs) != len(message.token_ids):
            self._note(f"{len(message.logprobs)} logprobs for {len(message.token_ids)} tokens")
        if message.HasField("finish"):
            self._finishes[message.index] = message.finish

    @property
    def is_aborted(self) -> bool:
        return any(finish is not None and finish.reason == inference.FINISH_REASON_ABORTED for finish in self._finishes)

    def check_whole(self) -> None:
        """After the stream's regular end of a call that nobody cancelled."""
        for index, (tokens, finish) in enumerate(zip(self.tokens, self._finishes, strict=True)):
            if finish is None:
                self._note(f"output {index} has no end")
            elif finish.reason not in (inference.FINISH_REASON_LENGTH, inference.FINISH_REASON_STOP):
                self._note(f"output {index} ended with reason {finish.reason}")
            elif finish.usage.completion_tokens != len(tokens):
                self._note(f"output {index}: {len(tokens)} tokens, usage says {finish.usage.completion_tokens}")
            elif finish.reason == inference.FINISH_REASON_LENGTH and len(tokens) != self._sampling.max_tokens:
                self._note(f"output {index}: {len(tokens)} tokens of {self._sampling.max_tokens}")

    def _note(self, fault: str) -> None:
        self.fault = self.fault or fault


class Caller:
    """One of many who ask and sometimes hang up. Opens a new connection every so often."""

    def __init__(self, number: int, address: str, traffic: Traffic, cancel_share: float, tally: Tally) -> None:
        self._number = number
        self._address = address
        self._traffic = traffic
        self._cancel_share = cancel_share
        self._tally = tally

    async def run(self, until_s: float, num_callers: Wave) -> None:
        while time.monotonic() < until_s:
            async with grpc.aio.insecure_channel(self._address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                for _ in range(REQUESTS_PER_CHANNEL):
                    now = time.monotonic()
                    if now >= until_s:
                        return
                    if self._number < num_callers.size(now):
                        await self._ask(stub, self._traffic.next(), self._traffic.cancel(self._cancel_share))
                    else:
                        await asyncio.sleep(0.5)

    async def _ask(self, stub: inference_pb2_grpc.InferenceStub, ask: Ask, cancel: Cancel | None) -> None:
        tally, answer = self._tally, Answer(ask)
        tally.counts["sent"] += 1
        tally.counts[f"sent: {ask.kind}"] += 1
        call = stub.Generate(ask.message, timeout=CALL_TIMEOUT_S)
        canceller = asyncio.create_task(self._cancel(stub, call, ask, cancel)) if cancel is not None else None
        code, details = grpc.StatusCode.OK, ""
        try:
            async for message in call:
                answer.take(message)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            code = grpc.StatusCode.CANCELLED
        finally:
            if canceller is not None:
                canceller.cancel()
                with suppress(asyncio.CancelledError):
                    await canceller
        tally.tokens += sum(map(len, answer.tokens))
        self._judge(ask, cancel, answer, code, details)

    async def _cancel(
        self, stub: inference_pb2_grpc.InferenceStub, call: grpc.aio.UnaryStreamCall[Any, Any], ask: Ask, cancel: Cancel
    ) -> None:
        await asyncio.sleep(cancel.after_s)
        if cancel.by_abort:
            await stub.Abort(inference.AbortRequest(request_id=ask.message.request_id), timeout=CALL_TIMEOUT_S)
        else:
            call.cancel()

    def _judge(self, ask: Ask, cancel: Cancel | None, answer: Answer, code: grpc.StatusCode, details: str) -> None:
        tally, name = self._tally, f"{ask.message.request_id} ({ask.kind})"
        if answer.fault:
            tally.complain(f"{name}: {answer.fault}")
        elif ask.is_bad and code is grpc.StatusCode.INVALID_ARGUMENT:
            tally.counts["refused, as it should be"] += 1
        elif cancel is not None and not cancel.by_abort and code is grpc.StatusCode.CANCELLED:
            tally.counts["cancelled by hanging up"] += 1
        elif cancel is not None and cancel.by_abort and code is grpc.StatusCode.OK and answer.is_aborted:
            tally.counts["cancelled by Abort"] += 1
        elif code is not grpc.StatusCode.OK or ask.is_bad:
            tally.complain(f"{name}: {code.name} {details}")
        else:
            answer.check_whole()
            if answer.fault:
                tally.complain(f"{name}: {answer.fault}")
            tally.counts["answered"] += 1
            self._compare(ask, answer, name)

    def _compare(self, ask: Ask, answer: Answer, name: str) -> None:
        if not ask.key:
            return
        tokens = tuple(tuple(output) for output in answer.tokens)
        first = self._tally.answers.setdefault(ask.key, tokens)
        self._tally.counts["compared with an earlier answer"] += first is not tokens
        if first != tokens:
            self._tally.complain(f"{name}: another answer to {ask.key}")


class Wave:
    """How many callers are at work: another number every while, so that pools fill and empty."""

    def __init__(self, seed: int, started_s: float) -> None:
        self._seed = seed
        self._started_s = started_s

    def size(self, now: float) -> int:
        turn = int((now - self._started_s) / WAVE_S)
        return random.Random(f"{self._seed}/{turn}").randint(MIN_CALLERS, MAX_CALLERS)


async def load(address: str, arguments: argparse.Namespace) -> Tally:
    """Runs all callers and the sampler for the time that was asked for."""
    tally = Tally()
    async with grpc.aio.insecure_channel(address) as channel:
        model = await inference_pb2_grpc.InferenceStub(channel).GetModel(inference.GetModelRequest())
        status = cluster_pb2_grpc.ClusterStub(channel)
        traffic = Traffic(arguments.seed, model)
        started_s = time.monotonic()
        until_s = started_s + 60 * arguments.minutes
        wave = Wave(arguments.seed, started_s)
        callers = [Caller(number, address, traffic, arguments.cancel, tally) for number in range(MAX_CALLERS)]
        sampler = asyncio.create_task(_sample(status, started_s, tally))
        await asyncio.gather(*(caller.run(until_s, wave) for caller in callers))
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
    return tally


async def _sample(status: cluster_pb2_grpc.ClusterStub, started_s: float, tally: Tally) -> None:
    while True:
        seen: cluster.ClusterStatus = await status.GetStatus(cluster.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        pids = {"router": seen.router.pid} | {worker.worker_id: worker.pid for worker in workers(seen)}
        at_s = time.monotonic() - started_s
        for name, pid in pids.items():
            process = psutil.Process(pid)
            with process.oneshot():
                sample = Sample(at_s, process.memory_info().rss, process.num_fds(), process.num_threads())
            tally.samples.setdefault(name, []).append(sample)
        rss = "  ".join(f"{name} {samples[-1].rss_bytes / 2**20:.1f}" for name, samples in tally.samples.items())
        print(f"{at_s:6.0f} s  {tally.counts['sent']} sent, {tally.tokens} tokens  MiB: {rss}", flush=True)
        await asyncio.sleep(SAMPLE_S)


def rss_slope(samples: Sequence[Sample]) -> float:
    """MiB an hour over the second half of the samples, by least squares; NaN for fewer than three."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return math.nan
    slope = statistics.linear_regression([s.at_s for s in half], [float(s.rss_bytes) for s in half]).slope
    return slope * 3600 / 2**20


def growth(values: Sequence[int]) -> float:
    """Median of the last quarter minus that of the second quarter: the first one is for warming up."""
    quarter = len(values) // 4
    if not quarter:
        return 0.0
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


def check_end(status: cluster.ClusterStatus, unrest: Sequence[str], tally: Tally) -> None:
    for what in unrest:
        tally.complain(f"not at rest: {what}")
    if status.router.retries_total:
        tally.complain(f"{status.router.retries_total} attempts failed, though no process did")
    for worker in workers(status):
        if worker.restarts or worker.state != "ready":
            tally.complain(f"{worker.worker_id} is {worker.state}, restarted {worker.restarts} times")
    for name, samples in tally.samples.items():
        fds, threads = growth([s.num_fds for s in samples]), growth([s.num_threads for s in samples])
        if fds > MAX_FD_GROWTH or threads > MAX_THREAD_GROWTH:
            tally.complain(f"{name}: {fds:+.0f} file descriptors, {threads:+.0f} threads")


def _show(status: cluster.ClusterStatus, tally: Tally) -> None:
    print("\n| process | first MiB | last MiB | slope, MiB/hour | fds | threads |")
    print("|---|---|---|---|---|---|")
    for name, samples in tally.samples.items():
        first, last = samples[0], samples[-1]
        print(
            f"| {name} | {first.rss_bytes / 2**20:.1f} | {last.rss_bytes / 2**20:.1f} | {rss_slope(samples):.1f} | "
            f"{first.num_fds} -> {last.num_fds} | {first.num_threads} -> {last.num_threads} |"
        )
    print()
    for name, count in sorted(tally.counts.items()):
        print(f"{count:8}  {name}")
    print(f"{tally.tokens:8}  tokens received")
    print(f"{status.router.retries_total:8}  retries by the router")
    for worker in workers(status):
        counters = worker.load.counters
        print(
            f"{worker.worker_id}: {counters.requests_finished} finished, {counters.requests_aborted} aborted, "
            f"{counters.preemptions_recompute} preempted, {counters.chunks_pulled} chunks pulled "
            f"({counters.pulls_failed} failed), {counters.validations_refused} refused, "
            f"{counters.leases_expired} leases expired"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--cancel", type=float, default=0.15, help="share of requests that are cancelled")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=512, help="blocks of every pool")
    parser.add_argument("--budget", type=int, default=128, help="max_num_batched_tokens of every worker")
    parser.add_argument("--model", default="tiny", help="tiny, demo, a directory or a Hugging Face id; in fp32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write samples and totals to this file too")
    arguments = parser.parse_args()
    before = Machine.now()
    print(f"before: {before}", flush=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        model_directory(arguments.model, Path(directory)) as model,
        local_ray(),
        running(
            shape(model, arguments.prefill, arguments.decode, num_blocks=arguments.blocks, budget=arguments.budget)
        ) as address,
    ):
        tally = asyncio.run(load(address, arguments))
        status, unrest = await_rest(address)
        check_end(status, unrest, tally)
        _show(status, tally)
    after = Machine.now()
    print(f"after: {after}")
    if arguments.json is not None:
        content = {
            "settings": {k: v for k, v in vars(arguments).items() if k != "json"},
            "before": asdict(before),
            "after": asdict(after),
            "counts": dict(tally.counts),
            "tokens": tally.tokens,
            "violations": tally.violations,
            "rss_mib_per_hour": {name: rss_slope(samples) for name, samples in tally.samples.items()},
            "samples": {name: [asdict(sample) for sample in samples] for name, samples in tally.samples.items()},
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{tally.counts['violations']} violations")
    return 1 if tally.counts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
