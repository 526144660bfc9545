"""`make test-clients`: starts a server, has every client of docs/clients.md work with it, and prints how that went.

Owns: the order, the table, the exit code. Refuses to know: what a client does (`catalogue`) and how a server is started
(`server`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from clients.catalogue import CLIENTS, run
from clients.fuzz import fuzz, wait_until_at_rest
from clients.install import HERE, install
from clients.server import Server, running
from rich.console import Console
from rich.table import Table

from baton.engine.checkpoint import resolve_model

SERVE = ["--prefill", "1", "--decode", "1", "--model", "demo", "--device", "cpu", "--port", "0", "--http-port", "0"]
MAX_WARNINGS = 50


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    fault: str
    said: str
    took_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(description="Has clients that others wrote work with a server.")
    parser.add_argument("clients", nargs="*", help=f"which of them: {', '.join(names)}, fuzz (default: all)")
    parser.add_argument("--requests", type=int, default=10_000, help="how many the fuzz sends (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave what clients and server wrote where it is")
    options = parser.parse_args(arguments)
    wanted = options.clients or [*names, "fuzz"]
    if unknown := set(wanted) - {*names, "fuzz"}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    for client in CLIENTS:
        if client.venv and client.name in wanted:
            install(client.venv)
    tokenizer = resolve_model("demo")
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="clients-"))
        if options.keep:
            print(f"results in {directory}", flush=True)
        else:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        with running(SERVE, directory) as server:
            print(f"http {server.http}  grpc {server.grpc}", flush=True)
            outcomes = [
                _try(client.name, server, lambda client=client: run(client, server, tokenizer, directory / client.name))
                for client in CLIENTS
                if client.name in wanted
            ]
            if "openai" in wanted:
                outcomes.append(_try("openai, more", server, lambda: _openai_sdk(server)))
            if "fuzz" in wanted:
                outcomes.append(_try("fuzz", server, lambda: fuzz(server, options.requests, options.seed)))
        outcomes.append(_try_log(server))
        failed = [outcome for outcome in outcomes if outcome.fault]
        if failed:
            print(*server.warnings()[-MAX_WARNINGS:], sep="\n")
    _print(outcomes)
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _try(name: str, server: Server, work: Callable[[], str]) -> Outcome:
    """Runs one client. Whatever it did, the server must then have nothing left of it."""
    print(f"  {name} ...", flush=True)
    began_s, said, fault = time.monotonic(), "", ""
    try:
        said = work()
        wait_until_at_rest(server)
    except (AssertionError, subprocess.TimeoutExpired, LookupError, OSError, ValueError) as error:
        fault = f"{type(error).__name__}: {error}"
        print(f"  {name} failed: {fault}", flush=True)
    return Outcome(name, fault, said, time.monotonic() - began_s)


def _try_log(server: Server) -> Outcome:
    tracebacks = server.tracebacks()
    for traceback in tracebacks:
        print(traceback)
    return Outcome("the server's log", f"{len(tracebacks)} tracebacks" if tracebacks else "", "no traceback", 0.0)


def _openai_sdk(server: Server) -> str:
    done = subprocess.run(
        [sys.executable, str(HERE / "openai_sdk.py")],
        env={**os.environ, "BASE_URL": f"http://{server.http}/v1"},
        capture_output=True,
        text=True,
        timeout=600.0,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return f"{done.stdout.count('ok ')} kinds of calls"


def _print(outcomes: Sequence[Outcome]) -> None:
    table = Table("client", "result", "s", "what it said")
    for outcome in outcomes:
        said = outcome.fault.splitlines()[0] if outcome.fault else outcome.said
        table.add_row(outcome.name, "FAILED" if outcome.fault else "ok", f"{outcome.took_s:.0f}", said)
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
