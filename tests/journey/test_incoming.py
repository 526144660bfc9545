"""The receiving side's state machine against the lease table of the source, with everything between them late."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.kvtransfer.incoming import Incoming, ProtocolError, WantedPull
from baton.kvtransfer.lease import LeaseTable
from baton.proto.messages import ChunkNotice, HandoffSource

BLOCK = 4
NEXT = 77
SOURCE = HandoffSource("p", "i", "address", "s")


def incoming(num_tokens: int) -> Incoming:
    return Incoming("d", SOURCE, num_tokens, BLOCK)


def notice(num_tokens: int, first_block: int = 0, epoch: int = 1, final: bool = False, **fields) -> ChunkNotice:
    blocks = tuple(range(100 + first_block, 100 + -(-num_tokens // BLOCK)))
    return ChunkNotice("s", epoch, num_tokens, first_block, blocks, final, NEXT if final else 0, **fields)


def read(hand: Incoming) -> WantedPull:
    """One read from its start to a yes."""
    wanted = hand.want()
    assert wanted is not None
    question = hand.finished()
    hand.settled()
    assert question is not None
    assert hand.answer(question.token, lent=True)
    return wanted


def test_only_what_the_prefix_cache_lacks_is_read():
    hand = incoming(10)
    hand.notice(notice(10, final=True))
    hand.reserve((7, 8, 9), 8)
    wanted = read(hand)
    assert (wanted.source_blocks, wanted.destination_blocks) == ((102,), (9,))
    assert hand.complete


def test_a_prompt_that_the_prefix_cache_has_whole_needs_no_read_but_the_final_notice():
    hand = incoming(8)
    hand.notice(notice(4))
    hand.reserve((7, 8, 9), 8)
    assert hand.want() is None
    assert not hand.complete
    hand.notice(notice(8, first_block=1, final=True))
    assert hand.want() is None
    assert hand.complete


def test_a_repeated_older_notice_after_the_final_one_completes_nothing():
    hand = incoming(12)
    hand.reserve((7, 8, 9, 10), 0)
    hand.notice(notice(4))
    read(hand)
    hand.notice(notice(12, first_block=1, final=True))
    hand.notice(notice(4))
    assert not hand.complete
    read(hand)
    assert hand.complete


def test_nothing_lands_before_its_last_read_has_settled():
    hand = incoming(8)
    hand.reserve((7, 8, 9), 0)
    hand.notice(notice(8, final=True))
    hand.want()
    question = hand.finished()
    assert hand.answer(question.token, lent=True)
    assert not hand.complete
    hand.settled()
    assert hand.complete


def test_a_no_voids_the_epoch_and_keeps_what_was_validated():
    hand = incoming(12)
    hand.reserve((7, 8, 9, 10), 0)
    hand.notice(notice(4))
    read(hand)
    hand.notice(notice(12, first_block=1, final=True))
    hand.want()
    question = hand.finished()
    hand.settled()
    assert not hand.answer(question.token, lent=False)
    assert (hand.validated, hand.next_token) == (4, None)
    hand.notice(notice(12, epoch=2, final=True))
    assert read(hand).first_token == 4
    assert hand.complete


def test_an_answer_to_a_question_of_an_older_epoch_validates_nothing():
    hand = incoming(8)
    hand.reserve((7, 8, 9), 0)
    hand.notice(notice(8, final=True))
    hand.want()
    question = hand.finished()
    hand.settled()
    hand.revoke(1)
    hand.notice(notice(8, epoch=2, final=True))
    assert not hand.answer(question.token, lent=True)
    assert hand.validated == 0
    assert hand.want() is not None


def test_a_read_that_spans_a_revocation_is_asked_about_by_nobody_and_done_again():
    hand = incoming(8)
    hand.reserve((7, 8, 9), 0)
    hand.notice(notice(4))
    hand.want()
    hand.revoke(1)
    hand.notice(notice(8, epoch=2, final=True))
    assert hand.want() is None, "the destination is still written to"
    assert hand.finished() is None
    hand.settled()
    assert read(hand).first_token == 0
    assert hand.complete


def test_a_checksum_is_used_only_over_the_very_blocks_that_it_was_made_of():
    whole, part = incoming(8), incoming(8)
    whole.reserve((7, 8, 9), 0)
    part.reserve((7, 8, 9), 4)
    for hand in (whole, part):
        hand.notice(notice(8, final=True, checksum=5))
    assert whole.want().checksum == 5
    assert part.want().checksum == 0


@pytest.mark.parametrize(
    "wrong",
    [
        notice(12),
        notice(7, final=True),
        notice(8, first_block=1),
        ChunkNotice("s", 1, 8, 0, (100,)),
    ],
    ids=["more than the prompt", "final before the end", "a gap", "too few blocks"],
)
def test_what_no_correct_source_sends_fails_the_hand_off(wrong):
    with pytest.raises(ProtocolError):
        incoming(8).notice(wrong)


class HandoffMachine(RuleBasedStateMachine):
    """A source that computes, loses and lends blocks, a destination that reads them, and messages that take their time.

    Notices and revocations travel in one order, answers in another, questions in a third. A read copies block by block
    while the source goes on. What a revoked block holds is garbage from the moment that the source writes to it.
    """

    @initialize(num_tokens=st.integers(1, 5 * BLOCK), cached=st.integers(0, 4), early=st.booleans())
    def begin(self, num_tokens: int, cached: int, early: bool) -> None:
        self.num_tokens = num_tokens
        self.num_blocks = -(-num_tokens // BLOCK)
        self.table = LeaseTable(10.0, BLOCK)
        self.table.open("s", 0.0)
        self.computed = 0
        self.memory: dict[int, str] = {}
        self.blocks: list[int] = []
        self.doomed: list[int] = []
        self.fresh = 0
        self.final = False
        self.notices: deque[ChunkNotice | int | None] = deque()
        self.answers: deque[tuple[int, bool]] = deque()
        self.questions: deque[tuple[int, int]] = deque()
        self.hand = incoming(num_tokens)
        self.cached = min(cached, num_tokens // BLOCK) * BLOCK
        self.reserved = False
        self.subscribed = False
        self.mine: dict[int, str] = {index: f"kv{index}" for index in range(self.cached // BLOCK)}
        self.to_copy: list[tuple[int, int]] = []
        self.reading = self.finished_reading = False
        self.landed = self.failed = False
        self.revocations = 0
        self.lay_out()
        if early:
            self.subscribe()

    def lay_out(self) -> None:
        self.blocks = list(range(self.fresh, self.fresh + self.num_blocks))
        self.fresh += self.num_blocks

    # --- the source

    @rule(amount=st.integers(1, 3 * BLOCK))
    @precondition(lambda self: not self.final and not self.failed)
    def compute(self, amount: int) -> None:
        self.computed = min(self.num_tokens, self.computed + amount)
        for index in range(-(-self.computed // BLOCK)):
            self.memory[self.blocks[index]] = f"kv{index}" if self.is_full(index) else "half"
        self.final = self.computed == self.num_tokens
        told = self.table.publish("s", self.computed, self.blocks, self.final, NEXT if self.final else 0, 0.0)
        if told is not None:
            self.notices.append(told[1])

    def is_full(self, index: int) -> bool:
        return self.computed == self.num_tokens or (index + 1) * BLOCK <= self.computed

    @rule(reused=st.booleans())
    @precondition(lambda self: not self.failed and len(self.table) and self.revocations < 3)
    def preempt(self, reused: bool) -> None:
        self.revocations += 1
        revoked = self.table.revoke("s")
        if revoked is not None:
            self.notices.append(revoked[1])
        self.doomed += self.blocks
        self.computed, self.final = 0, False
        self.lay_out()
        while reused and self.doomed:
            self.overwrite()

    @rule()
    @precondition(lambda self: self.doomed)
    def overwrite(self) -> None:
        self.memory[self.doomed.pop()] = "garbage"

    @rule()
    @precondition(lambda self: self.revocations == 3 and len(self.table))
    def give_up(self) -> None:
        self.close()

    def close(self) -> None:
        if self.table.close("s") is not None:
            self.notices.append(None)
        self.doomed += self.blocks
        self.final = True

    @rule()
    @precondition(lambda self: not self.subscribed)
    def subscribe(self) -> None:
        self.subscribed = True
        told = self.table.subscribe("s", "d", 0.0)
        if isinstance(told, ChunkNotice):
            self.notices.append(told)
        elif told is not None:
            self.notices.append(None)

    @rule()
    @precondition(lambda self: self.questions)
    def answer(self) -> None:
        token, epoch = self.questions.popleft()
        self.answers.append((token, self.table.valid("s", epoch)))

    # --- the destination

    @rule()
    @precondition(lambda self: self.notices and not self.over)
    def hear_notice(self) -> None:
        message = self.notices.popleft()
        if message is None:
            self.failed = True
        elif isinstance(message, int):
            self.hand.revoke(message)
        else:
            self.hand.notice(message)
        self.go_on()

    @rule()
    @precondition(lambda self: self.answers and not self.over)
    def hear_answer(self) -> None:
        self.hand.answer(*self.answers.popleft())
        self.go_on()

    @rule()
    @precondition(lambda self: self.hand.announced and not self.reserved and not self.over)
    def reserve(self) -> None:
        self.reserved = True
        self.hand.reserve(tuple(range(self.num_blocks + 1)), self.cached)
        self.go_on()

    @rule()
    @precondition(lambda self: self.to_copy)
    def copy(self) -> None:
        source, index = self.to_copy.pop()
        self.mine[index] = self.memory.get(source, "nothing")

    @rule()
    @precondition(lambda self: self.reading and not self.to_copy and not self.finished_reading)
    def finish(self) -> None:
        self.finished_reading = True
        question = self.hand.finished()
        if question is not None and not self.over:
            self.questions.append((question.token, question.epoch))

    @rule()
    @precondition(lambda self: self.reading and not self.finished_reading and self.revocations == 3)
    def fail(self) -> None:
        self.to_copy.clear()
        self.finished_reading = self.failed = True

    @rule()
    @precondition(lambda self: self.finished_reading)
    def settle(self) -> None:
        self.reading = self.finished_reading = False
        self.hand.settled()
        self.go_on()

    @rule()
    @precondition(lambda self: self.over)
    def rest(self) -> None:
        """There is always something that may happen."""

    def go_on(self) -> None:
        if self.over:
            return
        if self.hand.complete:
            self.landed = True
            assert self.hand.next_token == NEXT
            assert not self.hand.pulling
            assert self.mine == {index: f"kv{index}" for index in range(self.num_blocks)}
            self.table.acknowledge("s", self.hand.epoch)
            return
        wanted = self.hand.want()
        if wanted is not None:
            assert len(wanted.source_blocks) == len(wanted.destination_blocks)
            self.reading = True
            self.to_copy = list(zip(wanted.source_blocks, wanted.destination_blocks, strict=True))

    @property
    def over(self) -> bool:
        return self.landed or self.failed

    @invariant()
    def validated_tokens_hold_what_the_source_computed(self) -> None:
        for index in range(self.hand.validated // BLOCK if self.reserved else 0):
            assert self.mine[index] == f"kv{index}"

    def teardown(self) -> None:
        """Left in peace, it ends, and nothing reads any more."""
        if not hasattr(self, "hand"):
            return
        while not self.over or self.reading:
            moves = [
                (not self.subscribed, self.subscribe),
                (bool(self.to_copy), self.copy),
                (self.reading and not self.to_copy and not self.finished_reading, self.finish),
                (self.finished_reading, self.settle),
                (bool(self.questions), self.answer),
                (bool(self.answers) and not self.over, self.hear_answer),
                (bool(self.notices) and not self.over, self.hear_notice),
                (self.hand.announced and not self.reserved and not self.over, self.reserve),
                (not self.final and not self.over, lambda: self.compute(BLOCK)),
            ]
            move = next((act for possible, act in moves if possible), None)
            assert move is not None, f"stuck: {vars(self.hand)}"
            move()


HandoffMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
TestHandoff = HandoffMachine.TestCase
