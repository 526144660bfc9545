"""What a worker computes next: one class for prefill, decode and co-located workers.

Owns: every sequence of the worker from `add` to its end, the block pool, and all decisions about both.
Refuses to know: clocks, devices, wires, and who asks. Time comes in as `now`; decisions go out as values.

There is no prefill phase and no decode phase, only a deficit: a sequence tries to catch up with its number of tokens,
and each step hands out tokens under a budget.

    add, announce, land, release, abort, settle      from the worker, between steps
    plan(now) -> Step                                computed tokens advance here, so that a further step may be planned
    commit(step, result, now) -> events              tokens are appended, full blocks get their names, sequences end

Three rules make every sequence that fits the pool finish. One order, the policy's, rules running, waiting and
preemption, so the first sequence of all is never set back for another. A sequence is admitted only with blocks for all
its known tokens, so whoever runs can compute its prompt. One that finds no block takes it from the last in order that
would free one, never from one ahead of it; if there is none it keeps what it has and skips the step.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from importlib import import_module
from math import inf

from baton.proto.messages import FailureKind, FinishReason, Leg, Request, Role
from baton.proto.settings import SchedulerSettings
from baton.scheduler.blocks import BlockPool, extend_prefix_hashes
from baton.scheduler.flights import StepsInFlight
from baton.scheduler.load import SchedulerCounters, SchedulerLoad
from baton.scheduler.plan import Chunk, Emitted, Progressed, Step, StepResult
from baton.scheduler.queue import RANK, SequenceQueue
from baton.scheduler.sequence import Rank, Sequence, State
from baton.scheduler.stride import Member, Stride

__all__ = ["Refusal", "Scheduler", "SchedulerConfig", "SchedulerCounters", "SchedulerLoad"]

_FIRST: Rank = ()
_LAST: Rank = (inf,)

# Makes a named tuple in half the time of a call of its class; there are two for each token.
_new = tuple.__new__

# Blocks that must stay available for each sequence in flight when one whose output grows is admitted. A preempted
# sequence comes back only when those who stayed can all grow by that much, so it is not thrown out again at once.
LOW_WATER_BLOCKS = 2

# Blocks of a whole request's prompt that a decode worker computes itself, when the prefix cache holds the rest. More is
# a prefill worker's business.
MAX_UNCACHED_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one worker. `settings.policy` is the name of a module in `baton.scheduler.policies`.

    `plans_ahead`: a step is planned while another runs, whose sampled tokens it may compute before anybody knows them.
    `foretold_token`: every sequence samples this one, as in a simulation. Each step is then committed, and commands
    come, before the next is planned, and its chunks are of those only to whom more happens than one further token.
    """

    role: Role
    num_blocks: int
    max_model_len: int
    block_size: int = 16
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    plans_ahead: bool = False
    foretold_token: int | None = None


ExtendNames = Callable[[list[Hashable], Tokens[int], int, str, str], None]
"""Appends the names of the full blocks that the list lacks, of tokens, a block's size, a salt and an adapter."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not taken in."""

    kind: FailureKind
    message: str


