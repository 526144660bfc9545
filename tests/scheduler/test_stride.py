"""A scheduler that knows every token beforehand looks at few sequences and decides as one that looks at all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.proto.messages import Leg, Request, Role, Sampling
from baton.proto.settings import SchedulerSettings
from baton.scheduler.plan import Emitted, StepResult
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig
from baton.scheduler.sequence import Sequence, State
from baton.scheduler.stride import Stride

TOKEN = 0
LEGS = {Role.PREFILL: Leg.PREFILL, Role.DECODE: Leg.DECODE, Role.COLOCATED: Leg.WHOLE}


class Pair:
    """Two schedulers that are told the same: one foretells, the other does not."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.plain = Scheduler(config)
        self.foretelling = Scheduler(
            SchedulerConfig(
                config.role, config.num_blocks, config.max_model_len, config.block_size, config.settings, False, TOKEN
            )
        )
        self.names: list[str] = []
        self.now = 0.0
        self.chunks_spared = 0

    def both(self, command) -> None:
        self.now += 1.0
        first, second = command(self.plain), command(self.foretelling)
        assert isinstance(first, Refusal) == isinstance(second, Refusal)
        self.assert_equal()

    def step(self) -> None:
        self.now += 1.0
        plain, foretelling = self.plain.plan(self.now), self.foretelling.plan(self.now)
        assert plain.work() == foretelling.work()
        assert plain.num_tokens == foretelling.num_tokens
        for field in ("preempted", "reserved", "skipped"):
            ids = [[sequence.sequence_id for sequence in getattr(step, field)] for step in (plain, foretelling)]
            assert ids[0] == ids[1], field
        told = [(chunk.sequence.sequence_id, *chunk[1:]) for chunk in plain.chunks]
        kept = [(chunk.sequence.sequence_id, *chunk[1:]) for chunk in foretelling.chunks]
        spared = [chunk for chunk in told if chunk not in kept]
        assert [chunk for chunk in told if chunk in kept] == kept
        assert len(spared) == foretelling.num_in_stride
        assert all(num_tokens == 1 and samples for _, _, num_tokens, samples in spared)
        self.chunks_spared += len(spared)
        self.assert_equal()
        self.now += 1.0
        events = [
            scheduler.commit(step, StepResult([TOKEN] * len(step.chunks)), self.now)
            for scheduler, step in ((self.plain, plain), (self.foretelling, foretelling))
        ]
        in_stride = {chunk[0] for chunk in spared}
        told_events, kept_events = (
            [(event.sequence.sequence_id, type(event), getattr(event, "finish", None)) for event in each]
            for each in events
        )
        assert [event for event in told_events if event[0] not in in_stride] == kept_events
        assert all(event[1:] == (Emitted, None) for event in told_events if event[0] in in_stride)
        self.assert_equal()

    def assert_equal(self) -> None:
        self.plain.check()
        self.foretelling.check()
        assert picture(self.plain, self.names) == picture(self.foretelling, self.names)


def picture(scheduler: Scheduler, names: list[str]) -> tuple[object, ...]:
    """All that a scheduler knows."""
    pool = scheduler.pool
    return (
        scheduler.load(),
        scheduler.counters,
        scheduler.has_work(),
        pool._free,
        list(pool._evictable),
        pool.ref_counts(),
        pool.lend_counts(),
        pool._names,
        [sequence.sequence_id for sequence in scheduler._running.sequences],
        [sequence.sequence_id for sequence in scheduler._waiting.sequences],
        [of_sequence(scheduler.get(name)) for name in names],
    )


