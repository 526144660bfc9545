"""How a command is let in by a router: its bearer token, and the certificates of a connection by TLS.

Owns: the options that all commands share for it, and where a token may come from. Refuses to know: calls.

A token on the command line can be read by everybody on the machine, in `ps` and in the shell's history: it comes from a
file or from BATON_TOKEN.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.proto.credentials import ClientTls, is_loopback

VARIABLE = "BATON_TOKEN"


class AccessError(OSError):
    """A token or a combination of options that cannot be used; the message is for a person."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help=f"a file with a bearer token (default: the variable {VARIABLE})"
    )
    parser.add_argument("--token", help=argparse.SUPPRESS)
    parser.add_argument("--tls", action="store_true", help="connect by TLS, and trust public authorities")
    parser.add_argument("--tls-ca", metavar="FILE", help="connect by TLS, and trust the authorities in this file")
    parser.add_argument("--tls-cert", metavar="FILE", help="a certificate to show, with --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", help="its key")
    parser.add_argument("--tls-name", metavar="NAME", help="the router's name in its certificate, if not its host")


def token_of(options: argparse.Namespace) -> str | None:
    """The token to send; None for none. Raises AccessError."""
    token: str | None = options.token
    if token is not None:
        print(
            f"baton: warning: --token shows the token to everybody on this machine: use --token-file or {VARIABLE}",
            file=sys.stderr,
        )
    elif options.token_file is not None:
        try:
            token = options.token_file.expanduser().read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise AccessError(f"{options.token_file} is not UTF-8 text") from error
        if not token:
            raise AccessError(f"{options.token_file} is empty, must hold a token")
    else:
        token = os.environ.get(VARIABLE, "").strip() or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise AccessError("the token must be one line of visible ASCII characters")
    return token


def without_token(words: Sequence[str]) -> list[str]:
    """A command line as it may be shown."""
    shown = [word if not word.startswith("--token=") else "--token=..." for word in words]
    return [word if before != "--token" else "..." for before, word in zip(["", *shown], shown, strict=False)]


def tls_of(options: argparse.Namespace) -> ClientTls | None:
    """None for plain text. Raises AccessError."""
    named = (options.tls_ca, options.tls_cert, options.tls_key, options.tls_name)
    if not options.tls and not any(named):
        return None
    if bool(options.tls_cert) != bool(options.tls_key):
        raise AccessError("--tls-cert and --tls-key go together")
    return ClientTls(*(value or "" for value in named))


def warn_of_plain_text(token: str | None, tls: ClientTls | None, target: str) -> None:
    """A token that leaves the machine unencrypted is anybody's on the way."""
    host = target.rpartition(":")[0].strip("[]")
    if token is not None and tls is None and not is_loopback(host):
        print(f"baton: warning: the token goes to {target} in plain text: see --tls and --tls-ca", file=sys.stderr)
