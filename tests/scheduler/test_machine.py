"""Any order of events, on any small scheduler: the books stay right, the KV stays right, and everything ends.

The stand-in for the model keeps a KV cache that holds, for each slot of each block, the tokens (and the salt) up to it.
A step reads all that its chunks attend to and writes what they compute, at its commit; a pull writes just before it
lands or settles, the latest moment allowed. So a block that is reused too early, or found by the wrong one, is seen.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.proto.messages import FailureKind, FinishReason, Leg, Request, Role, Sampling
from baton.proto.settings import SchedulerSettings
from baton.scheduler.blocks import prefix_hashes
from baton.scheduler.plan import Emitted, StepResult
from baton.scheduler.scheduler import Refusal, Scheduler, SchedulerConfig
from baton.scheduler.sequence import State

STOP_TOKEN = 3
MAX_IN_FLIGHT = 2


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        pool_tokens=st.sampled_from([24, 24, 28, 36]),
        block_size=st.sampled_from([1, 2, 2, 4]),
        budget=st.sampled_from([8, 1, 2, 4, 5, 16]),
        max_num_seqs=st.sampled_from([5, 4, 3, 2, 1]),
        threshold=st.sampled_from([0, 0, 3, 5]),
        prefix_cache=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "deadline"]),
        role=st.sampled_from(Role),
        ahead=st.booleans(),
    )
    def build(self, pool_tokens, block_size, budget, max_num_seqs, threshold, prefix_cache, policy, role, ahead):
        scheduler_settings = SchedulerSettings(budget, max_num_seqs, threshold, prefix_cache, policy)
        self.block_size = block_size
        num_blocks = pool_tokens // block_size
        self.scheduler = Scheduler(SchedulerConfig(role, num_blocks, 24, block_size, scheduler_settings, ahead))
        self.leg = {Role.PREFILL: Leg.PREFILL, Role.DECODE: Leg.DECODE, Role.COLOCATED: Leg.WHOLE}[role]
        self.kv = [[None] * block_size for _ in range(num_blocks)]
        self.in_flight = deque()  # (step, the blocks of each chunk's sequence)
        self.unsettled = {}  # blocks that an aborted pull may still write to
        self.requests = {}
        self.emitted = {}
        self.ended = {}
        self.now = 0.0

    @rule(data=st.data())
    def add(self, data):
        leg = data.draw(st.sampled_from([self.leg, *Leg]), "leg")
        length = data.draw(st.sampled_from([6, 1, 3, 4, 8, 0, 11, 14]), "length")
        prompt = data.draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=length, max_size=length), "prompt")
        request = Request(
            sequence_id=f"s{len(self.requests)}",
            token_ids=tuple(prompt),
            num_prompt_tokens=max(0, len(prompt) - data.draw(st.sampled_from([0, 0, 0, 1]), "already emitted")),
            sampling=Sampling(
                max_tokens=data.draw(st.sampled_from([12, 1, 2, 5, 9, 16]), "max_tokens"),
                min_tokens=data.draw(st.sampled_from([0, 0, 4]), "min_tokens"),
                stop_token_ids=(STOP_TOKEN,),
                presence_penalty=data.draw(st.sampled_from([0.0, 0.0, 0.5]), "presence_penalty"),
                prompt_logprobs=data.draw(st.sampled_from([None, None, None, 1]), "prompt_logprobs"),
            ),
            leg=leg,
            priority=data.draw(st.integers(0, 2), "priority"),
            deadline_s=data.draw(st.sampled_from([None, 1.0, 9.0]), "deadline_s"),
            cache_salt=data.draw(st.sampled_from(["", "", "salt"]), "salt"),
        )
        self.offer(request)

    @precondition(lambda self: self.leg is Leg.DECODE)
    @rule(data=st.data())
    def fork(self, data):
        """A further output of a prompt that has landed."""
        if sequence := self.pick(data, data.draw(st.sampled_from([State.LANDED, State.RUNNING, State.PREEMPTED]))):
            number = len(self.requests)
            self.offer(replace(sequence.request, sequence_id=f"s{number}", leg=Leg.WHOLE))

    def offer(self, request):
        never, elsewhere = self.can_never_run(request), self.runs_elsewhere(request)
        outcome = self.scheduler.add(request, self.now)
        if isinstance(outcome, Refusal):
            assert outcome.kind is (FailureKind.REFUSED if never else FailureKind.SOURCE_LOST)
            assert never or elsewhere
            return
        assert not never
        assert not elsewhere
        self.requests[request.sequence_id] = request
        self.emitted[request.sequence_id] = []

    @rule(data=st.data())
    def add_twice(self, data):
        if alive := self.alive():
            assert isinstance(self.scheduler.add(data.draw(st.sampled_from(alive)).request, self.now), Refusal)

    @rule(data=st.data())
    def announce(self, data):
        if sequence := self.pick(data, State.EXPECTED):
            assert self.scheduler.announce(sequence.sequence_id)
            assert not self.scheduler.announce(sequence.sequence_id)

    @rule()
    def plan(self):
        if len(self.in_flight) == MAX_IN_FLIGHT:
            return
        had_work = self.scheduler.has_work()
        running_before = set(self.scheduler._running.sequences)
        step = self.scheduler.plan(self.now)
        assert had_work or not (step.chunks or step.reserved or step.preempted)
        assert step.num_tokens == sum(chunk.num_tokens for chunk in step.chunks)
        assert step.num_tokens <= self.scheduler.config.settings.max_num_batched_tokens
        planned = {chunk.sequence for chunk in step.chunks}
        assert len(planned) == len(step.chunks)
        assert not planned & set(step.preempted)
        assert not step.preempted or planned <= running_before
        assert not step.preempted or self.scheduler.config.role is not Role.PREFILL
        states = {Leg.DECODE: State.RECEIVING, Leg.PREFILL: State.RUNNING}
        assert all(sequence.state is states[sequence.leg] for sequence in step.reserved)
        assert not any(chunk.num_tokens < 1 for chunk in step.chunks)
        if step.chunks:
            self.in_flight.append((step, [tuple(chunk.sequence.block_ids) for chunk in step.chunks]))

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self):
        step, blocks = self.in_flight.popleft()
        for chunk, block_ids in zip(step.chunks, blocks, strict=True):
            sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
            if sequence.state is State.RUNNING and tuple(sequence.block_ids[: len(block_ids)]) == block_ids:
                self.assert_kv(sequence, chunk.start)
            self.write(sequence, block_ids, chunk.start, end)
        tokens = [self.next_token(chunk.sequence) if chunk.samples else -1 for chunk in step.chunks]
        for event in self.scheduler.commit(step, StepResult(tokens), self.now):
            if isinstance(event, Emitted):
                self.note(event)
            elif not event.sequence.ended:
                self.assert_kv(event.sequence, event.num_tokens)

    @rule(rounds=st.sampled_from([6, 3, 12]))
    def serve(self, rounds):
        for _ in range(rounds):
            self.plan()
            self.books_and_kv_are_right()
            if self.in_flight:
                self.commit()
                self.books_and_kv_are_right()

    @rule(data=st.data(), how_many=st.sampled_from([3, 4, 5]))
    def add_several(self, data, how_many):
        for _ in range(how_many):
            self.add(data)

    @rule()
    def hand_off(self):
        """Everything that the other side owes comes at once."""
        for sequence in self.alive():
            if sequence.state is State.EXPECTED:
                assert self.scheduler.announce(sequence.sequence_id)
            elif sequence.state is State.RECEIVING:
                self.finish_landing(sequence)

    @rule(data=st.data())
    def land(self, data):
        if sequence := self.pick(data, State.RECEIVING):
            self.finish_landing(sequence)

    @rule(data=st.data())
    def release(self, data):
        if sequence := self.pick(data, State.EXPORTED):
            self.finish_release(sequence)

    @rule(data=st.data(), states=st.sampled_from([set(State), {State.RECEIVING}, {State.RUNNING}, {State.RUNNING}]))
    def abort(self, data, states):
        if choice := [sequence for sequence in self.alive() if sequence.state in states]:
            sequence = data.draw(st.sampled_from(choice))
            state, first, block_ids = sequence.state, sequence.num_cached_blocks, list(sequence.block_ids)
            assert self.scheduler.abort(sequence.sequence_id, self.now) is sequence
            self.end(sequence, FinishReason.ABORTED)
            if state is State.RECEIVING:
                self.unsettled[sequence.sequence_id] = block_ids[first:]

    @rule(data=st.data())
    def settle(self, data):
        if self.unsettled:
            self.finish_settling(data.draw(st.sampled_from(sorted(self.unsettled))))

    @rule(data=st.data())
    def late_word(self, data):
        """Of sequences that have ended, or are in no state for it."""
        name = data.draw(st.sampled_from([*self.requests, "nobody"]))
        sequence = self.scheduler.get(name)
        state = sequence.state if sequence else None
        if state is not State.EXPECTED:
            assert not self.scheduler.announce(name)
        if state is not State.RECEIVING:
            assert not self.scheduler.land(name, 1, 0, self.now)
        if state is not State.EXPORTED:
            assert not self.scheduler.release(name, self.now)
        if name not in self.unsettled:
            assert not self.scheduler.settle(name)
        if state is None:
            assert self.scheduler.abort(name, self.now) is None

    @invariant()
    def books_and_kv_are_right(self):
        self.now += 1.0
        self.scheduler.check()
        first_in_flight = {}
        for step, _ in reversed(self.in_flight):
            first_in_flight.update((chunk.sequence, chunk.start) for chunk in step.chunks)
        for sequence in self.alive():
            if sequence.state in (State.LANDED, State.EXPORTED):
                self.assert_kv(sequence, sequence.num_computed_tokens)
            elif sequence.state is State.RUNNING:
                computed = sequence.num_computed_tokens
                self.assert_kv(sequence, min(computed, first_in_flight.get(sequence, computed)))

    @invariant()
    def what_may_still_be_written_is_nobody_elses(self):
        may_be_written = {block_id: name for name, blocks in self.unsettled.items() for block_id in blocks}
        for step, blocks in self.in_flight:
            for (sequence, start, num_tokens, _), block_ids in zip(step.chunks, blocks, strict=True):
                first, last = start // self.block_size, (start + num_tokens - 1) // self.block_size
                may_be_written.update(dict.fromkeys(block_ids[first : last + 1], sequence.sequence_id))
        pool = self.scheduler.pool
        assert not may_be_written.keys() & {*pool._free, *pool._evictable}
        for sequence in self.alive():
            for block_id in sequence.block_ids:
                assert may_be_written.get(block_id, sequence.sequence_id) == sequence.sequence_id, sequence

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        num_tokens = sum(len(request.token_ids) + request.sampling.max_tokens for request in self.requests.values())
        for _ in range(20 + 10 * num_tokens * (1 + len(self.requests))):
            if not self.drain_once():
                break
        assert not self.alive(), self.alive()
        load = self.scheduler.load()
        assert (load.running, load.waiting, load.receiving, load.exported) == (0, 0, 0, 0)
        assert (load.held_blocks, load.lent_blocks, load.quarantined_blocks) == (0, 0, 0)
        assert (load.queued_tokens, load.running_context_tokens) == (0, 0)
        assert load.free_blocks == load.total_blocks
        assert self.ended.keys() == self.requests.keys()
        counters = self.scheduler.counters
        assert counters.requests_finished + counters.requests_aborted == len(self.requests)
        assert counters.tokens_generated == sum(map(len, self.emitted.values()))

    def drain_once(self):
        """One round of everything that the outside owes; False once nothing is left to do."""
        for name in list(self.unsettled):
            self.finish_settling(name)
        for sequence in self.alive():
            if sequence.state is State.EXPECTED:
                self.scheduler.announce(sequence.sequence_id)
            elif sequence.state is State.RECEIVING:
                self.finish_landing(sequence)
            elif sequence.state is State.EXPORTED:
                self.finish_release(sequence)
        while self.in_flight:
            self.commit()
        had_work = self.scheduler.has_work()
        self.plan()
        self.books_and_kv_are_right()
        return had_work or bool(self.alive())

    def alive(self):
        return [sequence for name in self.requests if (sequence := self.scheduler.get(name))]

    def pick(self, data, state):
        choice = [sequence for sequence in self.alive() if sequence.state is state]
        return data.draw(st.sampled_from(choice)) if choice else None

    def can_never_run(self, request):
        num_tokens, most = len(request.token_ids), request.num_prompt_tokens + request.sampling.max_tokens
        if request.leg is Leg.PREFILL:
            room = num_tokens
        else:
            room = most
        fits = room <= 24 and room <= self.block_size * self.scheduler.config.num_blocks
        return not fits or request.num_prompt_tokens < 1 or num_tokens >= most

    def runs_elsewhere(self, request):
        """Whether a decode worker would have to compute more than two blocks of a whole request."""
        config = self.scheduler.config
        if config.role is not Role.DECODE or request.leg is not Leg.WHOLE:
            return False
        names = prefix_hashes(request.token_ids, self.block_size, request.cache_salt)
        looks_up = config.settings.prefix_cache and request.sampling.prompt_logprobs is None
        cached = self.block_size * len(self.scheduler.pool.match(names)) if looks_up else 0
        return len(request.token_ids) - cached > 2 * self.block_size

    def next_token(self, sequence):
        """A function of the sequence and the position alone, as sampling is."""
        dice = hash((sequence.arrival_number, len(sequence.token_ids))) % 16
        return STOP_TOKEN if not dice else 1 + dice % 2

    def write(self, sequence, block_ids, start, end):
        for position in range(start, end):
            slots = self.kv[block_ids[position // self.block_size]]
            slots[position % self.block_size] = self.content(sequence, position)

    def content(self, sequence, position):
        return (sequence.request.cache_salt, *sequence.token_ids[: position + 1])

    def assert_kv(self, sequence, num_tokens):
        for position in range(num_tokens):
            block_id = sequence.block_ids[position // self.block_size]
            assert self.kv[block_id][position % self.block_size] == self.content(sequence, position), (
                f"{sequence}: token {position} in block {block_id}"
            )

    def note(self, event):
        sequence = event.sequence
        mine = self.emitted[sequence.sequence_id]
        mine.append(event.token_id)
        already = len(sequence.request.token_ids) + (sequence.landed_s is not None)
        assert sequence.sequence_id not in self.ended
        assert already + len(mine) == len(sequence.token_ids), "a gap or a repeat"
        assert sequence.token_ids[already:] == mine
        if event.finish is not None:
            self.assert_right_finish(sequence, event.finish)
            self.end(sequence, event.finish)

    def assert_right_finish(self, sequence, finish):
        request, num_output = sequence.request, sequence.num_output_tokens
        if finish is FinishReason.STOP:
            assert sequence.token_ids[-1] == STOP_TOKEN
            assert num_output >= request.sampling.min_tokens
        else:
            assert num_output == request.sampling.max_tokens or len(sequence.token_ids) >= 24

    def end(self, sequence, reason):
        assert sequence.sequence_id not in self.ended, "ended twice"
        assert sequence.ended
        self.ended[sequence.sequence_id] = reason

    def finish_landing(self, sequence):
        self.write(sequence, sequence.block_ids, sequence.num_cached_tokens, len(sequence.token_ids))
        self.assert_kv(sequence, len(sequence.token_ids))
        token = self.next_token(sequence)
        assert self.scheduler.land(sequence.sequence_id, token, 0, self.now)
        if sequence.ended:
            self.end(sequence, sequence.finish_reason)

    def finish_release(self, sequence):
        self.assert_kv(sequence, sequence.num_computed_tokens)
        assert self.scheduler.release(sequence.sequence_id, self.now)
        self.end(sequence, sequence.finish_reason)

    def finish_settling(self, name):
        for block_id in self.unsettled.pop(name):
            self.kv[block_id] = ["written late"] * self.block_size
        assert self.scheduler.settle(name)


SchedulerMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
test_any_order_of_events_keeps_books_and_kv_right_and_everything_ends = SchedulerMachine.TestCase
