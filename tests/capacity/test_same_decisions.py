"""One arrival list through live workers and through simulated ones: the same plans, step by step.

Time does not decide here: one request holds the first step until all others are in the worker's inbox, and there is
credit for all of them. From then on everything follows from the order in which they came.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import dataclass, replace
from random import Random

import pytest
from asking import until
from paper_model import VOCAB_SIZE, PaperRunner, write_paper_tokenizer
from small_cluster import SmallCluster
from virtual_cluster import cluster, cost_model

from baton.capacity.outcome import End, RequestOutcome
from baton.capacity.simulate import simulate
from baton.capacity.workload import Arrival
from baton.proto.messages import Sampling
from baton.proto.settings import SchedulerSettings
from baton.router.config import RouterSettings
from baton.router.journey import Ended, Errand
from baton.scheduler.plan import Step

ROUTER = RouterSettings(port=0, credit_steps=1000.0)


@dataclass(frozen=True)
class Plan:
    """One step: who gets which tokens, who loses its blocks, who may receive."""

    chunks: tuple[tuple[str, int, int, bool], ...]
    preempted: tuple[str, ...]
    reserved: tuple[str, ...]

    @classmethod
    def of(cls, step: Step) -> Plan:
        return cls(
            tuple((chunk.sequence.sequence_id, *chunk[1:]) for chunk in step.chunks),
            tuple(sequence.sequence_id for sequence in step.preempted),
            tuple(sequence.sequence_id for sequence in step.reserved),
        )


@dataclass
class Story:
    """Plans by worker, and how many tokens of each request's prompt were cached."""

    plans: dict[str, list[Plan]]
    cached_tokens: list[int]


class GatedRunner(PaperRunner):
    """Ends its first step when the gate opens."""

    def __init__(self, gate: threading.Event, num_blocks: int) -> None:
        super().__init__(num_blocks, max_model_len=8192)
        self._gate = gate

    def run(self, step: Step):
        assert self._gate.wait(30.0), "the gate has not opened"
        return super().run(step)


def token_ids(arrivals: list[Arrival]) -> list[tuple[int, ...]]:
    """Prompts of which equal prefixes are those that the arrivals name."""
    random = Random(7)
    latest: dict[int, list[int]] = {}
    for arrival in arrivals:
        begin = latest.get(arrival.session, [])[: arrival.prefix_tokens]
        own = [random.randrange(VOCAB_SIZE - 1) for _ in range(arrival.prompt_tokens - len(begin))]
        latest[arrival.session] = begin + own
        yield tuple(begin + own)


async def live(tmp_path, shape: dict[str, int], num_blocks: int, settings: dict, arrivals: list[Arrival]) -> Story:
    gate = threading.Event()
    plans: dict[str, list[Plan]] = {}

    def listen(worker_id: str, scheduler) -> None:
        plan, noted = scheduler.plan, plans.setdefault(worker_id, [])

        def planned(now: float) -> Step:
            step = plan(now)
            if step.chunks or step.preempted or step.reserved:
                noted.append(Plan.of(step))
            return step

        scheduler.plan = planned

    write_paper_tokenizer(tmp_path)
    small = SmallCluster(
        tmp_path,
        lambda: GatedRunner(gate, num_blocks),
        **{"prefill": 0, "decode": 0, "colocated": 0} | shape,
        scheduler=SchedulerSettings(**settings),
        router_settings=ROUTER,
        short_output_tokens=ROUTER.short_output_tokens,
    )
    async with small:
        for seat in small.members():
            listen(seat.worker_id, seat.worker.core.scheduler)
        first = small.seats["prefill-0" if "prefill" in shape else "colocated-0"].worker.core

        async def one(number: int, prompt: tuple[int, ...], arrival: Arrival) -> int:
            now = asyncio.get_running_loop().time()
            errand = Errand(str(number), prompt, Sampling(temperature=0.0, max_tokens=arrival.output_tokens), now)
            journey = small.router.journey(errand)
            async with aclosing(journey.run()) as pieces:
                last = [piece async for piece in pieces][-1]
            assert isinstance(last, Ended), last
            assert len(journey.output) == arrival.output_tokens
            return journey.ledger.cached_tokens

        tasks = []
        for number, (prompt, arrival) in enumerate(zip(token_ids(arrivals), arrivals, strict=True)):
            tasks.append(asyncio.create_task(one(number, prompt, arrival)))
            if number == 0:
                await until(lambda: first.scheduler.counters.steps == 1, what="the first step")
        await until(lambda: first.loop._inbox.qsize() >= len(arrivals) - 1, what="all requests")
        gate.set()
        cached_tokens = await asyncio.gather(*tasks)
    return Story(plans, cached_tokens)


