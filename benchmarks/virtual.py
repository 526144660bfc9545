"""Placement policies on a virtual clock: the router's own load book, queue and policies, and workers that only count.

    python benchmarks/virtual.py [--load 0.8] [--cores 2] [--budget 2048] [--requests 4000] [--routers 1]

A step of a worker takes a fixed time and one for each of its tokens, of a processor that it may have to share; a worker
reports at the end of each step, as real ones do. Hand-offs take no time. Prints quantiles of TTFT for every policy on
the same arrivals, with and without the router's late dispatch (credit).

Owns: the virtual workers. Refuses to know: processes, models, wires.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from baton.capacity import workload
from baton.client.bench import Distribution
from baton.proto.messages import Leg, LoadReport, Role, WorkerDescription
from baton.router.config import RouterSettings
from baton.router.dispatch import DispatchQueue
from baton.router.load import LoadBook
from baton.router.placement import POLICIES, Placement, PlacementQuery, load_policy
from baton.router.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class Speed:
    """Processor seconds: of any step, of a prompt token, of a sequence in a decode step."""

    step_s: float = 0.020
    prompt_token_s: float = 0.001
    sequence_s: float = 0.004


@dataclass(frozen=True, slots=True)
class Setup:
    """`cores`: how many workers compute at full speed at once. `credit_steps`: infinite is dispatch at once.

    `routers`: replicas, each with its own book and queue; a request comes to any of them by chance.
    """

    policy: str
    prefill: int = 2
    decode: int = 2
    cores: float = math.inf
    budget: int = 2048
    credit_steps: float = 2.0
    routers: int = 1
    speed: Speed = field(default_factory=Speed)


@dataclass(slots=True)
class _Job:
    """A leg on a worker: prompt tokens to compute, or tokens to generate."""

    router: int
    query: PlacementQuery
    decode: str
    number: int
    left: int


class _Worker:
    """One step at a time: what has come in is taken up when a step begins."""

    def __init__(self, worker_id: str, role: Role, setup: Setup) -> None:
        self.worker_id = worker_id
        self.role = role
        self.work_s = 0.0
        self._setup = setup
        self._inbox: deque[_Job] = deque()
        self._jobs: list[_Job] = []
        self._planned: list[int] = []
        self._reports = 0
        self._submitted = [0] * setup.routers
        self._last_submit = [0] * setup.routers

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            worker_id=self.worker_id,
            incarnation="first",
            address=f"{self.worker_id}:1",
            role=self.role,
            model="virtual",
            max_model_len=4096,
            vocab_size=10,
            block_size=16,
            num_blocks=4096,
            max_num_batched_tokens=self._setup.budget,
            max_num_seqs=256,
            dtype="float32",
            connector="local",
            version="0",
            kv_bytes_per_token=1,
            pid=1,
        )

    def submit(self, router: int, query: PlacementQuery, decode: str, num_tokens: int) -> int:
        self._submitted[router] += 1
        self._inbox.append(_Job(router, query, decode, self._submitted[router], num_tokens))
        return self._submitted[router]

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that it has yet to compute, whether it has looked at them or not."""
        return sum(job.left for job in (*self._inbox, *self._jobs))

    def begin(self) -> None:
        """Plans the next step, if there is anything to do and none in progress."""
        if self.work_s > 0:
            return
        while self._inbox:
            job = self._inbox.popleft()
            self._jobs.append(job)
            self._last_submit[job.router] = job.number
        if not self._jobs:
            return
        speed = self._setup.speed
        if self.role is Role.PREFILL:
            budget, self._planned = self._setup.budget, []
            for job in self._jobs:
                self._planned.append(min(job.left, budget))
                budget -= self._planned[-1]
            self.work_s = speed.step_s + speed.prompt_token_s * sum(self._planned)
        else:
            self._planned = [1] * len(self._jobs)
            self.work_s = speed.step_s + speed.sequence_s * len(self._jobs)

    def end(self) -> list[_Job]:
        """Ends the step; the jobs that it has finished."""
        self.work_s = 0.0
        for job, num_tokens in zip(self._jobs, self._planned, strict=True):
            job.left -= num_tokens
        done = [job for job in self._jobs if not job.left]
        self._jobs = [job for job in self._jobs if job.left]
        return done

    def report(self, router: int) -> LoadReport:
        self._reports += 1
        prefills = self.role is Role.PREFILL
        return LoadReport(
            worker_id=self.worker_id,
            incarnation="first",
            role=self.role,
            sequence_number=self._reports,
            running=len(self._jobs),
            queued_tokens=sum(job.left for job in self._jobs) if prefills else 0,
            total_blocks=4096,
            free_blocks=4096,
            last_submit=self._last_submit[router],
        )


class _Front:
    """One router: its book and its queue."""

    def __init__(self, setup: Setup, number: int) -> None:
        self.book = LoadBook(setup.credit_steps, setup.routers)
        settings = replace(
            RouterSettings(), max_queued_requests=1 << 30, max_queued_tokens=1 << 40, short_output_tokens=0
        )
        policy = load_policy(setup.policy, Random(1 + number))
        self.queue = DispatchQueue(self.book, PrefixIndex(), policy, settings, 0.0)


