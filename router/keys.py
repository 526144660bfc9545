"""The keys that clients must show, by whichever face they come.

Owns: the keys' file and the comparison. Refuses to know: headers' and status codes' meaning to clients.

    # comments and empty lines mean nothing
    ci: 5f0c...         a key with a name, which logs and metrics may show
    9b1d...             one without: it is called key-2, for it is the second
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from pathlib import Path

MIN_KEY_CHARS = 8

_NAMED = re.compile(r"([A-Za-z0-9._-]{1,64}):\s+(\S+)")
_KEY = re.compile(r"[!-~]+")


class KeysError(ValueError):
    """A keys' file that cannot be used; the message names it, and never holds a key."""


class Keyring:
    """Keys by name. It holds digests, so that no dump or log can show a key."""

    def __init__(self, keys: dict[str, str]) -> None:
        self._digests = {name: _digest(key) for name, key in keys.items()}

    def name_of(self, authorization: str) -> str | None:
        """Whose key the value of an Authorization header shows; None if it shows none of ours.

        `Bearer KEY`, or `Basic` with the key as the password, which is what browsers can send.
        """
        scheme, _, credentials = authorization.partition(" ")
        key = credentials.strip()
        if scheme.lower() == "basic":
            key = _password(key)
        elif scheme.lower() != "bearer":
            return None
        shown, found = _digest(key), None
        # All are compared, each in constant time: how long it takes tells nothing.
        for name, digest in self._digests.items():
            if hmac.compare_digest(shown, digest):
                found = name
        return found


def read_keys(file: Path) -> Keyring:
    """Raises KeysError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise KeysError(f"the keys' file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeysError(f"the keys' file {file} is not UTF-8 text") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        named = _NAMED.fullmatch(line)
        name, key = (named[1], named[2]) if named else (f"key-{len(keys) + 1}", line)
        if not _KEY.fullmatch(key) or len(key) < MIN_KEY_CHARS:
            bound = f"at least {MIN_KEY_CHARS} visible ASCII characters, alone or behind `name: `"
            raise KeysError(f"line {number} of the keys' file {file} must be a key of {bound}")
        if name in keys or key in keys.values():
            raise KeysError(f"line {number} of the keys' file {file} has a name or key that an earlier line has")
        keys[name] = key
    if not keys:
        raise KeysError(f"the keys' file {file} has no key: nobody could call")
    return Keyring(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode("utf-8", "replace").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""
