"""A scheduler under test with its books checked after every event, and a stand-in for the model."""

from __future__ import annotations

from itertools import count
from zlib import crc32

import pytest

from baton.proto.messages import FinishReason, Leg, Request, Role, Sampling
from baton.proto.settings import SchedulerSettings
from baton.scheduler.plan import Emitted, StepResult
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig

STOP_TOKEN = 2


def request(
    sequence_id, prompt=8, leg=Leg.WHOLE, max_tokens=8, num_prompt_tokens=None, salt="", adapter="", **fields
) -> Request:
    """`prompt`: token ids, or how many; then they differ from those of every other request."""
    sampling = {name: fields.pop(name) for name in list(fields) if name not in ("priority", "deadline_s")}
    if isinstance(prompt, int):
        prompt = [crc32(sequence_id.encode()) % 1_000_003 + index for index in range(prompt)]
    return Request(
        sequence_id=sequence_id,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=Sampling(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), **sampling),
        leg=leg,
        cache_salt=salt,
        adapter=adapter,
        **fields,
    )


class Driver:
    """Drives one scheduler; `check()` follows every event. Time is the number of events so far."""

    def __init__(self, num_blocks=64, block_size=4, max_model_len=1000, role=Role.COLOCATED, **settings) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(role, num_blocks, max_model_len, block_size, SchedulerSettings(**settings))
        )
        self.pool = self.scheduler.pool
        self.emitted: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self._ticks = count()

    def now(self) -> float:
        return float(next(self._ticks))

    def add(self, sequence_id, *args, **fields):
        """The new sequence; anything but a refusal."""
        sequence = self.offer(sequence_id, *args, **fields)
        assert not isinstance(sequence, Refusal), sequence
        return sequence

    def offer(self, sequence_id, *args, **fields):
        outcome = self.scheduler.add(request(sequence_id, *args, **fields), self.now())
        self.scheduler.check()
        return outcome

    def receive(self, sequence_id, *args, **fields):
        """Adds and announces a decode leg."""
        sequence = self.add(sequence_id, *args, leg=Leg.DECODE, **fields)
        assert self.scheduler.announce(sequence_id)
        self.scheduler.check()
        return sequence

    def land(self, sequence_id, next_token=7, num_transferred_tokens=0):
        assert self.scheduler.land(sequence_id, next_token, num_transferred_tokens, self.now())
        self.scheduler.check()

    def plan(self):
        step = self.scheduler.plan(self.now())
        self.scheduler.check()
        assert step.num_tokens == sum(chunk.num_tokens for chunk in step.chunks)
        assert step.num_tokens <= self.scheduler.config.settings.max_num_batched_tokens
        return step

    def commit(self, step, token=7):
        """`token`: what every chunk that samples yields."""
        events = self.scheduler.commit(
            step, StepResult([token if chunk.samples else -1 for chunk in step.chunks]), self.now()
        )
        self.scheduler.check()
        for event in events:
            if isinstance(event, Emitted):
                self.emitted.setdefault(event.sequence.sequence_id, []).append(event.token_id)
                if event.finish is not None:
                    self.finished[event.sequence.sequence_id] = event.finish
        return events

    def step(self, token=7):
        step = self.plan()
        self.commit(step, token)
        return step

    def abort(self, sequence_id):
        sequence = self.scheduler.abort(sequence_id, self.now())
        self.scheduler.check()
        return sequence

    def run_until_idle(self, most=10_000):
        for _ in range(most):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still at work after {most} steps")

    def assert_at_rest(self):
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.receiving, load.exported) == (0, 0, 0, 0)
        assert (load.queued_tokens, load.running_context_tokens) == (0, 0)
        assert (load.held_blocks, load.lent_blocks, load.quarantined_blocks) == (0, 0, 0)
        assert load.free_blocks == load.total_blocks


def chunks_of(step) -> dict[str, tuple[int, int]]:
    """The range of tokens that a step computes, by sequence."""
    return {chunk.sequence.sequence_id: (chunk.start, chunk.start + chunk.num_tokens) for chunk in step.chunks}


@pytest.fixture(name="chunks_of")
def chunks_of_fixture():
    return chunks_of


@pytest.fixture
def driver():
    """Makes a Driver."""
    return Driver
