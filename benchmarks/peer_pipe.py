"""The peers' end of the pipe: JSON lines in, JSON lines out, whatever a library prints goes to stderr.

Owns: the two file descriptors. Runs in the peers' environment, so it needs nothing but Python.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], ready: dict[str, Any]) -> None:
    """Says `ready`, then answers each question until there are no more."""
    _say(ready)
    for line in sys.stdin:
        _say(answer(json.loads(line)))


def _say(message: dict[str, Any]) -> None:
    os.write(_OUT, json.dumps(message).encode() + b"\n")


# Before any library is imported that could print, or start a process that does.
_OUT = os.dup(1)
os.dup2(2, 1)