class VirtualCluster:
    """A router's decisions and workers, on a clock that jumps from event to event."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._now = 0.0
        self._fronts = [_Front(setup, number) for number in range(setup.routers)]
        self._chance = Random(0)
        self.peak_queued_tokens = 0
        roles = [(Role.PREFILL, setup.prefill), (Role.DECODE, setup.decode)]
        self._workers = {
            f"{role.value}-{index}": _Worker(f"{role.value}-{index}", role, setup)
            for role, size in roles
            for index in range(size)
        }
        for worker in self._workers.values():
            for number, front in enumerate(self._fronts):
                front.book.add_worker(worker.describe())
                front.book.report(worker.report(number), 0.0)
        self._ttft_s: list[float] = []

    def run(self, arrivals: Sequence[workload.Arrival]) -> list[float]:
        """TTFT of every request, in the order of their first tokens."""
        for number, arrival in enumerate(arrivals):
            self._run_until(arrival.time_s)
            query = PlacementQuery(
                attempt_id=f"r{number}",
                num_tokens=arrival.prompt_tokens,
                max_new_tokens=arrival.output_tokens,
                arrived_s=arrival.time_s,
            )
            router = self._chance.randrange(len(self._fronts))
            self._fronts[router].queue.push(query, None, self._now)
            self._dispatch([router])
        self._run_until(math.inf)
        return self._ttft_s

    def _run_until(self, time_s: float) -> None:
        while True:
            busy = [worker for worker in self._workers.values() if worker.work_s > 0]
            if not busy:
                break
            rate = min(1.0, self._setup.cores / len(busy))
            first = min(busy, key=lambda worker: worker.work_s)
            after_s = first.work_s / rate
            if self._now + after_s > time_s:
                for worker in busy:
                    worker.work_s -= (time_s - self._now) * rate
                break
            self._now += after_s
            for worker in busy:
                if worker is not first:
                    worker.work_s = max(worker.work_s - after_s * rate, 1e-12)
            self._end_step(first)
        if time_s < math.inf:
            self._now = time_s

    def _end_step(self, worker: _Worker) -> None:
        for job in worker.end():
            query, book = job.query, self._fronts[job.router].book
            if worker.role is Role.DECODE:
                book.ended(query.leg_id(Leg.DECODE))
                continue
            self._ttft_s.append(self._now - query.arrived_s)
            book.prefilled(query.leg_id(Leg.PREFILL))
            book.ended(query.leg_id(Leg.PREFILL))
            if query.max_new_tokens > 1:
                number = self._workers[job.decode].submit(job.router, query, "", query.max_new_tokens - 1)
                book.sent(query.leg_id(Leg.DECODE), number)
            else:
                book.ended(query.leg_id(Leg.DECODE))
        # All hear it before one of them acts on it, as over the wire.
        for number, front in enumerate(self._fronts):
            front.book.report(worker.report(number), self._now)
        self._dispatch(range(len(self._fronts)))

    def _dispatch(self, routers: Iterable[int]) -> None:
        for router in routers:
            front = self._fronts[router]
            for decision in front.queue.advance(self._now):
                placement, query = decision.outcome, decision.ticket.query
                assert isinstance(placement, Placement)
                assert placement.prefill is not None
                assert placement.decode is not None
                to = self._workers[placement.prefill]
                number = to.submit(router, query, placement.decode, placement.uncached_tokens)
                front.book.sent(query.leg_id(Leg.PREFILL), number)
                self.peak_queued_tokens = max(self.peak_queued_tokens, to.queued_tokens)
        for worker in self._workers.values():
            worker.begin()


def capacity(setup: Setup, arrivals: Sequence[workload.Arrival]) -> float:
    """Requests a second at which the busiest resource would be busy all the time, with steps of one request each for
    prefill and of eight for decode: an estimate to set a load by."""
    speed, number = setup.speed, len(arrivals)
    prefill_s = sum(speed.step_s + speed.prompt_token_s * arrival.prompt_tokens for arrival in arrivals) / number
    decode_s = sum(arrival.output_tokens * (speed.step_s / 8 + speed.sequence_s) for arrival in arrivals) / number
    shared = setup.cores / (prefill_s + decode_s)
    return min(shared, setup.prefill / prefill_s, setup.decode / decode_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--cores", type=float, default=math.inf, help="shared by all workers; default: one each")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--routers", type=int, default=1, help="replicas with a book each, hit by chance")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("TTFT in ms: p50 / p90 / p99, a column a seed")
    for credit_steps in (2.0, math.inf):
        for policy in POLICIES:
            steps = credit_steps if math.isfinite(credit_steps) else 1e9 / arguments.budget
            setup = Setup(
                policy,
                cores=arguments.cores,
                budget=arguments.budget,
                credit_steps=steps,
                routers=arguments.routers,
            )
            cells = []
            for seed in range(arguments.seeds):
                plan = workload.requests("chat", arguments.requests, 1.0, seed, 0.1)
                rate = arguments.load * capacity(setup, plan)
                plan = workload.requests("chat", arguments.requests, rate, seed, 0.1)
                ttft = Distribution.of(VirtualCluster(setup).run(plan))
                assert ttft is not None
                cells.append(f"{1e3 * ttft.p50:.0f} / {1e3 * ttft.p90:.0f} / {1e3 * ttft.p99:.0f}")
            print(f"credit {credit_steps:>4}  {policy:13}  " + "   ".join(f"{cell:20}" for cell in cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
