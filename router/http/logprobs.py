"""Log-probabilities in the three forms that clients know: completions', chat's, and vLLM's of a prompt.

Owns: those forms, and how a token that is no text is shown. Refuses to know: choices and requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.proto import inference_pb2 as inference
from baton.router.tokenizer import Tokenizer

# JSON has no infinity: what a token has that cannot come.
LEAST = -9999.0


class TokenWords:
    """How the tokens of one vocabulary are shown."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def text_of(self, token_id: int) -> str:
        """The token's text; of part of a character its bytes, so that different tokens look different."""
        return _text(self.bytes_of(token_id))

    def join(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt's tokens, special ones among them."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def chat(self, entry: inference.TokenLogprobs) -> dict[str, Any]:
        top = [self._scored(other.token_id, other.logprob) for other in entry.top]
        return {**self._scored(entry.token_id, entry.logprob), "top_logprobs": top}

    def by_id(self, entry: inference.TokenLogprobs) -> dict[str, Any]:
        """vLLM's form for a prompt's token: the token itself first, then the most likely ones."""
        ranked = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, other in enumerate(entry.top, start=1):
            ranked.setdefault(other.token_id, (other.logprob, rank))
        return {
            str(token_id): {
                "logprob": max(logprob, LEAST),
                "rank": rank,
                "decoded_token": self.text_of(token_id),
            }
            for token_id, (logprob, rank) in ranked.items()
        }

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.bytes_of(token_id)
        return {"token": _text(data), "logprob": max(logprob, LEAST), "bytes": list(data)}


@dataclass
class CompletionLogprobs:
    """The completions' form of one choice, as it grows. Offsets count characters of the choice's text."""

    words: TokenWords
    width: int
    num_chars: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def begin(self, token_id: int) -> None:
        """The first token of a prompt: nothing comes before it that could make it likely."""
        self._place(token_id)
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)

    def extend(self, entries: Iterable[inference.TokenLogprobs]) -> None:
        for entry in entries:
            self._place(entry.token_id)
            self.token_logprobs.append(max(entry.logprob, LEAST))
            top = {self.words.text_of(other.token_id): max(other.logprob, LEAST) for other in entry.top[: self.width]}
            # The chosen token is shown too where it is none of the most likely.
            self.top_logprobs.append({**top, self.tokens[-1]: max(entry.logprob, LEAST)})

    def since(self, start: int) -> dict[str, Sequence[Any]]:
        return {
            "tokens": self.tokens[start:],
            "token_logprobs": self.token_logprobs[start:],
            "top_logprobs": self.top_logprobs[start:],
            "text_offset": self.text_offset[start:],
        }

    def _place(self, token_id: int) -> None:
        data = self.words.bytes_of(token_id)
        # Bytes 10xxxxxx go on with a character that began in an earlier token.
        goes_on = bool(data) and data[0] & 0xC0 == 0x80 and self.num_chars > 0
        self.tokens.append(_text(data))
        self.text_offset.append(self.num_chars - goes_on)
        self.num_chars += sum(byte & 0xC0 != 0x80 for byte in data)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
