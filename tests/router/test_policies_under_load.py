"""What the choice of worker is worth, on a virtual clock: no processes, the router's own queue, book and policies."""

from __future__ import annotations

import math
import statistics

import pytest
from virtual import Setup, VirtualCluster, capacity

from baton.capacity import workload
from baton.client.bench import Distribution

NUM_REQUESTS = 1500


def ttft(policy: str, seed: int, **changes: float) -> Distribution:
    setup = Setup(policy, **changes)
    plan = workload.requests("chat", NUM_REQUESTS, 1.0, seed, 0.1)
    plan = workload.requests("chat", NUM_REQUESTS, 0.8 * capacity(setup, plan), seed, 0.1)
    values = VirtualCluster(setup).run(plan)
    assert len(values) == NUM_REQUESTS
    result = Distribution.of(values)
    assert result is not None
    return result


@pytest.mark.parametrize("cores", [math.inf, 2])
def test_the_slowest_first_tokens_come_sooner_by_looking_at_queues_than_by_taking_turns(cores: float) -> None:
    ratios = [
        ttft("queue_depth", seed, cores=cores).p99 / ttft("round_robin", seed, cores=cores).p99 for seed in range(5)
    ]
    assert statistics.median(ratios) < 0.95


def test_late_dispatch_makes_up_for_a_policy_that_does_not_look() -> None:
    at_once = ttft("random", 1, budget=256, credit_steps=math.ldexp(1, 20))
    late = ttft("random", 1, budget=256)
    assert late.p99 < 0.8 * at_once.p99
