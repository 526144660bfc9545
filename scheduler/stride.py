"""Sequences that get one token at every step while nothing else happens to them: nobody looks at them until it does.

Owns: who they are, until which step, and what they have got meanwhile. Refuses to know: what happens to one then.

Only where the sampled tokens are known beforehand, as in a simulation. A member's `num_computed_tokens` and `token_ids`
stay as they were when it joined; `write_up` brings them up to date, `leave` does so for the last time.

    plan:    due, then stay or leave      join(sequence, num_steps)      begin_step
    commit:                                                             end_step
"""

from __future__ import annotations

from baton.scheduler.sequence import Sequence

_SEEN = -1


class Stride:
    """One step at a time: begun by a plan, ended by its commit. `token` is what everybody samples.

    `members` has them, each with what it has computed less the steps begun, which stays the same while it is one; only
    the methods write to it.
    """

    __slots__ = ("_due", "_num_begun", "_num_ended", "_token", "_until", "context_tokens", "members")

    def __init__(self, token: int) -> None:
        self._token = token
        self._num_begun = 0
        self._num_ended = 0
        self.members: dict[Sequence, int] = {}
        self._until: dict[Sequence, int] = {}  # how many steps will have begun when something happens
        self._due: dict[int, list[Sequence]] = {}
        self.context_tokens = 0
        """The sum of what members have computed, the step that has begun included."""

    def due(self) -> list[Sequence]:
        """Those to whom something happens in the step that is planned now. Each is to `stay` or to `leave`."""
        number, until = self._num_begun, self._until
        due = []
        for sequence in self._due.pop(number, ()):
            # Who has left before, and has perhaps joined again, may be in more than one list or in one twice.
            if until.get(sequence) == number:
                until[sequence] = _SEEN
                due.append(sequence)
        return due

    def join(self, sequence: Sequence, num_steps: int) -> None:
        """From the step that is planned now on it has that many steps in which it gets a token and nothing happens."""
        self.members[sequence] = sequence.num_computed_tokens - self._num_begun
        self.context_tokens += sequence.num_computed_tokens
        self.stay(sequence, num_steps)

    def stay(self, sequence: Sequence, num_steps: int) -> None:
        """A member that was due goes on: the next thing to happen to it does so that many steps from now."""
        until = self._num_begun + num_steps
        self._until[sequence] = until
        others = self._due.get(until)
        if others is None:
            self._due[until] = [sequence]
        else:
            others.append(sequence)

    def steps_left(self, sequence: Sequence) -> int:
        """In how many steps from now on a member gets a token that does not end it, between two steps."""
        return sequence.max_total_tokens - 2 - self.members[sequence] - self._num_begun

    def leave(self, sequence: Sequence) -> None:
        """Between two steps, or before the next has begun."""
        assert self._num_begun == self._num_ended, f"{sequence} leaves in the middle of a step"
        self.write_up(sequence)
        del self.members[sequence]
        del self._until[sequence]
        self.context_tokens -= sequence.num_computed_tokens

    def write_up(self, sequence: Sequence) -> None:
        """Puts down in a member what it has got by now."""
        offset, token_ids = self.members[sequence], sequence.token_ids
        sequence.num_computed_tokens = offset + self._num_begun
        token_ids.extend([self._token] * (offset + self._num_ended + 1 - len(token_ids)))

    def begin_step(self) -> None:
        self._num_begun += 1
        self.context_tokens += len(self.members)

    def end_step(self) -> None:
        self._num_ended += 1

    def check(self) -> None:
        """Raises AssertionError if the books are wrong."""
        for sequence in self.members:
            self.write_up(sequence)
            assert self._num_begun <= self._until[sequence], f"{sequence} was due"
            assert sequence in self._due[self._until[sequence]] or self._num_begun == self._until[sequence], sequence
        assert self._until.keys() == self.members.keys()
        assert self.context_tokens == sum(sequence.num_computed_tokens for sequence in self.members)
