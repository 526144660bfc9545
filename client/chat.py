"""A conversation at the terminal.

Owns: the turns, the commands that begin with a slash, and that Ctrl-C ends an answer but not the conversation.
Refuses to know: how a line is read and shown; both come as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.client.client import Client
from baton.client.errors import BatonError
from baton.client.request import RequestOptions
from baton.client.result import Result

HELP = "/clear begins anew, /exit ends, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True)
class Face:
    """How a conversation meets a person. `ask` raises EOFError at the end of the input."""

    ask: Callable[[], str]
    show: Callable[[str], None]
    note: Callable[[str], None]
    show_result: Callable[[Result], None]
    complain: Callable[[BatonError], None]


def converse(client: Client, face: Face, options: RequestOptions, system: str | None = None) -> None:
    """Talks until the person leaves. A turn that fails is forgotten, so that the next can go on from before it."""
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            line = face.ask().strip()
        except EOFError:
            face.show("\n")
            return
        except KeyboardInterrupt:
            face.note(HELP)
            continue
        if line == "/exit":
            return
        if line == "/clear":
            messages = list(opening)
        elif line.startswith("/"):
            face.note(HELP)
        elif line:
            turn = [*messages, {"role": "user", "content": line}]
            answer = _answer(client, face, turn, options)
            if answer is not None:
                messages = [*turn, {"role": "assistant", "content": answer}]


def _answer(client: Client, face: Face, turn: list[dict[str, str]], options: RequestOptions) -> str | None:
    """The answer as far as it came; None if the turn failed."""
    text = ""
    with client.generate(messages=turn, **options) as generation:
        try:
            for output in generation:
                text += output.text
                face.show(output.text)
            face.show("\n")
            face.show_result(generation.result())
        except KeyboardInterrupt:
            face.show("\n")
            face.note("stopped")
        except BatonError as error:
            face.show("\n" if text else "")
            face.complain(error)
            return None
    return text
