"""`baton serve` as a child process: one prefill and one decode worker of the demo model, on ports of its own.

Owns: its start, its addresses, its log, its end. Refuses to know: who asks it what.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

READY = re.compile(r"ready\s+grpc (\S+)\s+http (\S+)")
READY_S = 600.0  # the first start converts the model
STOP_S = 60.0
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready. `logs`: the directory with what its processes wrote."""

    grpc: str
    http: str
    process: subprocess.Popen[str]
    logs: Path

    def router(self) -> psutil.Process:
        """The process that listens on the HTTP port."""
        port = int(self.http.rpartition(":")[2])
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return psutil.Process(connection.pid)
        raise AssertionError(f"nobody listens on {self.http}")

    def warnings(self) -> list[str]:
        """What its processes wrote about trouble that they expected."""
        return [
            f"{file.name}: {line}"
            for file in sorted(self.logs.glob("worker-*.err"))
            for line in file.read_text(errors="replace").splitlines()
            if re.search(r" (WARNING|ERROR|CRITICAL) \S+ baton\.", line)
        ]

    def tracebacks(self) -> list[str]:
        """What its processes wrote about errors that nobody expected, with the lines around each."""
        found = []
        for file in sorted(self.logs.glob("worker-*.err")):
            lines = file.read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                if line.startswith("Traceback") or " CRITICAL " in line:
                    found.append(f"{file.name}:{number + 1}\n" + "\n".join(lines[max(number - 2, 0) : number + 30]))
        return found


@contextmanager
def running(arguments: list[str], directory: Path) -> Iterator[Server]:
    """Serves until the block is left. Raises AssertionError if it does not get ready, or does not end well."""
    command = [sys.executable, "-u", "-m", "baton.client.cli", "serve", *arguments]
    process = subprocess.Popen(
        command,
        env={**os.environ, "RAY_TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    lines: list[str] = []
    said = threading.Event()
    reader = threading.Thread(target=_read, args=(process, lines, said), daemon=True)
    reader.start()
    try:
        grpc, http = _wait_until_ready(process, lines, said)
        yield Server(grpc, http, process, directory / "ray" / "session_latest" / "logs")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode in (0, 130), f"baton serve ended with {process.returncode}: {' '.join(lines[-20:])}"


def _wait_until_ready(process: subprocess.Popen[str], lines: list[str], said: threading.Event) -> tuple[str, str]:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        said.wait(0.5)
        said.clear()
        for line in lines:
            if match := READY.search(line):
                return match[1], match[2]
        assert process.poll() is None, f"baton serve ended: {' '.join(lines[-20:])}"
    raise AssertionError(f"baton serve was not ready after {READY_S:g} s: {' '.join(lines[-20:])}")


def _read(process: subprocess.Popen[str], lines: list[str], said: threading.Event) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        said.set()
    said.set()


def _end_with_parent() -> None:
    """Runs in the child: whatever ends the tests, the server hears Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGINT)
