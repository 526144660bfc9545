"""The tokens of prompts that nobody reads: numbers such that equal tokens mean equal prefixes.

Owns: the numbering, and the names that blocks get by it. Refuses to know: text, vocabularies, when requests come.

A token's number tells who first had it, and the place of the block that it is in:

    request 7   | shared by all | as the session's request before it | its own           | output
    numbers     | 1 + block     | those of that request              | base of 7 + block | 0, meant as the same

A replayed prompt begins with blocks that have ids; their numbers are below 0, so they meet none of the others.

So the last token of a block names all tokens up to there, and nothing has to be hashed. Of a prompt, only the last
token of each block and of the whole have numbers; the others, at which nobody will ever look, are 0. Blocks that follow
one another have names that do, and lie side by side in every table that is hashed by them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from baton.capacity.workload import Arrival

STRIDE = 2_654_435_761
"""More blocks than a sequence can have. A prime near 2**32 over the golden ratio: what is hashed by a few of
its lowest bits then meets few others, which multiples of a power of two would do all the time."""
OUTPUT_TOKEN = 0
"""Whatever a request generates: its place among the tokens says all that there is to know."""
_MAX_SESSIONS = 8192


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens up to position `end`, from where the one before ends, numbered from `base` on."""

    base: int
    end: int


class Prompts:
    """Makes prompts. Remembers the last prompt of so many sessions; one that has rested longest is begun anew."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._latest: dict[int, tuple[_Stretch, ...]] = {}
        self._made = 0

    def token_ids(self, arrival: Arrival) -> tuple[int, ...]:
        """The prompt's tokens, of which only the last of each block and of all have a meaning."""
        self._made += 1
        stretches = self._stretches(arrival, self._made * STRIDE)
        self._latest[arrival.session] = stretches
        if len(self._latest) > _MAX_SESSIONS:
            del self._latest[next(iter(self._latest))]
        size = self._block_size
        token_ids = [0] * arrival.prompt_tokens
        begin = 0
        for stretch in stretches:
            first, end = begin // size, stretch.end // size  # blocks that end in this stretch
            token_ids[(first + 1) * size - 1 : stretch.end : size] = range(stretch.base + first, stretch.base + end)
            begin = stretch.end
        token_ids[-1] = stretches[-1].base + (arrival.prompt_tokens - 1) // size
        return tuple(token_ids)

    def _stretches(self, arrival: Arrival, base: int) -> tuple[_Stretch, ...]:
        length = arrival.prompt_tokens
        # The last token is always its own, so that what follows it is too.
        shared = min(arrival.shared_tokens, length - 1)
        previous = self._latest.pop(arrival.session, ())
        reused = min(arrival.prefix_tokens, length - 1, previous[-1].end if previous else 0)
        begin: list[_Stretch] = []
        if reused > shared:
            for stretch in previous:
                begin.append(_Stretch(stretch.base, min(stretch.end, reused)))
                if stretch.end >= reused:
                    break
        elif shared:
            begin.append(_Stretch(1, shared))
        elif arrival.blocks:
            # An id stands for its block and all that is before it, as in the traces that have them.
            ends = (min(number * arrival.block_tokens, length - 1) for number in range(1, len(arrival.blocks) + 1))
            begin += [_Stretch(-(block + 1) * STRIDE, end) for block, end in zip(arrival.blocks, ends, strict=True)]
        return (*begin, _Stretch(base, length))


def extend_names(names: list[Hashable], token_ids: Sequence[int], block_size: int, salt: str, adapter: str) -> None:
    """Appends the names of those full blocks of `token_ids` that `names` lacks."""
    known = len(names)
    names.extend(token_ids[(known + 1) * block_size - 1 :: block_size])
    if len(names) == known or names[-1] != OUTPUT_TOKEN:
        return
    for index in range(known, len(names)):
        if names[index] == OUTPUT_TOKEN:
            # The prompt's last token is in this block, or all of it is output.
            block = token_ids[index * block_size : (index + 1) * block_size]
            names[index] = max(block) or _following(names[index - 1])


def _following(name: Hashable) -> int:
    assert isinstance(name, int)
    return name + 1


def block_names(token_ids: tuple[int, ...], block_size: int) -> tuple[Hashable, ...]:
    """The names of all full blocks."""
    names: list[Hashable] = []
    extend_names(names, token_ids, block_size, "", "")
    return tuple(names)
