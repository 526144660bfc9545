"""The state of one hand-off on the receiving side, as a pure state machine.

Owns: which tokens are known, read and validated, and what to do next. Refuses to know: time, streams, connectors.

    known      tokens [0, k) have KV at the source in the current epoch (notices)
    read       tokens [0, r) have been read, or are being read, into our blocks
    validated  tokens [0, v) were read and the source still owned them afterwards        v <= r <= k (within one epoch)

    notice: k grows    reserve: v = r = cached    pull: r = k    finished: ask    yes: v = what was asked    no: r = v
    complete when the notice was final, v is the whole prompt and no read is unsettled
"""

from __future__ import annotations

from collections import deque

from baton.proto.messages import ChunkNotice, HandoffSource
from baton.proto.value import value


@value
class WantedPull:
    """Whole blocks to read next; `num_tokens` is what will have been read in all after it."""

    epoch: int
    first_token: int
    num_tokens: int
    source_blocks: tuple[int, ...]
    destination_blocks: tuple[int, ...]
    checksum: int
    early: bool


@value
class Question:
    """Asked of the source after a read: is this epoch still lent? A yes validates tokens [0, num_tokens)."""

    token: int
    epoch: int
    num_tokens: int


class ProtocolError(Exception):
    """The source sent what no correct source sends: the hand-off fails, the worker lives."""


class Incoming:
    """One hand-off; see the module's drawing."""

    def __init__(self, sequence_id: str, source: HandoffSource, num_prompt_tokens: int, block_size: int) -> None:
        self.sequence_id = sequence_id
        self.source = source
        self.epoch = 0
        self.announced = False
        self.validated = 0
        self.next_token: int | None = None
        self._num_prompt_tokens = num_prompt_tokens
        self._block_size = block_size
        self._read = 0
        self._pending: deque[ChunkNotice] = deque()
        self._known = 0
        self._blocks: tuple[int, ...] | None = None
        self._pulling: WantedPull | None = None
        self._questions: deque[Question] = deque()
        self._num_questions = 0

    @property
    def complete(self) -> bool:
        if self._blocks is None or self._pulling is not None or self.next_token is None:
            return False
        return self.validated == self._num_prompt_tokens

    @property
    def pulling(self) -> bool:
        """Whether a read has not settled: the destination blocks may still be written to."""
        return self._pulling is not None

    @property
    def num_blocks_reserved(self) -> int:
        return len(self._blocks or ())

    def notice(self, notice: ChunkNotice) -> None:
        """More tokens have KV. A newer epoch voids what was known; what is old or known already is ignored."""
        if notice.epoch < self.epoch:
            return
        if notice.epoch > self.epoch:
            self._forget_epoch(notice.epoch)
        if notice.num_tokens > self._num_prompt_tokens or (
            notice.final and notice.num_tokens != self._num_prompt_tokens
        ):
            raise ProtocolError(
                f"a notice of {notice.num_tokens} tokens for a prompt of {self._num_prompt_tokens} tokens"
            )
        first = notice.first_block * self._block_size
        if first > self._known or (notice.first_block + len(notice.block_ids)) * self._block_size < notice.num_tokens:
            raise ProtocolError(
                f"a notice of {len(notice.block_ids)} blocks from block {notice.first_block} on does not follow "
                f"{self._known} known tokens or does not hold {notice.num_tokens}"
            )
        self.announced = True
        if notice.final:
            self.next_token = notice.next_token
        if notice.num_tokens > self._known:
            self._known = notice.num_tokens
            self._pending.append(notice)

    def reserve(self, blocks: tuple[int, ...], num_cached_tokens: int) -> None:
        """Our blocks for the whole prompt; the first `num_cached_tokens`, whole blocks of them, have KV already."""
        self._blocks = blocks
        self.validated = self._read = num_cached_tokens

    def want(self) -> WantedPull | None:
        """The next read, if one can be made now. One read at a time; notices without checksums are merged."""
        if self._blocks is None or self._pulling is not None:
            return None
        while self._pending and self._pending[0].num_tokens <= self._read:
            self._pending.popleft()
        if not self._pending:
            return None
        notice = self._pending.popleft()
        source, first_known = list(notice.block_ids), notice.first_block
        while self._pending and not notice.checksum and not self._pending[0].checksum:
            notice = self._pending.popleft()
            if notice.first_block < first_known:
                source, first_known = [], notice.first_block
            source[notice.first_block - first_known :] = notice.block_ids
        first, end = self._read // self._block_size, -(-notice.num_tokens // self._block_size)
        whole = first == notice.first_block and end - first == len(notice.block_ids)
        self._pulling = WantedPull(
            epoch=self.epoch,
            first_token=self._read,
            num_tokens=notice.num_tokens,
            source_blocks=tuple(source[first - first_known : end - first_known]),
            destination_blocks=self._blocks[first:end],
            checksum=notice.checksum if whole else 0,
            early=self.next_token is None,
        )
        self._read = notice.num_tokens
        return self._pulling

    def finished(self) -> Question | None:
        """The read has ended well. What to ask the source, unless the epoch has changed meanwhile."""
        pull = self._pulling
        assert pull is not None
        if pull.epoch != self.epoch:
            return None
        self._num_questions += 1
        question = Question(self._num_questions, pull.epoch, pull.num_tokens)
        self._questions.append(question)
        return question

    def settled(self) -> None:
        """The read writes no more."""
        self._pulling = None

    def answer(self, token: int, lent: bool) -> bool:
        """The source's word on a question; returns whether tokens were validated. Unknown answers are ignored."""
        while self._questions and self._questions[0].token <= token:
            question = self._questions.popleft()
            if question.token == token and question.epoch == self.epoch:
                if lent:
                    self.validated = question.num_tokens
                    return True
                self._forget_epoch(self.epoch + 1)
        return False

    def revoke(self, epoch: int) -> None:
        """This epoch and older ones are void; what was validated stays."""
        if epoch >= self.epoch:
            self._forget_epoch(epoch + 1)

    def _forget_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._pending.clear()
        self._questions.clear()
        self._known = 0
        self._read = self.validated
        self.next_token = None
