"""The kinds of server that a benchmark can be run against: a Baton router by gRPC, any OpenAI-style one by HTTP.

Owns: how each is asked for a number of tokens, and how many tokens a message brings.
Refuses to know: plans, times and summaries (`client.bench`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from baton.client.bench import Message, ServedModel
from baton.client.client import AsyncClient, AsyncGeneration
from baton.client.errors import BatonError, ConnectionLost, ConnectionRefused, DeadlineExceeded, NotFound, Untrusted
from baton.client.resume import Patience
from baton.proto.credentials import ClientTls

# Ids that are ordinary words in every vocabulary in use, where a server does not tell the size of its own.
_COMMON_TOKEN_IDS = range(1_000, 20_000)
_COMMON_MODEL_LEN = 4096
_LINGER_S = 0.5
_CONNECTIONS = 16


class BadAddress(ValueError):
    """A URL that no server can be behind."""


class GrpcServer:
    """A Baton router. A stream that breaks is an error here, not to be bridged: a benchmark must show it.

    It has as many connections as a crowd of clients would have: a router's replicas share connections, not streams.
    """

    def __init__(self, target: str, token: str | None, timeout_s: float, tls: ClientTls | None = None) -> None:
        patience = Patience(give_up_s=0.0)
        self._clients = [
            AsyncClient(target, token=token, tls=tls, timeout_s=timeout_s, patience=patience)
            for _ in range(_CONNECTIONS)
        ]
        self._numbers = itertools.count()

    async def model(self) -> ServedModel:
        model = await self._clients[0].model()
        return ServedModel(model.name, model.max_model_len, ordinary_token_ids(model.vocab_size))

    async def stream(self, prompt: Sequence[int], output_tokens: int, seed: int) -> AsyncIterator[Message]:
        async with self.generation(prompt, output_tokens, seed) as generation:
            num_tokens = 0
            async for output in generation:
                num_tokens += len(output.token_ids)
                yield Message(num_tokens, has_tokens=bool(output.token_ids))

    def generation(self, prompt: Sequence[int], output_tokens: int, seed: int) -> AsyncGeneration:
        return self._clients[next(self._numbers) % _CONNECTIONS].generate(
            token_ids=prompt, max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, seed=seed
        )

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def ordinary_token_ids(vocab_size: int) -> range:
    """A vocabulary without its ends, where special tokens are."""
    return range(vocab_size // 50, max(vocab_size - vocab_size // 20, vocab_size // 50 + 1))


class OpenAIServer:
    """A server with `/v1/completions`, asked with token ids so that lengths are exact. Connections are kept, as those
    of gRPC are, and there are as many as requests at a time."""

    def __init__(self, url: str, token: str | None, timeout_s: float, tls: ClientTls | None = None) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadAddress(f"not an address: {url} ({error})") from None
        if parts.scheme not in ("http", "https") or not host:
            raise BadAddress(f"not an http:// or https:// address: {url}")
        self._host = host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = (tls or ClientTls()).context() if parts.scheme == "https" else None
        self._name = tls.name if tls is not None and tls.name and self._ssl is not None else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = url
        self._token = token
        self._timeout_s = timeout_s
        self._model_name = ""
        self._idle: list[_Connection] = []

    async def model(self) -> ServedModel:
        async with self._exchange("GET", "/v1/models", None) as response:
            found = json.loads(b"".join([part async for part in response.body()]))
        models = found.get("data") if isinstance(found, dict) else None
        if not models:
            raise NotFound(f"{self._url} serves no model", "NOT_FOUND")
        name, max_model_len, vocab_size = (models[0].get(key) for key in ("id", "max_model_len", "vocab_size"))
        if not name:
            raise NotFound(f"{self._url} serves a model without an id", "NOT_FOUND")
        self._model_name = name
        token_ids = ordinary_token_ids(vocab_size) if vocab_size else _COMMON_TOKEN_IDS
        return ServedModel(name, max_model_len or _COMMON_MODEL_LEN, token_ids)

    async def stream(self, prompt: Sequence[int], output_tokens: int, seed: int) -> AsyncIterator[Message]:
        question = {"model": self._model_name, "prompt": list(prompt), **self.settings(output_tokens, seed)}
        num_tokens = 0
        async with (
            self._exchange("POST", "/v1/completions", question) as response,
            aclosing(response.events()) as events,
        ):
            async for event in events:
                if not isinstance(event, dict):
                    raise ValueError("an event that is no object")
                if "error" in event:
                    raise BatonError(str(event["error"]), "STREAM_ERROR")
                before, choices = num_tokens, event.get("choices") or ()
                counted = (event.get("usage") or {}).get("completion_tokens")
                if counted is not None:
                    num_tokens = counted
                elif any(choice.get("text") or not choice.get("finish_reason") for choice in choices):
                    num_tokens += 1
                yield Message(num_tokens, has_tokens=bool(choices) and num_tokens > before)

    def settings(self, output_tokens: int, seed: int) -> dict[str, Any]:
        """What a request says beside its prompt."""
        return {
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            # Some servers take their default from the model's files: every server is to do the same work.
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, question: Mapping[str, Any] | None) -> AsyncIterator[_Response]:
        """One request and its response's head. The connection is this request's as long as the block lasts."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection, response = await self._ask(self._head_and_body(method, path, question))
                try:
                    if response.status >= 400:
                        text = b"".join([part async for part in response.body()]).decode(errors="replace")
                        code = f"HTTP_{response.status}"
                        raise BatonError(f"{self._url}: HTTP {response.status}: {text[:500]}", code)
                    yield response
                finally:
                    if response.keeps_connection:
                        self._idle.append(connection)
                    else:
                        connection.close()
        except TimeoutError:
            raise DeadlineExceeded(f"no end within {self._timeout_s:g} s", "DEADLINE_EXCEEDED") from None
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionLost(f"lost the connection to {self._url} ({error})", "UNAVAILABLE") from error

    async def _ask(self, message: bytes) -> tuple[_Connection, _Response]:
        """Sends a request on a kept connection, or else on a new one: a server may have closed what was idle."""
        while self._idle:
            kept = self._idle.pop()
            try:
                return kept, await kept.ask(message)
            except (OSError, asyncio.IncompleteReadError):
                pass
        try:
            streams = await asyncio.open_connection(self._host, self._port, ssl=self._ssl, server_hostname=self._name)
            connection = _Connection(*streams)
        except ssl.SSLError as error:
            raise Untrusted(f"no TLS with {self._url} ({error.reason or error})", "UNAVAILABLE") from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error
            raise ConnectionRefused(f"no server at {self._url} ({reason})", "UNAVAILABLE") from None
        return connection, await connection.ask(message)

    def _head_and_body(self, method: str, path: str, question: Mapping[str, Any] | None) -> bytes:
        body = json.dumps(question).encode() if question is not None else b""
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {f'[{self._host}]' if ':' in self._host else self._host}:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self._token:
            lines.append(f"Authorization: Bearer {self._token}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class _Connection:
    """A connection that outlives its requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, message: bytes) -> _Response:
        """Sends a request; returns when the head of its response is there. Closed if that does not come."""
        try:
            self._writer.write(message)
            await self._writer.drain()
            return await _Response.read(self._reader)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._writer.close()


class _Response:
    """`is_over`: the body has been read to its end, so the connection is free for another request."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.is_over = False
        self._headers = headers
        self._reader = reader

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Response:
        line = await reader.readline()
        if not line:
            raise asyncio.IncompleteReadError(b"", None)
        version, _, rest = line.decode("latin-1").partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError("no HTTP response")
        return cls(int(rest.split()[0]), await _headers(reader), reader)

    @property
    def keeps_connection(self) -> bool:
        return self.is_over and self._headers.get("connection", "").lower() != "close"

    async def body(self) -> AsyncGenerator[bytes, None]:
        if self._headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readline()).split(b";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readline()
            await _headers(self._reader)
        elif "content-length" in self._headers:
            yield await self._reader.readexactly(int(self._headers["content-length"]))
        else:
            while data := await self._reader.read(1 << 16):
                yield data
            return
        self.is_over = True

    async def events(self) -> AsyncGenerator[Any, None]:
        """The JSON of each server-sent event, up to `[DONE]`. What follows that is passed over, if it comes at once."""
        rest = b""
        async with aclosing(self.body()) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    field, _, value = line.strip().partition(b":")
                    if field != b"data":
                        continue
                    if value.strip() == b"[DONE]":
                        await _exhaust(parts)
                        return
                    yield json.loads(value)


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    """Header or trailer lines, with the empty one that ends them."""
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return headers


async def _exhaust(parts: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(_LINGER_S):
            async for _ in parts:
                pass
    except TimeoutError:
        pass
