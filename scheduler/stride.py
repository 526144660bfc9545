"""Sequences that get one token at every step while nothing else happens to them: nobody looks at them until it does.

Owns: who they are, until which step, and what they have got meanwhile. Refuses to know: what happens to one then.

Only where the sampled tokens are known beforehand, as in a simulation. A member's `num_computed_tokens` and `token_ids`
stay as they were when it joined; `write_up` brings them up to date, `leave` does so for the last time.

    plan:    due, then stay or leave      join(sequence, num_steps)      begin_step
    commit:                                                             end_step
"""

from __future__ import annotations

from baton.scheduler.sequence import Rank, Sequence

_GONE = -1


class Member:
    """A sequence from its `join` to its `leave`.

    `num_before`: what it has computed less the steps begun, which stays the same. `last_step` and `until_step` are how
    many steps will have begun when it has nothing left to get but the token that ends it, and when something happens.
    """

    __slots__ = ("last_step", "num_before", "rank", "sequence", "until_step")

    def __init__(self, sequence: Sequence, num_begun: int) -> None:
        self.sequence = sequence
        self.rank: Rank = sequence.rank
        self.num_before = sequence.num_computed_tokens - num_begun
        self.last_step = sequence.max_total_tokens - 2 - self.num_before
        self.until_step = num_begun

    @property
    def is_gone(self) -> bool:
        return self.until_step == _GONE


class Stride:
    """One step at a time: begun by a plan, ended by its commit. `token` is what everybody samples.

    `members` is read by whoever likes; only the methods write to it.
    """

    __slots__ = ("_due", "_num_ended", "_token", "context_tokens", "members", "num_begun")

    def __init__(self, token: int) -> None:
        self._token = token
        self.num_begun = 0
        self._num_ended = 0
        self.members: dict[Sequence, Member] = {}
        self._due: dict[int, list[Member]] = {}  # those who have left since may still be in here
        self.context_tokens = 0
        """The sum of what members have computed, the step that has begun included."""

    def due(self) -> list[Member]:
        """Those to whom something happens in the step that is planned now. Each is to `stay` or to `leave`."""
        number = self.num_begun
        return [member for member in self._due.pop(number, ()) if member.until_step == number]

    def join(self, sequence: Sequence, num_steps: int) -> None:
        """From the step that is planned now on it has that many steps in which it gets a token and nothing happens."""
        member = self.members[sequence] = Member(sequence, self.num_begun)
        self.context_tokens += sequence.num_computed_tokens
        self.stay(member, num_steps)

    def stay(self, member: Member, num_steps: int) -> None:
        """A member that was due goes on: the next thing to happen to it does so at most that many steps from now."""
        until = member.until_step = min(self.num_begun + num_steps, member.last_step)
        others = self._due.get(until)
        if others is None:
            self._due[until] = [member]
        else:
            others.append(member)

    def leave(self, sequence: Sequence) -> None:
        """Between two steps, or before the next has begun."""
        assert self.num_begun == self._num_ended, f"{sequence} leaves in the middle of a step"
        self.write_up(sequence)
        self.members.pop(sequence).until_step = _GONE
        self.context_tokens -= sequence.num_computed_tokens

    def write_up(self, sequence: Sequence) -> None:
        """Puts down in a member what it has got by now."""
        num_before, token_ids = self.members[sequence].num_before, sequence.token_ids
        sequence.num_computed_tokens = num_before + self.num_begun
        token_ids += [self._token] * (num_before + self._num_ended + 1 - len(token_ids))

    def begin_step(self) -> None:
        self.num_begun += 1
        self.context_tokens += len(self.members)

    def end_step(self) -> None:
        self._num_ended += 1

    def check(self) -> None:
        """Raises AssertionError if the books are wrong."""
        for sequence, member in self.members.items():
            self.write_up(sequence)
            assert member.sequence is sequence
            assert self.num_begun <= member.until_step <= member.last_step, f"{sequence} was due"
            assert member in self._due[member.until_step] or self.num_begun == member.until_step, sequence
        assert self.context_tokens == sum(sequence.num_computed_tokens for sequence in self.members)
