"""Token ids of one output, as they arrive, to text that can be sent at once.

Owns: what may be said already and what must wait (half a character, the beginning of a stop string), and where a stop
string ends the output.
Refuses to know: requests, streams and when an output ends for other reasons.

    token ids --> window of recent tokens --> settled text --> stop matchers --> delta
                  (may end in half a          (never taken     (hold back what may
                   character: wait)            back)            begin a stop string)

Both stages look at one token at a time, so what has been emitted depends on the tokens alone and not on how they were
grouped. That is what makes a resumed output join the earlier one without gap or repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from baton.router.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6
_MAX_WINDOW_TOKENS = 16
# A UTF-8 character has at most four bytes, so the bytes that wait for the rest of theirs lie in the last three tokens.
_TAIL_TOKENS = 4


class Delta(NamedTuple):
    """What a push adds. `num_tokens` of the pushed tokens belong to the output: all of them, unless a stop string was
    completed on the way; `stopped` then names it. The stop string itself is never part of `text`."""

    text: str
    num_tokens: int
    stopped: str | None = None


class Detokenizer:
    """The text of one output. The deltas' sum is the decoded output, up to the first stop string to be completed.

    `prompt_ids` give the first tokens their context (some vocabularies drop a leading space at the start of a text).
    `delivered_ids` are output tokens whose deltas were sent by an earlier attempt: they only set the state. Tokens in
    `stop_token_ids` end an output and have no text. Stop strings completed within the first `min_tokens` tokens are
    plain text. After a delta with `stopped`, nothing more comes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        delivered_ids: Sequence[int] = (),
    ) -> None:
        self._text = _TokenText(tokenizer, prompt_ids)
        self._stops = [_StopMatcher(text) for text in stop]
        self._silent_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._stopped: str | None = None
        self.push(delivered_ids)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the output, if one did."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> Delta:
        if not self._stops:
            if len(token_ids) == 1:
                return Delta("" if token_ids[0] in self._silent_ids else self._text.push(token_ids[0]), 1)
            texts = [self._text.push(token_id) for token_id in token_ids if token_id not in self._silent_ids]
            return Delta("".join(texts), len(token_ids))
        parts: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            if self._stopped is not None:
                return Delta("".join(parts), count - 1, self._stopped)
            self._num_tokens += 1
            if token_id not in self._silent_ids:
                parts.append(self._settle(self._text.push(token_id)))
        return Delta("".join(parts), len(token_ids), self._stopped)

    def flush(self) -> Delta:
        """The rest, when no more tokens come: half a character becomes U+FFFD, the beginning of a stop string text."""
        if self._stopped is not None:
            return Delta("", 0, self._stopped)
        text = self._settle(self._text.flush())
        if self._stopped is None:
            text, self._held = text + self._held, ""
        return Delta(text, 0, self._stopped)

    def _settle(self, text: str) -> str:
        """What of the held and the new text can be emitted. Sets `stopped` if a stop string is completed."""
        if not self._stops or not text:
            return text
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            completed = [matcher.text for matcher in self._stops if matcher.push(character)]
            if completed and self._num_tokens > self._min_tokens:
                self._stopped, self._held = max(completed, key=len), ""
                return buffer[: position - len(self._stopped)]
        cut = len(buffer) - max(matcher.matched for matcher in self._stops)
        self._held = buffer[cut:]
        return buffer[:cut]


class _TokenText:
    """Settled text of a growing list of tokens, by decoding a short window of the last ones.

        tokens:  ... settled ... | context  |   new    |
        window:                  [----------+----------)
        text:                     emitted....|new.....�    the last character may lack bytes: it waits

    The window starts where a character starts, so its text joins what was emitted before. Context stays in it because
    some vocabularies drop the space in front of a window's first word. Byte-level ones do not: there the window is
    empty between characters, and a token that ends with one has its text for itself.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = self._emitted = 0
        if not tokenizer.is_byte_level:
            self._begin(prompt_ids)

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        """Takes the prompt's last tokens for context."""
        tokenizer = self._tokenizer
        # A window that starts within a character spoils the bytes after it too, so it may have to start earlier.
        for num_tokens in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_WINDOW_TOKENS):
            self._window = [token_id for token_id in prompt_ids[-num_tokens:] if tokenizer.has_text(token_id)]
            text = tokenizer.decode(self._window)
            if _REPLACEMENT not in text or num_tokens >= len(prompt_ids):
                break
        if text.endswith(_REPLACEMENT):
            # The prompt ends within a character. The output's bytes are read on their own, not as the rest of it.
            self._window, text = [], ""
        self._num_context = len(self._window)
        self._emitted = len(text)

    def push(self, token_id: int) -> str:
        if not self._window and self._tokenizer.is_byte_level:
            text = self._tokenizer.text_of(token_id)
            if not text.endswith(_REPLACEMENT):
                return text
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(_REPLACEMENT):
            new = text[self._emitted :]
            if new or len(self._window) > _MAX_WINDOW_TOKENS:
                whole = self._tokenizer.is_byte_level
                self._slide(len(self._window) if whole else self._num_context, num_waiting=0)
            return new
        if self._tokenizer.is_byte_level:
            # Bytes that lack their rest show as one replacement character; all before it is settled.
            new = text[self._emitted : -1]
            self._emitted = max(self._emitted, len(text) - 1)
            if len(self._window) > _MAX_WINDOW_TOKENS:
                self._slide(len(self._window) - _TAIL_TOKENS, num_waiting=1)
            return new
        if len(self._window) > _MAX_WINDOW_TOKENS:
            # No character takes so many tokens: these bytes are not text.
            new = text[self._emitted :]
            self._slide(len(self._window) - _TAIL_TOKENS, num_waiting=0)
            return new
        return ""

    def flush(self) -> str:
        text = self._tokenizer.decode(self._window)[self._emitted :]
        self._emitted += len(text)
        return text

    def _slide(self, num_tokens: int, num_waiting: int) -> None:
        """Drops the window's first tokens; of the text of the rest, all but `num_waiting` characters was emitted."""
        del self._window[:num_tokens]
        self._num_context = len(self._window)
        self._emitted = len(self._tokenizer.decode(self._window)) - num_waiting


class _StopMatcher:
    """Finds one string in a stream of characters, each looked at once (Knuth, Morris and Pratt).

    `matched` is the length of the longest suffix of the stream that begins the string and is not all of it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0] * len(text)
        length = 0
        for position in range(1, len(text)):
            while length and text[position] != text[length]:
                length = self._borders[length - 1]
            length += text[position] == text[length]
            self._borders[position] = length

    def push(self, character: str) -> bool:
        """Whether this character completes the string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.text[self.matched] == character
        if self.matched < len(self.text):
            return False
        self.matched = self._borders[-1]
        return True
