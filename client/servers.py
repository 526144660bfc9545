"""The kinds of server that a benchmark can be run against: a Baton router by gRPC, any OpenAI-style one by HTTP.

Owns: how each is asked for a number of tokens, and how many tokens a message brings.
Refuses to know: plans, times and summaries (`client.bench`).
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from baton.client.bench import ServedModel
from baton.client.client import AsyncClient
from baton.client.errors import BatonError, ConnectionLost, ConnectionRefused, DeadlineExceeded, NotFound
from baton.client.resume import Patience

# Ids that are ordinary words in every vocabulary in use, where a server does not tell the size of its own.
_COMMON_TOKEN_IDS = range(1_000, 20_000)
_COMMON_MODEL_LEN = 4096


class BadAddress(ValueError):
    """A URL that no server can be behind."""


class GrpcServer:
    """A Baton router. A stream that breaks is an error here, not to be bridged: a benchmark must show it."""

    def __init__(self, target: str, token: str | None, timeout_s: float) -> None:
        self._client = AsyncClient(target, token=token, timeout_s=timeout_s, patience=Patience(give_up_s=0.0))

    async def model(self) -> ServedModel:
        model = await self._client.model()
        return ServedModel(model.name, model.max_model_len, ordinary_token_ids(model.vocab_size))

    async def stream(self, prompt: Sequence[int], output_tokens: int, seed: int) -> AsyncIterator[int]:
        generation = self._client.generate(
            token_ids=prompt, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, seed=seed
        )
        async with generation:
            async for output in generation:
                yield len(output.token_ids)

    async def close(self) -> None:
        await self._client.close()


def ordinary_token_ids(vocab_size: int) -> range:
    """A vocabulary without its ends, where special tokens are."""
    return range(vocab_size // 50, max(vocab_size - vocab_size // 20, vocab_size // 50 + 1))


class OpenAIServer:
    """A server with `/v1/completions`, asked with token ids so that lengths are exact, one connection a request."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadAddress(f"not an http:// or https:// address: {url}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = url
        self._token = token
        self._timeout_s = timeout_s
        self._model_name = ""

    async def model(self) -> ServedModel:
        async with self._exchange("GET", "/v1/models", None) as response:
            found = json.loads(b"".join([part async for part in response.body()]))
        models = found.get("data") or []
        if not models:
            raise NotFound(f"{self._url} serves no model", "NOT_FOUND")
        self._model_name = models[0]["id"]
        return ServedModel(
            self._model_name, models[0].get("max_model_len") or _COMMON_MODEL_LEN, token_ids=_COMMON_TOKEN_IDS
        )

    async def stream(self, prompt: Sequence[int], output_tokens: int, seed: int) -> AsyncIterator[int]:
        question = {
            "model": self._model_name,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        num_tokens = 0
        async with (
            self._exchange("POST", "/v1/completions", question) as response,
            aclosing(response.events()) as events,
        ):
            async for event in events:
                if "error" in event:
                    raise BatonError(str(event["error"]), "STREAM_ERROR")
                counted = (event.get("usage") or {}).get("completion_tokens")
                total = counted if counted is not None else num_tokens + len(event.get("choices", ()))
                yield max(total - num_tokens, 0)
                num_tokens = max(total, num_tokens)

    async def close(self) -> None:
        """Nothing stays open between requests."""

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, question: Mapping[str, Any] | None) -> AsyncIterator[_Response]:
        """One request and its response's head; the connection lasts as long as the block."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
                except OSError as error:
                    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error
                    raise ConnectionRefused(f"no server at {self._url} ({reason})", "UNAVAILABLE") from None
                writer.write(self._head_and_body(method, path, question))
                await writer.drain()
                response = await _Response.read(reader)
                if response.status >= 400:
                    text = b"".join([part async for part in response.body()]).decode(errors="replace")
                    raise BatonError(f"{self._url}: HTTP {response.status}: {text[:500]}", f"HTTP_{response.status}")
                yield response
        except TimeoutError:
            raise DeadlineExceeded(f"no end within {self._timeout_s:g} s", "DEADLINE_EXCEEDED") from None
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionLost(f"lost the connection to {self._url} ({error})", "UNAVAILABLE") from error
        finally:
            if writer is not None:
                writer.close()

    def _head_and_body(self, method: str, path: str, question: Mapping[str, Any] | None) -> bytes:
        body = json.dumps(question).encode() if question is not None else b""
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self._token:
            lines.append(f"Authorization: Bearer {self._token}")
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Response:
        status_line = (await reader.readline()).split()
        if len(status_line) < 2:
            raise ValueError("no HTTP response")
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return cls(int(status_line[1]), headers, reader)

    async def body(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readline()
        elif "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        else:
            while data := await self.reader.read(1 << 16):
                yield data

    async def events(self) -> AsyncGenerator[Any, None]:
        """The JSON of each server-sent event, up to `[DONE]`."""
        rest = b""
        async for part in self.body():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                field, _, value = line.strip().partition(b":")
                if field != b"data":
                    continue
                if value.strip() == b"[DONE]":
                    return
                yield json.loads(value)