def of_sequence(sequence: Sequence | None) -> list[object] | None:
    skipped = ("request", "sampling")
    return sequence and [getattr(sequence, field) for field in Sequence.__slots__ if field not in skipped]


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    role=st.sampled_from([Role.DECODE, Role.COLOCATED, Role.COLOCATED, Role.PREFILL]),
    pool_tokens=st.sampled_from([64, 96, 160]),
    block_size=st.sampled_from([8, 4, 8, 2, 1]),
    budget=st.sampled_from([16, 7, 5, 3]),
    max_num_seqs=st.sampled_from([8, 4]),
    threshold=st.sampled_from([0, 3]),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_who_foretells_decides_as_who_looks_at_every_sequence(
    data, role, pool_tokens, block_size, budget, max_num_seqs, threshold, prefix_cache, policy
) -> None:
    limits = SchedulerSettings(budget, max_num_seqs, threshold, prefix_cache, policy)
    pair = Pair(SchedulerConfig(role, pool_tokens // block_size, 60, block_size, limits))
    commands = st.sampled_from(["add", "add", "add", "hand on", "hand on", "steps", "steps", "steps", "abort"])
    for command in ["add", "add", *data.draw(st.lists(commands, min_size=5, max_size=25), "commands")]:
        if command == "add":
            add(pair, data, LEGS[role])
        elif command == "hand on":
            hand_on(pair)
        elif command == "steps":
            for _ in range(data.draw(st.sampled_from([1, 3, 9]), "steps")):
                pair.step()
        elif alive := [name for name in pair.names if pair.plain.get(name)]:
            name = data.draw(st.sampled_from(alive), "who")
            pair.both(lambda scheduler, name=name: scheduler.abort(name, pair.now))
            pair.both(lambda scheduler, name=name: scheduler.settle(name))
    for _ in range(3000):
        if not any(pair.plain.get(name) for name in pair.names):
            return
        hand_on(pair)
        pair.step()
    raise AssertionError("something never ends")


def add(pair: Pair, data: st.DataObject, leg: Leg) -> None:
    name = f"s{len(pair.names)}"
    prompt = data.draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=14), "prompt")
    stops = data.draw(st.sampled_from([(), (), (), (TOKEN,)]), "stop tokens")
    sampling = Sampling(
        max_tokens=data.draw(st.sampled_from([45, 30, 9, 1]), "max_tokens"), stop_token_ids=stops, min_tokens=3
    )
    priority = data.draw(st.integers(0, 1), "priority")
    request = Request(name, tuple(prompt), len(prompt), sampling, leg, priority=priority)
    pair.names.append(name)
    pair.both(lambda scheduler: scheduler.add(request, pair.now))


def hand_on(pair: Pair) -> None:
    """What the other side of a hand-off owes comes."""
    for name in pair.names:
        sequence = pair.plain.get(name)
        if sequence is None:
            continue
        if sequence.state is State.EXPECTED:
            pair.both(lambda scheduler, name=name: scheduler.announce(name))
        elif sequence.state is State.RECEIVING:
            pair.both(lambda scheduler, name=name: scheduler.land(name, TOKEN, 0, pair.now))
        elif sequence.state is State.EXPORTED:
            pair.both(lambda scheduler, name=name: scheduler.release(name, pair.now))


def test_most_tokens_are_not_among_the_chunks() -> None:
    pair = Pair(SchedulerConfig(Role.COLOCATED, 200, 1000, 16))
    for number in range(4):
        pair.names.append(f"s{number}")
        request = Request(f"s{number}", (1,) * (20 + number), 20 + number, Sampling(max_tokens=200), Leg.WHOLE)
        pair.both(lambda scheduler, request=request: scheduler.add(request, pair.now))
    for _ in range(210):
        pair.step()
    assert pair.plain.is_empty
    assert pair.chunks_spared > 0.9 * 4 * 200


def test_a_member_is_written_up_to_the_last_step_that_has_ended() -> None:
    stride = Stride(7)
    sequence = Sequence(Request("s", (1, 2, 3), 3, Sampling(max_tokens=100)), 0, 0.0)
    sequence.num_computed_tokens = 2
    stride.join(sequence, 5)
    stride.begin_step()
    stride.write_up(sequence)
    assert (sequence.num_computed_tokens, sequence.token_ids) == (3, [1, 2, 3])
    stride.end_step()
    stride.begin_step()
    stride.end_step()
    stride.leave(sequence)
    assert (sequence.num_computed_tokens, sequence.token_ids) == (4, [1, 2, 3, 7, 7])
    assert (len(stride.members), stride.context_tokens) == (0, 0)