def simulated(shape: dict[str, int], num_blocks: int, settings: dict, arrivals: list[Arrival]) -> Story:
    plans: dict[str, list[Plan]] = {}
    outcomes: list[RequestOutcome] = []
    setup = cluster(**shape, num_blocks=num_blocks, router=ROUTER, **settings)
    simulate(
        setup,
        cost_model(),
        arrivals,
        1,
        sink=outcomes.append,
        listener=lambda worker_id, step, now: plans.setdefault(worker_id, []).append(Plan.of(step)),
    )
    assert all(outcome.end is End.FINISHED for outcome in outcomes)
    outcomes.sort(key=lambda outcome: outcome.number)
    return Story(plans, [outcome.cached_tokens for outcome in outcomes])


def arrivals(prompts: list[int], outputs: list[int], prefixes: dict[int, int] | None = None) -> list[Arrival]:
    """The first at once, the others while its first step is computed. `prefixes`: tokens shared with the first."""
    shared = prefixes or {}
    return [
        Arrival(number * 1e-4, prompt, output, 0 if number in shared else number, shared.get(number, 0))
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


MIXED = arrivals(
    [90, 17, 300, 64, 5, 128, 700, 33, 48, 1, 250, 16, 90],
    [30, 5, 12, 40, 1, 9, 22, 64, 3, 17, 8, 25, 2],
)
GROWING = arrivals([20 + 7 * number for number in range(12)], [400 - 9 * number for number in range(12)])
SHARING = arrivals([330, 400, 337, 100, 500, 336], [40, 30, 20, 25, 10, 15], {1: 330, 2: 336, 4: 200, 5: 320})

CASES = {
    "chunks": (MIXED, 2048, {"max_num_batched_tokens": 128}),
    "long prompts step aside": (MIXED, 2048, {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 48}),
    "preemption": (GROWING, 230, {"max_num_batched_tokens": 256}),
    "a short output": ([replace(MIXED[0], output_tokens=3), *MIXED[1:]], 2048, {"max_num_batched_tokens": 128}),
    "prefix cache": (SHARING, 2048, {"max_num_batched_tokens": 160}),
    "no prefix cache": (SHARING, 2048, {"max_num_batched_tokens": 160, "prefix_cache": False}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_a_co_located_worker_plans_the_same_steps_live_and_simulated(tmp_path, case) -> None:
    requests, num_blocks, settings = case
    was = await live(tmp_path, {"colocated": 1}, num_blocks, settings, requests)
    told = simulated({"colocated": 1}, num_blocks, settings, requests)
    assert was.plans["colocated-0"] == told.plans["colocated-0"]
    assert was.cached_tokens == told.cached_tokens
    assert len(told.plans["colocated-0"]) > 20
    assert any(plan.preempted for plan in told.plans["colocated-0"]) == (num_blocks == 230)
    assert any(told.cached_tokens) == (requests is SHARING and settings.get("prefix_cache", True))


@pytest.mark.parametrize("name", ["chunks", "a short output", "prefix cache"])
async def test_a_pair_computes_and_reserves_in_the_same_order_live_and_simulated(tmp_path, name) -> None:
    """When KV lands is up to time; the chunks of all prompts and the order in which decode takes them are not."""
    requests, num_blocks, settings = CASES[name]
    shape = {"prefill": 1, "decode": 1}
    was = await live(tmp_path, shape, num_blocks, settings, requests)
    told = simulated(shape, num_blocks, settings, requests)
    assert was.plans["prefill-0"] == told.plans["prefill-0"]
    assert was.cached_tokens == told.cached_tokens
    was_reserved, told_reserved = (
        [name for plan in story.plans["decode-0"] for name in plan.reserved] for story in (was, told)
    )
    assert was_reserved == told_reserved
    num_moved = sum(arrival.output_tokens > 1 for arrival in requests) - (name == "a short output")
    assert len(told_reserved) == num_moved
