"""Which tokens may come next in outputs that follow a grammar.

Owns: the grammar library's view of the tokenizer, one matcher a constrained sequence, and the masks of a step.
Refuses to know: schemas and expressions (`router.grammar` has translated them), scores, and who asked.

    constrained rows --begin--> [own thread: find or rebuild matchers -> take in new tokens -> fill masks] --> Limits
                                 meanwhile the model computes

A matcher's state follows from the grammar and the output's tokens, and from nothing else. So matchers are kept only to
save time: where one is missing, because it was dropped or the output began on another worker, it is built from them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from baton.engine.sampler import Mask
from baton.proto.grammar import deep_thread, parser_limits

_KEPT_MATCHERS = 512  # about 10 KiB each, more as its output visits more of the grammar
_KEPT_GRAMMARS = 64


class Constrained(NamedTuple):
    """One row of a step: tokens [num_prompt_tokens, num_tokens) are the output so far, which must follow `grammar`."""

    row: int
    sequence_id: str
    grammar: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_tokens: int
    stop_token_ids: Collection[int]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the constrained rows of a step may go on with. `refused`: rows that nothing can follow, and why."""

    mask: Mask | None
    refused: dict[int, str]


NO_LIMITS = Limits(None, {})


@dataclass(slots=True)
class _Progress:
    """A matcher that has taken in the first `num_taken` output tokens of one sequence's list, which only grows."""

    matcher: LLMatcher
    token_ids: Sequence[int]
    num_taken: int = 0


class Grammars:
    """The matchers of one model. Construction reads the tokenizer, which takes 0.3 s and 60 MiB for 49,000 tokens and
    holds the interpreter's lock: in a worker that serves, its event loop would stand still.

    `vocab_size` is the width of the model's output: ids without text are never allowed. `threads` 0 leaves the
    library's own choice.
    """

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int], threads: int) -> None:
        self._thread = deep_thread("grammars")
        self._executor = LLExecutor(num_threads=threads or None)
        self._limits = parser_limits()
        self._eos_token_ids = eos_token_ids
        self._num_words = (vocab_size + 31) // 32
        self._matchers: OrderedDict[str, _Progress] = OrderedDict()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._unusable = ""
        try:
            text = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        except (OSError, ValueError) as error:
            # Whoever asks for a grammar will hear of it; others can do without.
            self._unusable = f"this model's tokenizer is of no use for grammars: {error}"

    def begin(self, rows: Sequence[Constrained]) -> Future[Limits]:
        """Starts on the limits of a step's constrained rows. The rows' tokens may not change before the result."""
        return self._thread.submit(self._limits_of, rows)

    def _limits_of(self, rows: Sequence[Constrained]) -> Limits:
        refused: dict[int, str] = {}
        followed: list[Constrained] = []
        targets: list[tuple[LLMatcher, int]] = []
        for row in rows:
            matcher = self._advance(row)
            if isinstance(matcher, str):
                refused[row.row] = matcher
                continue
            targets.append((matcher, len(followed)))
            followed.append(row)
        bits = np.zeros((len(followed), self._num_words), dtype=np.int32)
        if followed:
            fill_next_token_bitmask_par(self._executor, targets, bits)
        kept: list[int] = []
        for (matcher, index), row in zip(targets, followed, strict=True):
            self._hide_eos(bits[index], row.stop_token_ids)
            reason = _dead_end(matcher, bits[index])
            if reason:
                refused[row.row] = f"nothing can follow output token {row.num_tokens - row.num_prompt_tokens}: {reason}"
            else:
                kept.append(index)
        while len(self._matchers) > max(_KEPT_MATCHERS, 2 * len(rows)):
            self._matchers.popitem(last=False)
        if not kept:
            return Limits(None, refused)
        return Limits(Mask([followed[i].row for i in kept], torch.from_numpy(bits[kept])), refused)

    def _advance(self, row: Constrained) -> LLMatcher | str:
        """The row's matcher after the output so far, or why there is none."""
        num_output = row.num_tokens - row.num_prompt_tokens
        progress = self._matchers.pop(row.sequence_id, None)
        if progress is None or progress.token_ids is not row.token_ids or progress.num_taken > num_output:
            compiled = self._compile(row.grammar)
            if isinstance(compiled, str):
                return compiled
            progress = _Progress(compiled.deep_copy(), row.token_ids)
        new = list(row.token_ids[row.num_prompt_tokens + progress.num_taken : row.num_tokens])
        taken = progress.matcher.try_consume_tokens(new)
        if taken < len(new):
            return f"output token {progress.num_taken + taken}, id {new[taken]}, does not follow the grammar"
        progress.num_taken = num_output
        self._matchers[row.sequence_id] = progress
        return progress.matcher

    def _compile(self, grammar: str) -> LLMatcher | str:
        """A matcher at the beginning, to be copied; or what is wrong with the grammar."""
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            if self._tokenizer is None:
                return self._unusable
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            return f"the grammar cannot be followed: {_first_line(matcher.get_error())}"
        self._compiled[grammar] = matcher
        if len(self._compiled) > _KEPT_GRAMMARS:
            self._compiled.popitem(last=False)
        return matcher

    def _hide_eos(self, bits_W: np.ndarray[tuple[int], np.dtype[np.int32]], stop_token_ids: Collection[int]) -> None:
        """An id that does not end this output would be followed by itself for ever."""
        for token_id in self._eos_token_ids:
            if token_id not in stop_token_ids:
                bits_W.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def _dead_end(matcher: LLMatcher, bits_W: np.ndarray[tuple[int], np.dtype[np.int32]]) -> str:
    """Why no token can follow; empty if one can. The library lets a matcher that is lost end its output."""
    if matcher.is_error():
        return _first_line(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        return f"the grammar is not complete ({matcher.stop_reason()})"
    return "" if bits_W.any() else "the model has no token for it"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
