"""HTTP as bytes on a plain socket: what a client sends, what comes back, and whether that may be.

Owns: the exchange and the verdict on it. Refuses to know: the server, which is an address, and why somebody would send
such a thing (`rubbish`).

    Shot -> exchange -> Reply -> fault: what is wrong with it, or None
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
from dataclasses import dataclass
from typing import Any

ANSWER_S = 10.0
SILENCE_S = 0.1
JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Shot:
    """What one client does on a connection of its own: sends the pieces, `pause_s` apart, then reads or goes away.

    `answers` is how many answers it is owed; 0 where silence is an answer too, as for half a request. `reads` is how
    many bytes it reads before it goes away, None for all.
    """

    name: str
    pieces: tuple[bytes, ...]
    answers: int = 1
    reads: int | None = None
    pause_s: float = 0.0
    method: str = "POST"

    def __str__(self) -> str:
        sent = b"|".join(self.pieces)
        return f"{self.name}: {sent[:800]!r}" + (f" ... {len(sent)} bytes" if len(sent) > 800 else "")


HEALTH = Shot("health", (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",), method="GET")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """All that came back. `late`: an answer that was owed had not ended after the client's patience."""

    answers: tuple[Answer, ...]
    late: bool = False


# --- the exchange ---------------------------------------------------------------------------------------------------


def connected(address: str, patience_s: float = ANSWER_S) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=patience_s)


def exchange(address: str, shot: Shot, patience_s: float = ANSWER_S) -> Reply:
    """Sends a shot and reads what comes."""
    deadline = time.monotonic() + patience_s
    with connected(address, patience_s) as connection:
        with contextlib.suppress(ConnectionError):  # refused halfway: the answer may be there all the same
            for number, piece in enumerate(shot.pieces):
                if number and shot.pause_s:
                    time.sleep(shot.pause_s)
                connection.sendall(piece)
        if shot.reads is not None:
            with contextlib.suppress(OSError):
                connection.recv(shot.reads) if shot.reads else b""
            return Reply(())
        connection.settimeout(patience_s if shot.answers else SILENCE_S)
        stream = _Stream(connection)
        answers: list[Answer] = []
        late = False
        with contextlib.suppress(http.client.HTTPException, ConnectionError):  # closed: `fault` counts what came
            try:
                while len(answers) < max(shot.answers, 1):
                    answers.append(stream.answer(shot.method))
            except TimeoutError:
                late = shot.answers > 0
        return Reply(tuple(answers), late or (shot.answers > 0 and time.monotonic() > deadline))


class _Stream(io.BufferedReader):
    """What a connection says. `http.client` wants a file of its own for each answer; all get this one."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(socket.SocketIO(connection, "rb"))  # type: ignore[arg-type]

    def makefile(self, _mode: str) -> _Stream:
        return self

    def close(self) -> None:
        """The end of an answer is not the end of the connection."""

    def answer(self, method: str) -> Answer:
        response = http.client.HTTPResponse(self, method=method)  # type: ignore[arg-type]
        response.begin()
        return Answer(response.status, response.getheader("content-type") or "", response.read())


# --- the verdict ----------------------------------------------------------------------------------------------------


def fault(shot: Shot, reply: Reply) -> str | None:
    """What is wrong with a reply, in one sentence; None if nothing is."""
    if reply.late:
        return f"no whole answer within {ANSWER_S:g} s"
    if shot.reads is None and len(reply.answers) < shot.answers:
        return f"{len(reply.answers)} of {shot.answers} answers came before the connection was closed"
    for answer in reply.answers:
        wrong = _wrong(answer, shot.method)
        if wrong is not None:
            return f"{wrong}: {answer.status} {answer.content_type} {answer.body[:400]!r}"
    return None


def _wrong(answer: Answer, method: str) -> str | None:
    if answer.status >= 500 and answer.status != 503:
        return "a server error"
    if b"Traceback" in answer.body:
        return "a traceback"
    if method == "HEAD" or not answer.body:
        return None
    if answer.content_type.startswith("text/event-stream"):
        return _wrong_events(answer.body)
    if not answer.content_type.startswith(JSON_TYPE):
        return None
    try:
        document = _strict(answer.body)
    except ValueError as error:
        return f"not JSON ({error})"
    if answer.status >= 400:
        return _wrong_error(document)
    return None


def _wrong_error(document: Any) -> str | None:
    """The OpenAI API's form of an error."""
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys():
        return "not the form of an error"
    if not error["message"] or not isinstance(error["message"], str):
        return "an error without a message"
    return None


def _wrong_events(body: bytes) -> str | None:
    events = [part for part in body.split(b"\n\n") if part and not part.startswith(b":")]
    if not events or events[-1] != b"data: [DONE]":
        return "a stream without its end"
    for event in events[:-1]:
        if not event.startswith(b"data: "):
            return "a stream with something that is no event"
        document = _strict(event[len(b"data: ") :])
        if "error" in document:
            if (wrong := _wrong_error(document)) is not None:
                return wrong
            if document["error"]["code"] in (500, "internal", "internal_error"):
                return "a server error in a stream"
    return None


def _strict(text: bytes) -> Any:
    """JSON as the standard has it: no NaN, no lone surrogates in what was sent as UTF-8."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text.decode("utf-8"), parse_constant=refuse)
