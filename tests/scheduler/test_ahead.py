"""Steps that are planned while another runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.proto.messages import FinishReason, Leg, Request, Role, Sampling
from baton.scheduler.plan import StepResult
from baton.scheduler.scheduler import Scheduler, SchedulerConfig

STOP = 9


def scheduler_of(num_blocks: int = 32, role: Role = Role.COLOCATED, ahead: bool = True) -> Scheduler:
    return Scheduler(SchedulerConfig(role, num_blocks, 64, 4, plans_ahead=ahead))


def request_of(leg: Leg = Leg.WHOLE, name: str = "a", num_tokens: int = 3, **sampling: object) -> Request:
    chosen = replace(Sampling(max_tokens=4, stop_token_ids=(STOP,)), **sampling)
    return Request(
        sequence_id=name, token_ids=(1,) * num_tokens, num_prompt_tokens=num_tokens, sampling=chosen, leg=leg
    )


def rows(step):
    return [(chunk.start, chunk.num_tokens, chunk.samples) for chunk in step.chunks]


def test_the_next_step_computes_the_token_that_the_step_in_flight_samples() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert rows(first) == [(0, 3, True)]
    assert rows(second) == [(3, 1, True)]
    scheduler.check()
    assert [event.token_id for event in scheduler.commit(first, StepResult([5]), 0.0)] == [5]
    assert [event.token_id for event in scheduler.commit(second, StepResult([6]), 0.0)] == [6]
    assert scheduler.get("a").token_ids == [1, 1, 1, 5, 6]
    scheduler.check()


def test_no_step_is_planned_for_a_token_beyond_the_last() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(max_tokens=2), 0.0)
    steps = [scheduler.plan(0.0) for _ in range(3)]
    assert [rows(step) for step in steps] == [[(0, 3, True)], [(3, 1, True)], []]
    scheduler.commit(steps[0], StepResult([5]), 0.0)
    (event,) = scheduler.commit(steps[1], StepResult([6]), 0.0)
    assert event.finish is FinishReason.LENGTH


def test_a_stop_token_drops_the_step_that_was_planned_after_it() -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    (event,) = scheduler.commit(first, StepResult([STOP]), 0.0)
    assert event.finish is FinishReason.STOP
    scheduler.check()
    assert scheduler.load().quarantined_blocks == 1
    assert scheduler.commit(second, StepResult([6]), 0.0) == []
    scheduler.check()
    assert scheduler.load().free_blocks == 32
    assert scheduler.counters.tokens_generated == 1


def test_a_sequence_preempted_in_flight_samples_its_token_again() -> None:
    scheduler = scheduler_of(num_blocks=4)
    scheduler.add(request_of(name="a", max_tokens=12), 0.0)
    scheduler.add(request_of(name="b", max_tokens=12), 0.0)
    emitted: dict[str, list[int]] = {"a": [], "b": []}
    preempted = 0
    flying = [scheduler.plan(0.0)]
    for _ in range(80):
        flying.append(scheduler.plan(0.0))
        preempted += len(flying[-1].preempted)
        step = flying.pop(0)
        tokens = [10 + chunk.start + chunk.num_tokens if chunk.samples else -1 for chunk in step.chunks]
        for event in scheduler.commit(step, StepResult(tokens), 0.0):
            emitted[event.sequence.sequence_id].append(event.token_id)
        scheduler.check()
    assert preempted
    assert emitted == {"a": list(range(13, 25)), "b": list(range(13, 25))}


@pytest.mark.parametrize(
    "sampling", [{"grammar": "x"}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}]
)
def test_who_reads_its_output_waits_for_it(sampling: dict[str, object]) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(**sampling), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert not second.chunks
    scheduler.commit(first, StepResult([5]), 0.0)
    assert rows(scheduler.plan(0.0)) == [(3, 1, True)]


def test_a_prefill_leg_computes_nothing_after_its_token() -> None:
    scheduler = scheduler_of(role=Role.PREFILL)
    scheduler.add(request_of(Leg.PREFILL), 0.0)
    assert rows(scheduler.plan(0.0)) == [(0, 3, True)]
    assert not scheduler.plan(0.0).chunks
