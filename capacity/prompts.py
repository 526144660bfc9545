"""The tokens of prompts that nobody reads: numbers such that equal tokens mean equal prefixes.

Owns: the numbering, and the names that blocks get by it. Refuses to know: text, vocabularies, when requests come.

A token's number tells who first had it, and its position:

    request 7          | shared by all | session's request before | its own                 |
                       0 ...           0 + position               number + position  ... one more for each output token

So the last token of a block names all tokens up to there, and nothing has to be hashed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from baton.capacity.workload import Arrival

STRIDE = 1 << 28
"""More positions than a sequence can have."""
_MAX_SESSIONS = 8192


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens up to position `end`, from where the one before ends, numbered from `base` on."""

    base: int
    end: int


class Prompts:
    """Makes prompts. Remembers the last prompt of so many sessions; one that has rested longest is begun anew."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[_Stretch, ...]] = {}
        self._made = 0

    def token_ids(self, arrival: Arrival) -> tuple[int, ...]:
        self._made += 1
        stretches = self._stretches(arrival, self._made * STRIDE)
        self._latest[arrival.session] = stretches
        if len(self._latest) > _MAX_SESSIONS:
            del self._latest[next(iter(self._latest))]
        if len(stretches) == 1:
            return tuple(range(stretches[0].base, stretches[0].base + stretches[0].end))
        token_ids: list[int] = []
        for stretch in stretches:
            token_ids.extend(range(stretch.base + len(token_ids), stretch.base + stretch.end))
        return tuple(token_ids)

    def _stretches(self, arrival: Arrival, base: int) -> tuple[_Stretch, ...]:
        length, shared = arrival.prompt_tokens, min(arrival.shared_tokens, arrival.prompt_tokens)
        previous = self._latest.pop(arrival.session, ())
        reused = min(arrival.prefix_tokens, length, previous[-1].end if previous else 0)
        begin: list[_Stretch] = []
        if reused > shared:
            for stretch in previous:
                begin.append(_Stretch(stretch.base, min(stretch.end, reused)))
                if stretch.end >= reused:
                    break
        elif shared:
            begin.append(_Stretch(0, shared))
        if not begin or begin[-1].end < length:
            begin.append(_Stretch(base, length))
        return tuple(begin)


def next_token(token_id: int) -> int:
    """The output token after a token of the same request."""
    return token_id + 1


def extend_names(names: list[Hashable], token_ids: Sequence[int], block_size: int, salt: str, adapter: str) -> None:
    """Appends the names of those full blocks of `token_ids` that `names` lacks."""
    names.extend(token_ids[(len(names) + 1) * block_size - 1 :: block_size])


def block_names(token_ids: tuple[int, ...], block_size: int) -> tuple[Hashable, ...]:
    """The names of all full blocks."""
    return token_ids[block_size - 1 :: block_size]