class Scheduler:
    """Decides; see the file's docstring. One thread owns it.

    `extend_names` gives full blocks the names that they are found by; equal names must mean equal tokens up to there.
    """

    def __init__(self, config: SchedulerConfig, extend_names: ExtendNames = extend_prefix_hashes) -> None:
        settings = config.settings
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.counters = SchedulerCounters()
        self._extend_names = extend_names
        self._block_size = config.block_size
        self._chunk_limit = settings.long_prefill_token_threshold or sys.maxsize
        self._rank: Callable[[Sequence], Rank] = import_module(f"baton.scheduler.policies.{settings.policy}").order
        self._sequences: dict[str, Sequence] = {}
        self._waiting = SequenceQueue()  # WAITING and PREEMPTED
        self._running = SequenceQueue()  # RUNNING and LANDED
        self._stride: Stride | None = None
        self._attended = self._running.sequences  # those of the running that a plan looks at: all not in stride
        self._had_token: set[Sequence] = set()  # of the attended, those who had one at the last step
        self._filling: list[Member] = []  # those in stride of whom the step in flight completes a block
        self._full: list[Member] = []  # those of whom the last step did, so that they need one more now
        if config.foretold_token is not None:
            assert not config.plans_ahead, "who plans ahead cannot foretell"
            self._stride = Stride(config.foretold_token)
            self._attended = []
        self._landed: list[Sequence] = []
        self._num_receiving = 0
        self._num_exported = 0
        self._num_added = 0
        self._num_planned = 0
        self._queued_tokens = 0
        self._running_context_tokens = 0
        self._in_flight = StepsInFlight()
        self._unsettled: dict[str, list[int]] = {}  # quarantined blocks by the sequence whose pulls may write to them
        self._at_rest = True  # the last plan could do nothing, and nothing has happened since

    def add(self, request: Request, now: float) -> Sequence | Refusal:
        """Takes a request in, or says why it cannot run here."""
        refusal = self._why_never(request)
        if refusal:
            return Refusal(FailureKind.REFUSED, refusal)
        sequence = Sequence(request, self._num_added, now)
        refusal = self._why_elsewhere(sequence)
        if refusal:
            return Refusal(FailureKind.SOURCE_LOST, refusal)
        sequence.max_total_tokens = min(sequence.max_total_tokens, self.config.max_model_len)
        sequence.rank = self._rank(sequence)
        self._num_added += 1
        self._sequences[sequence.sequence_id] = sequence
        self._queued_tokens += sequence.num_queued_tokens
        if self._looks_up(sequence):
            self._hashes(sequence)
        if sequence.state is State.WAITING:
            self._waiting.add(sequence)
            self._at_rest = False
        return sequence

    def announce(self, sequence_id: str) -> bool:
        """The source of an EXPECTED sequence computes it: it may wait for blocks now. False if it is not EXPECTED."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.state is not State.EXPECTED:
            return False
        sequence.move_to(State.WAITING)
        self._waiting.add(sequence)
        self._at_rest = False
        return True

    def land(self, sequence_id: str, next_token: int, num_transferred_tokens: int, now: float) -> bool:
        """All KV of a RECEIVING sequence's `len(token_ids)` tokens is in its blocks. False if it is not RECEIVING.

        `next_token` was sampled, and given to the client, by the prefill leg. If it is the last one, the sequence is
        FINISHED.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.state is not State.RECEIVING:
            return False
        self._num_receiving -= 1
        self._at_rest = False
        sequence.landed_s = now
        sequence.num_transferred_tokens = num_transferred_tokens
        sequence.num_computed_tokens = len(sequence.token_ids)
        self._name_full_blocks(sequence, sequence.num_computed_tokens)
        sequence.token_ids.append(next_token)
        sequence.finish_reason = _finish_reason(sequence, next_token)
        if sequence.finish_reason is not None:
            self._give_back(sequence)
            self._end(sequence, State.FINISHED, now)
            return True
        sequence.move_to(State.LANDED)
        self._landed.append(sequence)
        self._start_running(sequence)
        self._running_context_tokens += sequence.num_computed_tokens
        return True

    def release(self, sequence_id: str, now: float) -> bool:
        """Nobody reads an EXPORTED sequence's blocks any more: it is FINISHED. False if it is not EXPORTED."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.state is not State.EXPORTED:
            return False
        self._num_exported -= 1
        self.pool.reclaim(sequence.block_ids)
        self._give_back(sequence)
        self._end(sequence, State.FINISHED, now)
        return True

    def abort(self, sequence_id: str, now: float) -> Sequence | None:
        """Ends a sequence in whatever state it is; None if there is none.

        Blocks that a pull may still write to stay quarantined until `settle`, blocks that a step in flight may still
        write to until its commit.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        state = sequence.state
        if state is State.WAITING or state is State.PREEMPTED:
            self._waiting.remove(sequence)
        elif state is State.RECEIVING:
            self._num_receiving -= 1
            self._unsettled[sequence_id] = self._quarantine_from(sequence, sequence.num_cached_blocks)
            self._give_back(sequence)
        elif state is State.RUNNING or state is State.LANDED:
            self._stop_running(sequence)
            self._give_back(sequence)
        elif state is State.EXPORTED:
            self._num_exported -= 1
            self.pool.reclaim(sequence.block_ids)
            self._give_back(sequence)
        self._end(sequence, State.ABORTED, now)
        return sequence

    def settle(self, sequence_id: str) -> bool:
        """No pull writes to an aborted sequence's blocks any more. False if there are none."""
        block_ids = self._unsettled.pop(sequence_id, None)
        if block_ids is None:
            return False
        self.pool.settle(block_ids)
        self._at_rest = False
        return True

    def set_aside(self, name: str, num_blocks: int) -> list[int]:
        """Takes blocks out of use until `settle(name)`: at most so many, and at most a quarter of the free ones."""
        taken = self.pool.allocate(min(num_blocks, self.pool.num_free // 4))
        self.pool.quarantine(taken)
        if taken:
            self._unsettled[name] = taken
        return taken

    def get(self, sequence_id: str) -> Sequence | None:
        """The sequence, unless it has ended."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self.write_up(sequence)
        return sequence

    def write_up(self, sequence: Sequence) -> None:
        """Puts down in a sequence what it has got by now; only with a `foretold_token` may it be behind."""
        if self._stride is not None and sequence in self._stride.members:
            self._stride.write_up(sequence)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is here, and no block may be written to by a step or a pull."""
        return not self._sequences and not self.pool.num_quarantined

    def set_role(self, role: Role) -> None:
        """Decides for another role from now on. Only while it is empty; what is cached stays."""
        assert self.is_empty, f"{len(self._sequences)} sequences, {self.pool.num_quarantined} blocks in quarantine"
        self.config = replace(self.config, role=role)

    def has_work(self) -> bool:
        """Whether `plan` might do something now. False once a plan has come out empty, until something happens."""
        return not self._at_rest and bool(self._running.sequences or self._waiting.sequences)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens accepted and not computed yet."""
        return self._queued_tokens

    def load(self) -> SchedulerLoad:
        pool = self.pool
        num_blocks, available = pool.num_blocks, pool.num_available
        lent, quarantined = pool.num_lent, pool.num_quarantined
        num_running = len(self._running.sequences)
        num_holding = num_running + self._num_receiving + self._num_exported
        return SchedulerLoad(
            running=num_running,
            waiting=len(self._sequences) - num_holding,
            receiving=self._num_receiving,
            exported=self._num_exported,
            queued_tokens=self._queued_tokens,
            running_context_tokens=self._running_context_tokens,
            total_blocks=num_blocks,
            free_blocks=available,
            held_blocks=num_blocks - available - lent - quarantined,
            cached_blocks=pool.num_cached,
            lent_blocks=lent,
            quarantined_blocks=quarantined,
        )

    def plan(self, now: float) -> Step:
        """Decides what to compute next: first who runs, in order, then who waits, if no blocks were short."""
        offered = budget = self.config.settings.max_num_batched_tokens
        block_size, ahead, stride = self._block_size, self.config.plans_ahead, self._stride
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        reserved: list[Sequence] = []
        skipped: list[Sequence] = []
        joined: list[Sequence] = []
        short_of_blocks = budget_cut = False
        if stride is not None:
            self._attend(stride)
            budget -= len(stride.members)
        for sequence in self._attended:  # `_grow` may shorten it, but only behind `sequence`
            start = sequence.num_computed_tokens
            end = length = len(sequence.token_ids) + sequence.num_pending_tokens
            if end - start != 1 or not budget:
                end = self._chunk_end(start, length, budget)
                budget_cut = budget_cut or budget < min(length - start, self._chunk_limit)
                if end == start:
                    skipped.append(sequence)
                    continue
            if end > len(sequence.block_ids) * block_size:
                num_in_stride = len(stride.members) if stride is not None else 0
                grown = self._grow(sequence, end, preempted)
                if stride is not None:
                    budget += num_in_stride - len(stride.members)
                if not grown:
                    short_of_blocks = True
                    skipped.append(sequence)
                    continue
            budget -= end - start
            if stride is not None and (num_steps := self._quiet_steps(sequence, end, length)):
                stride.join(sequence, num_steps)
                joined.append(sequence)
                continue
            sequence.num_computed_tokens = end
            chunks.append(_new(Chunk, (sequence, start, end - start, end == length)))
            if ahead and end == length:
                self._look_ahead(sequence, length)
            if sequence.num_queued_tokens:
                self._count_prompt_tokens(sequence, start, end)
        if joined:
            self._attended[:] = [sequence for sequence in self._attended if sequence not in joined]
        if self._landed:
            self._start_landed(now)
        if self._waiting.sequences and not preempted and not short_of_blocks:
            # What rounding to a block's end has left of the budget is no chunk to begin a prompt with.
            self._admit(chunks, reserved, 0 if budget_cut else budget, now)
        return self._planned(chunks, preempted, reserved, skipped, offered)

    def commit(self, step: Step, result: StepResult, now: float) -> list[Emitted | Progressed]:
        """Takes in what a step has computed; passes over sequences that were preempted or aborted since its plan."""
        events: list[Emitted | Progressed] = []
        if not step.num_tokens:
            return events
        flight = self._in_flight.end(step)
        departed = flight.departed
        block_size = self._block_size
        prefill = Leg.PREFILL
        num_sampled = step.num_in_stride
        self._at_rest = False
        if self._stride is not None:
            self._end_stride(self._stride)
        for (sequence, start, num_tokens, samples), token in zip(step.chunks, result.token_ids, strict=True):
            if departed and sequence in departed:
                continue
            end = start + num_tokens
            if num_tokens > 1 or not end % block_size:
                self._name_full_blocks(sequence, end)
            if sequence.leg is prefill:
                events.append(Progressed(sequence, end))
            if not samples:
                continue
            token_ids = sequence.token_ids
            token_ids.append(token)
            if sequence.num_pending_tokens:
                sequence.num_pending_tokens -= 1
            num_sampled += 1
            finish = None
            if token in sequence.stop_token_ids or len(token_ids) >= sequence.max_total_tokens:
                finish = _finish_reason(sequence, token)
            if finish is not None:
                sequence.finish_reason = finish
                self._stop_running(sequence)
                self._give_back(sequence)
                self._end(sequence, State.FINISHED, now)
            elif sequence.leg is prefill:
                self._stop_running(sequence)
                self._num_exported += 1
                sequence.move_to(State.EXPORTED)
                self.pool.lend(sequence.block_ids)
            events.append(_new(Emitted, (sequence, token, finish)))
        self.counters.tokens_generated += num_sampled
        if self._stride is not None:
            self._had_token = {sequence for sequence, _, _, samples in step.chunks if samples}
        if flight.block_ids:
            self.pool.settle(flight.block_ids)
        return events

    def _why_never(self, request: Request) -> str:
        """The reason why a request can never run here; empty if it can."""
        sequence_id, sampling = request.sequence_id, request.sampling
        num_tokens, num_prompt_tokens = len(request.token_ids), request.num_prompt_tokens
        if sequence_id in self._sequences or sequence_id in self._unsettled:
            return f"sequence {sequence_id} is here already"
        if not 0 < num_prompt_tokens <= num_tokens:
            return f"a prompt of {num_prompt_tokens} tokens among {num_tokens}; it must be neither empty nor longer"
        if num_tokens - num_prompt_tokens >= sampling.max_tokens:
            return (
                f"{num_tokens - num_prompt_tokens} output tokens of max_tokens {sampling.max_tokens} are there already"
            )
        if request.leg is Leg.PREFILL:
            most, what = num_tokens, f"{num_tokens} tokens"
        else:
            most = num_prompt_tokens + sampling.max_tokens
            what = f"a prompt of {num_prompt_tokens} tokens and max_tokens {sampling.max_tokens}"
        if most > self.config.max_model_len:
            return f"{what} exceed max_model_len {self.config.max_model_len}"
        if self._num_blocks_for(most) > self.config.num_blocks:
            return f"{what} need {self._num_blocks_for(most)} blocks, the pool has {self.config.num_blocks}"
        return ""

    def _why_elsewhere(self, sequence: Sequence) -> str:
        """The reason why a whole request should not run on a decode worker: too much of its prompt is not in the prefix
        cache. Empty if it should.

        What it finds now may be evicted before it is admitted; it is then computed here, as after a preemption.
        """
        if self.config.role is not Role.DECODE or sequence.leg is not Leg.WHOLE:
            return ""
        length = len(sequence.token_ids)
        hits = self.pool.match(self._hashes(sequence)) if self._looks_up(sequence) else []
        num_uncached = length - len(hits) * self._block_size
        if num_uncached <= MAX_UNCACHED_BLOCKS * self._block_size:
            return ""
        return f"{num_uncached} of {length} tokens are not in the prefix cache of this decode worker"

    def _admit(self, chunks: list[Chunk], reserved: list[Sequence], budget: int, now: float) -> None:
        """Gives blocks to those who wait, in order, until one of them must go on waiting."""
        waiting = self._waiting
        while waiting.sequences and len(self._running) + self._num_receiving < self.config.settings.max_num_seqs:
            sequence = waiting.first
            receives = sequence.leg is Leg.DECODE and sequence.state is State.WAITING
            if not receives and not budget:
                break
            if not self._hold_blocks(sequence, receives):
                break
            waiting.remove(sequence)
            if receives:
                sequence.move_to(State.RECEIVING)
                self._num_receiving += 1
                reserved.append(sequence)
                continue
            sequence.move_to(State.RUNNING)
            if sequence.first_run_s is None:
                sequence.first_run_s = now
            start, length = sequence.num_computed_tokens, len(sequence.token_ids)
            end = self._chunk_end(start, length, budget)
            budget_cut = budget < min(length - start, self._chunk_limit)
            chunks.append(Chunk(sequence, start, end - start, end == length))
            if self.config.plans_ahead and end == length:
                self._look_ahead(sequence, length)
            if sequence.leg is Leg.PREFILL:
                reserved.append(sequence)
            self._start_running(sequence)
            self._running_context_tokens += start
            self._count_prompt_tokens(sequence, start, end)
            sequence.num_computed_tokens = end
            budget = 0 if budget_cut else budget - (end - start)

    def _attend(self, stride: Stride) -> None:
        """Has the plan look at all running sequences to whom something may happen in it.

        Who is in stride has its token set aside before the others get theirs. So all are looked at if they are more
        than the budget, or if one that wants more than one token is ahead of any in stride.

            running, in order    | in stride, and attended ones that want one token each | attended |
                                                                                         whatever they want
        """
        attended = self._attended
        due = stride.due()
        if due or self._full:
            self._go_on(stride, due)
        if len(attended) > 1:
            attended.sort(key=RANK)
        running = self._running.sequences
        crowded = len(running) > self.config.settings.max_num_batched_tokens
        if not stride.members or not (attended or crowded):
            return
        first_behind = len(attended)
        while first_behind and attended[first_behind - 1] is running[first_behind - 1 - len(attended)]:
            first_behind -= 1
        in_the_way = [each for each in attended[:first_behind] if len(each.token_ids) - each.num_computed_tokens != 1]
        if in_the_way or crowded:
            for sequence in list(stride.members):
                stride.leave(sequence)
            attended[:] = running
            self._filling = []

    def _go_on(self, stride: Stride, due: list[Member]) -> None:
        """Has those in stride of whom this step completes a block, or of whom the last one did, stay in it, as far as
        that is the same as looking at each in its turn: up to the first that is looked at anyhow or finds no block.

            tokens     | block, full | block, full | next block
            step               due --^             ^-- one block more
        """
        attended, number = self._attended, stride.num_begun
        full, self._full = [member for member in self._full if not member.is_gone], []
        full.sort(key=RANK)
        due.sort(key=RANK)
        leaving = [member.sequence for member in due if member.last_step == number]
        first = min(map(RANK, attended + leaving), default=_LAST)
        if len(self._running.sequences) > self.config.settings.max_num_batched_tokens:
            first = _FIRST
        num_served = min(bisect_left(full, first, key=RANK), self.pool.num_available)
        for member, block_id in zip(full[:num_served], self.pool.allocate_singly(num_served), strict=True):
            member.sequence.block_ids.append(block_id)
        if unserved := full[num_served:]:
            first = min(first, unserved[0].rank)
            leaving += [member.sequence for member in unserved if member not in due]
        for member in due:
            if member.rank < first:
                stride.stay(member, self._block_size)
                self._filling.append(member)
            elif member.last_step > number:
                leaving.append(member.sequence)
        for sequence in leaving:
            stride.leave(sequence)
        self._had_token.update(leaving)
        attended += leaving

    def _end_stride(self, stride: Stride) -> None:
        """A step is over for those in stride. Any others of it come after them in the order, if a block is full."""
        stride.end_step()
        self._full, self._filling = self._filling, []
        for member in self._full:
            stride.write_up(member.sequence)
            self._name_full_blocks(member.sequence, member.sequence.num_computed_tokens)

    def _quiet_steps(self, sequence: Sequence, end: int, length: int) -> int:
        """In how many steps from this one on, which computes its token `end - 1`, a running sequence gets a token and
        neither completes a block nor ends. Whoever had none at the last step is to be seen getting this one."""
        if end != length or sequence not in self._had_token or self.config.foretold_token in sequence.stop_token_ids:
            return 0
        return min(-end % self._block_size, sequence.max_total_tokens - 1 - length)

    def _look_ahead(self, sequence: Sequence, length: int) -> None:
        """Lets the next step compute the token that this one samples after `length` tokens, if it must come to that.

        A stop token may still end the sequence before: the next step's part in it is then dropped at its commit.
        """
        goes_on = length + 1 < sequence.max_total_tokens and sequence.leg is not Leg.PREFILL
        if goes_on and not sequence.reads_its_output:
            sequence.num_pending_tokens += 1

    def _hold_blocks(self, sequence: Sequence, receives: bool) -> bool:
        """Gives a sequence blocks for all its known tokens and one to come, the prefix cache's first; False if short.

        On a prefill worker nothing grows: a whole request gets blocks for all tokens that it may have.
        A receiving sequence needs no logits, so it may find all its full blocks; others compute their last token.
        """
        pool, length = self.pool, len(sequence.token_ids)
        prefills = self.config.role is Role.PREFILL
        grows = sequence.leg is not Leg.PREFILL and not prefills
        num_reusable = (length if receives else length - 1) // self._block_size
        looks_up = self._looks_up(sequence)
        hits = pool.match(self._hashes(sequence)[:num_reusable]) if looks_up else []
        most = sequence.max_total_tokens if prefills and sequence.leg is not Leg.PREFILL else length + grows
        num_fresh = self._num_blocks_for(most) - len(hits)
        low_water = LOW_WATER_BLOCKS * (len(self._running) + self._num_receiving) if grows else 0
        if num_fresh + pool.count_cached(hits) + low_water > pool.num_available:
            return False
        pool.hold(hits)
        sequence.block_ids = hits + pool.allocate(num_fresh)
        num_hit_tokens = len(hits) * self._block_size
        sequence.num_cached_blocks = len(hits)
        sequence.num_computed_tokens = num_hit_tokens
        if looks_up:
            self.counters.prefix_queries += length
            self.counters.prefix_hits += num_hit_tokens
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = num_hit_tokens
            self.counters.prompt_tokens_cached += num_hit_tokens
        if sequence.num_queued_tokens:
            sequence.num_queued_tokens -= num_hit_tokens
            self._queued_tokens -= num_hit_tokens
        return True

    def _looks_up(self, sequence: Sequence) -> bool:
        """Who is asked for the log-probabilities of its prompt must compute all of it."""
        wants_all_logits = sequence.sampling.prompt_logprobs is not None and sequence.leg is not Leg.DECODE
        return self.config.settings.prefix_cache and not wants_all_logits

    def _chunk_end(self, start: int, length: int, budget: int) -> int:
        """Where the next chunk of tokens [start, length) ends: at a block's end, if it is cut and has one in it.

        start       limit or budget
          |...|.......|..|.....|  length
              ^ block ^ the chunk ends here
        """
        end = start + min(length - start, self._chunk_limit, budget)
        if end < length and end - start >= self._block_size:
            end -= end % self._block_size
        return end

    def _grow(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Gives a running sequence blocks for `num_tokens` tokens, at the cost of those behind it; False if short."""
        num_blocks = self._num_blocks_for(num_tokens) - len(sequence.block_ids)
        while self.pool.num_available < num_blocks:
            victim = self._last_that_frees(sequence)
            if victim is None:
                return False
            self._preempt(victim)
            preempted.append(victim)
        sequence.block_ids.extend(self.pool.allocate(num_blocks))
        return True

    def _last_that_frees(self, ahead: Sequence) -> Sequence | None:
        """The last in order, behind `ahead`, whose preemption would make a block available now."""
        for sequence in reversed(self._running.sequences):
            if sequence is ahead:
                return None
            settled = sequence.block_ids[: self._first_block_in_flight(sequence)]
            if not all(map(self.pool.is_shared, reversed(settled))):
                return sequence
        return None

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks; it waits again, for all its tokens, at its old place in the order."""
        self._stop_running(sequence)
        lost, length = sequence.num_computed_tokens, len(sequence.token_ids)
        self._give_back(sequence)
        sequence.move_to(State.PREEMPTED)
        sequence.num_preemptions += 1
        sequence.num_lost_tokens = max(sequence.num_lost_tokens, min(lost, length))
        sequence.num_pending_tokens = 0
        self._queued_tokens += length - sequence.num_queued_tokens
        sequence.num_queued_tokens = length
        sequence.num_computed_tokens = 0
        sequence.num_cached_blocks = 0
        self.counters.preemptions_recompute += 1
        self._waiting.add(sequence)

    def _start_landed(self, now: float) -> None:
        """Those LANDED that have got their first chunk are RUNNING."""
        for sequence in [each for each in self._landed if each.num_computed_tokens == len(each.token_ids)]:
            sequence.move_to(State.RUNNING)
            sequence.first_run_s = now
            self._landed.remove(sequence)

    def _count_prompt_tokens(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens [start, end) of those that a sequence brought when it began to wait are in a step."""
        sequence.num_queued_tokens -= end - start
        self._queued_tokens -= end - start
        fresh = max(start, min(end, sequence.num_lost_tokens))
        sequence.num_recomputed_tokens += fresh - start
        self.counters.tokens_recomputed += fresh - start
        self.counters.prompt_tokens_computed += max(0, min(end, len(sequence.request.token_ids)) - fresh)

    def _planned(
        self,
        chunks: list[Chunk],
        preempted: list[Sequence],
        reserved: list[Sequence],
        skipped: list[Sequence],
        offered: int,
    ) -> Step:
        num_tokens = sum([chunk[2] for chunk in chunks]) if chunks else 0
        self._num_planned += 1
        num_in_stride = context_tokens = 0
        if (stride := self._stride) is not None and (chunks or stride.members):
            stride.begin_step()
            num_in_stride, context_tokens = len(stride.members), stride.context_tokens
            num_tokens += num_in_stride
        step = Step(self._num_planned, chunks, num_tokens, preempted, reserved, skipped, num_in_stride, context_tokens)
        self._at_rest = not (num_tokens or preempted or reserved)
        if num_tokens:
            self._in_flight.begin(step)
            self._running_context_tokens += num_tokens
            self.counters.steps += 1
            self.counters.budget_tokens_used += num_tokens
            self.counters.budget_tokens_offered += offered
        return step

    def _hashes(self, sequence: Sequence) -> list[Hashable]:
        """The names of all full blocks of a sequence's tokens so far."""
        request = sequence.request
        self._extend_names(
            sequence.prefix_hashes, sequence.token_ids, self._block_size, request.cache_salt, request.adapter
        )
        return sequence.prefix_hashes

    def _name_full_blocks(self, sequence: Sequence, num_computed: int) -> None:
        """Tokens [0, num_computed) have KV: their full blocks may be found by others."""
        full = num_computed // self._block_size
        if full <= sequence.num_cached_blocks or not self.config.settings.prefix_cache:
            return
        known, hashes = sequence.num_cached_blocks, self._hashes(sequence)
        self.pool.register(sequence.block_ids[known:full], hashes[known:full])
        sequence.num_cached_blocks = full

    def _start_running(self, sequence: Sequence) -> None:
        self._running.add(sequence)
        if self._stride is not None:
            self._attended.append(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        """Takes a RUNNING or LANDED sequence from the queue and out of the steps in flight, which may still write.

        block_ids  | full, computed | written by steps in flight |
                     stay its own     quarantined until the last of those steps is committed
        """
        self._running.remove(sequence)
        if self._stride is not None:
            if sequence in self._stride.members:
                self._stride.leave(sequence)
            else:
                self._attended.remove(sequence)
        self._running_context_tokens -= sequence.num_computed_tokens
        if sequence.state is State.LANDED:
            self._landed.remove(sequence)
        first = self._first_block_in_flight(sequence)
        if first < len(sequence.block_ids):
            self._in_flight.leave(sequence, self._quarantine_from(sequence, first))

    def _first_block_in_flight(self, sequence: Sequence) -> int:
        """Index of the first of its blocks that a step in flight writes to; the number of its blocks if none does."""
        first_token = self._in_flight.first_token_of(sequence)
        return len(sequence.block_ids) if first_token is None else first_token // self._block_size

    def _quarantine_from(self, sequence: Sequence, first: int) -> list[int]:
        """Takes the blocks from index `first` on from a sequence, into quarantine."""
        taken = sequence.block_ids[first:]
        del sequence.block_ids[first:]
        self.pool.quarantine(taken)
        return taken

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []

    def _end(self, sequence: Sequence, state: State, now: float) -> None:
        sequence.move_to(state)
        sequence.finished_s = now
        del self._sequences[sequence.sequence_id]
        self._queued_tokens -= sequence.num_queued_tokens
        sequence.num_queued_tokens = 0
        if state is State.FINISHED:
            self.counters.requests_finished += 1
        else:
            sequence.finish_reason = FinishReason.ABORTED
            self.counters.requests_aborted += 1
        self._at_rest = False

    def check(self) -> None:
        """Raises AssertionError unless the books agree with the sequences. Slow: for tests."""
        self.pool.check()
        self._waiting.check()
        self._running.check()
        in_stride: set[Sequence] = set()
        if self._stride is not None:
            self._stride.check()
            in_stride.update(self._stride.members)
        members: dict[State, list[Sequence]] = {state: [] for state in State}
        for sequence in self._sequences.values():
            members[sequence.state].append(sequence)
            self._check_sequence(sequence)
        assert not members[State.FINISHED] + members[State.ABORTED]
        waiting, running = set(self._waiting.sequences), set(self._running.sequences)
        assert waiting == set(members[State.WAITING] + members[State.PREEMPTED])
        assert running == set(members[State.RUNNING] + members[State.LANDED])
        assert running == in_stride.union(self._attended)
        assert len(running) == len(in_stride) + len(self._attended)
        assert set(self._landed) == set(members[State.LANDED])
        assert self._num_receiving == len(members[State.RECEIVING])
        assert self._num_exported == len(members[State.EXPORTED])
        assert len(running) + self._num_receiving <= self.config.settings.max_num_seqs
        assert self._queued_tokens == sum(sequence.num_queued_tokens for sequence in self._sequences.values())
        assert self._running_context_tokens == sum(sequence.num_computed_tokens for sequence in running)
        holders = Counter(block_id for sequence in self._sequences.values() for block_id in sequence.block_ids)
        lenders = Counter(block_id for sequence in members[State.EXPORTED] for block_id in sequence.block_ids)
        assert self.pool.ref_counts() == holders
        assert self.pool.lend_counts() == lenders
        unsettled = sum(map(len, self._unsettled.values()))
        assert unsettled + len(self._in_flight.block_ids()) == self.pool.num_quarantined

    def _check_sequence(self, sequence: Sequence) -> None:
        room = len(sequence.block_ids) * self._block_size
        assert 0 <= sequence.num_pending_tokens <= max(0, len(self._in_flight)), sequence
        assert 0 <= sequence.num_computed_tokens <= len(sequence.token_ids) + sequence.num_pending_tokens, sequence
        if sequence.state in (State.EXPECTED, State.WAITING, State.PREEMPTED):
            assert not sequence.block_ids, sequence
            assert not sequence.num_computed_tokens, sequence
        else:
            assert sequence.num_cached_blocks * self._block_size <= sequence.num_computed_tokens <= room, sequence
        assert len(sequence.token_ids) <= max(sequence.max_total_tokens - 1, len(sequence.request.token_ids)), sequence

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _finish_reason(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Whether and why `token_id`, the sequence's last token, ends it."""
    num_tokens = len(sequence.token_ids)
    if token_id in sequence.stop_token_ids and (
        num_tokens - sequence.num_prompt_tokens >= sequence.sampling.min_tokens
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= sequence.max_total_tokens else None
