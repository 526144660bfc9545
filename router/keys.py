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
import logging
import re
from pathlib import Path

log = logging.getLogger(__name__)

MIN_KEY_CHARS = 8

_NAMED = re.compile(r"([A-Za-z0-9._-]{1,64}):\s+(\S+)")
_KEY = re.compile(r"[!-~]+")


class KeysError(ValueError):
    """A keys' file that cannot be used; the message names it, and never holds a key."""


class Keyring:
    """Keys by name. It holds digests, so that no dump or log can show a key."""

    def __init__(self, keys: dict[str, str]) -> None:
        self._digests = _digests(keys)

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


class KeysFile(Keyring):
    """The keys in a file, read again when it has changed: a key that is taken out of it opens nothing any more.

    Raises KeysError for a file that cannot be used; one that is so later on is logged, and the former keys stay.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.expanduser()
        self._changed_ns = self._when()
        super().__init__(read_keys(file))

    def name_of(self, authorization: str) -> str | None:
        changed_ns = self._when()
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            try:
                self._digests = _digests(read_keys(self._file))
            except KeysError as error:
                log.error("the former keys stay in use: %s", error)
            else:
                log.info("the keys' file %s was read again", self._file)
        return super().name_of(authorization)

    def _when(self) -> int:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return 0


def read_keys(file: Path) -> dict[str, str]:
    """Keys by name. Raises KeysError."""
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
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
    return keys


def _digests(keys: dict[str, str]) -> dict[str, bytes]:
    return {name: _digest(key) for name, key in keys.items()}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode("utf-8", "replace").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""
