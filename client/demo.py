"""`make demo`: a whole cluster on this machine for one question.

Owns: two commands that a person would type into two terminals, and the promise that nothing of them is left running,
whether the demo ends well, ends badly, is interrupted or is killed.
Refuses to know: what the commands do; it reads the line `ready ... HOST:PORT ...` and exit codes.

    baton serve ... --(prints `ready ...`)--> baton generate ... --> SIGINT to the server, then wait for all of it
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import psutil

QUESTION = "What is the capital of France?"
READY = re.compile(r"ready\b.*?(\S+:\d+)")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each wait may take. The first start converts the model, hence the long `ready_s`."""

    ready_s: float = 600.0
    answer_s: float = 300.0
    stop_s: float = 60.0
    survivor_s: float = 5.0


def main() -> int:
    """Runs the demo; returns the exit code of `baton generate`, or 1 if the server did not get ready."""
    baton = [sys.executable, "-u", "-m", "baton.client.cli"]
    serve = [
        *baton,
        "serve",
        "--prefill",
        "1",
        "--decode",
        "1",
        "--model",
        "demo",
        "--device",
        "cpu",
        "--port",
        "0",
        "--http-port",
        "0",
    ]
    generate = [*baton, "generate", "--chat", QUESTION, "--stream", "--temperature", "0", "--max-tokens", "64"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
    try:
        return run(serve, generate, Patience())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run(serve: Sequence[str], generate: Sequence[str], patience: Patience) -> int:
    """Starts `serve`, asks it with `generate` when it is ready, stops it; returns the exit code of `generate`."""
    _say(serve)
    with _running(serve, patience) as server:
        address = server.wait_until_ready(patience.ready_s)
        if address is None:
            print(server.complaint(patience.ready_s), file=sys.stderr, flush=True)
            return 1
        generate = [*generate, "--address", address]
        _say(generate)
        try:
            return subprocess.run(generate, check=False, timeout=patience.answer_s).returncode
        except subprocess.TimeoutExpired:
            print(f"no answer within {patience.answer_s:g} s", file=sys.stderr, flush=True)
            return 1


class _Server:
    """The server's process and what it prints: shown until it is ready, its last lines kept for a complaint."""

    def __init__(self, command: Sequence[str]) -> None:
        self._tail: deque[str] = deque(maxlen=40)
        self._address: str | None = None
        self._ready = threading.Event()
        # A session of its own: Ctrl-C in the terminal reaches us alone, and we stop the server in order.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_before_exec,
        )
        self._reader = threading.Thread(target=self._read, name="demo-server-output", daemon=True)
        self._reader.start()

    def wait_until_ready(self, within_s: float) -> str | None:
        """The server's address; None once it has exited, or has not become ready in time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and not self._ready.wait(0.1):
            if self.process.poll() is not None:
                self._reader.join(1.0)
                break
        return self._address

    def complaint(self, within_s: float) -> str:
        code = self.process.poll()
        what = f"exited with code {code}" if code is not None else f"was not ready within {within_s:g} s"
        return "\n".join([f"the server {what}; its last lines:", *self._tail])

    def family(self) -> list[psutil.Process]:
        """All processes that descend from the server or live in its session, the server itself not among them."""
        members: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            members = {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if process.pid != self.process.pid and os.getsid(process.pid) == self.process.pid:
                    members[process.pid] = process
        return list(members.values())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._tail.append(line.rstrip())
            if not self._ready.is_set():
                print(f"  {line.rstrip()}", flush=True)
            if self._address is None and (match := READY.match(line)):
                self._address = match.group(1)
                self._ready.set()


@contextlib.contextmanager
def _running(command: Sequence[str], patience: Patience) -> Iterator[_Server]:
    server = _Server(command)
    try:
        yield server
    finally:
        family = server.family()
        try:
            _stop(server.process, patience.stop_s)
        finally:
            server.process.kill()
            _end_survivors([*family, *server.family()], patience.survivor_s)


def _stop(process: subprocess.Popen[str], within_s: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
            return
    print(f"the server did not stop within {2 * within_s:g} s and was killed", file=sys.stderr, flush=True)
    process.kill()
    process.wait(within_s)


def _end_survivors(processes: Sequence[psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(alive, timeout=within_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=within_s)


def _before_exec() -> None:
    """Runs in the server's process before its program starts."""
    # A shell gives its background jobs an ignored SIGINT, which the server would inherit and never hear ours.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # And Linux sends one when this process dies, by SIGKILL too; possibly two, one for each of our threads.
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGINT)


def exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _say(command: Sequence[str]) -> None:
    """Prints the command as a person would type it."""
    words = list(command)
    if "baton.client.cli" in words:
        words = ["baton", *words[words.index("baton.client.cli") + 1 :]]
    print(f"$ {shlex.join(words)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
