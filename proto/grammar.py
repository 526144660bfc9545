"""What router and workers agree on about the grammar library: its bounds, and the thread that it runs in.

Owns: the work that one grammar may cause, and the depth of the stack that the library gets.
Refuses to know: grammars and tokens.

The library recurses along chains of rules. A grammar of a few ten thousand characters overflows an ordinary stack and
so ends the process: the library compiles only in threads made here.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLParserLimits

STACK_BYTES = 512 * 2**20
"""Address space; memory is spent on what is used. Enough for a chain of as many rules as the longest grammar has."""

_START_S = 60.0
_stack_size_lock = threading.Lock()


def parser_limits() -> LLParserLimits:
    """Bounds in the library's own measures; a tenth of its states, as each takes up to 2 kB.

    Large expressions are not expanded ahead of time: that alone takes seconds for a hostile one, within all bounds.
    """
    return LLParserLimits(max_lexer_states=25_000, precompute_large_lexemes=False, verbose_errors=False)


def deep_thread(name: str) -> ThreadPoolExecutor:
    """An executor whose one thread has a stack of STACK_BYTES."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    with _stack_size_lock:
        former = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(int).result(_START_S)  # the thread starts with its first task, and stays
        finally:
            threading.stack_size(former)
    return executor
