"""The demo's promises, with small stand-in programs for `baton serve` and `baton generate`.

A stand-in server writes its process ids to a file, so that a test can ask whether anything of it is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from baton.client import demo

PATIENCE = demo.Patience(ready_s=60.0, answer_s=60.0, stop_s=30.0, survivor_s=0.5)

SERVER = """
import os, signal, subprocess, sys, threading, time
stop = threading.Event()
signal.signal(signal.SIGINT, lambda *_: stop.set())
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=DETACH)
with open(PIDS + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(PIDS + ".part", PIDS)
print("starting", flush=True)
BODY
"""
READY = "print('ready  grpc 127.0.0.1:4711  2.5 s after start', flush=True)\n"
CARELESS = READY + "stop.wait()"
TIDY = CARELESS + "; child.kill(); child.wait(); open(PIDS + '.drained', 'w').close()"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(600)"
SILENT = "stop.wait()"
CRASHING = "print('no such model', flush=True); sys.exit(3)"

Serve = Callable[..., list[str]]


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    return tmp_path / "pids"


@pytest.fixture
def serve(pids: Path) -> Serve:
    """Builds the command of a stand-in server that has one child process."""

    def command(body: str, *, detach: bool = False) -> list[str]:
        text = SERVER.replace("BODY", body).replace("DETACH", str(detach)).replace("PIDS", repr(str(pids)))
        return [sys.executable, "-c", text]

    return command


def generate(body: str) -> list[str]:
    return [sys.executable, "-c", body]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent / "src")}


def all_gone(pids: Path, within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    numbers = [int(word) for word in pids.read_text().split()]
    while any(_runs(number) for number in numbers):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_generate_gets_the_address_and_the_server_is_stopped_in_order(serve: Serve, pids: Path) -> None:
    check = f"sys.exit(not os.path.exists({str(pids)!r}) or sys.argv[1:] != ['--address', '127.0.0.1:4711'])"
    answer = generate(f"import os, sys; {check}")
    assert demo.run(serve(TIDY), answer, PATIENCE) == 0
    assert pids.with_suffix(".drained").exists()
    assert all_gone(pids)


def test_the_exit_code_is_that_of_generate(serve: Serve, pids: Path) -> None:
    assert demo.run(serve(TIDY), generate("raise SystemExit(7)"), PATIENCE) == 7
    assert all_gone(pids)


@pytest.mark.parametrize("detach", [False, True], ids=["same session", "own session"])
def test_children_that_the_server_leaves_behind_are_ended(serve: Serve, pids: Path, detach: bool) -> None:
    assert demo.run(serve(CARELESS, detach=detach), generate(""), PATIENCE) == 0
    assert all_gone(pids)


def test_a_server_that_ignores_signals_is_killed(serve: Serve, pids: Path) -> None:
    patience = replace(PATIENCE, stop_s=0.3, survivor_s=0.3)
    assert demo.run(serve(DEAF), generate(""), patience) == 0
    assert all_gone(pids)


def test_a_server_that_exits_early_fails_the_demo_with_its_last_words(
    serve: Serve, pids: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(serve(CRASHING), generate(""), PATIENCE) == 1
    complaint = capfd.readouterr().err
    assert "exited with code 3" in complaint
    assert "no such model" in complaint
    assert all_gone(pids)


def test_a_server_that_never_gets_ready_fails_the_demo(serve: Serve, pids: Path) -> None:
    assert demo.run(serve(SILENT), generate(""), replace(PATIENCE, ready_s=5.0)) == 1
    assert all_gone(pids)


def test_an_answer_that_never_comes_fails_the_demo(serve: Serve, pids: Path) -> None:
    patience = replace(PATIENCE, answer_s=0.5)
    assert demo.run(serve(TIDY), generate("import time; time.sleep(600)"), patience) == 1
    assert all_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_demo_itself_is_ended(serve: Serve, pids: Path, number: signal.Signals) -> None:
    hold = generate("print('generating', flush=True); import time; time.sleep(600)")
    program = (
        "import signal; from baton.client import demo\n"
        "signal.signal(signal.SIGTERM, demo.exit_on_signal)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"demo.run({serve(TIDY)!r}, {hold!r}, demo.Patience())"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
    )
    assert runner.stdout is not None
    for line in runner.stdout:
        if line.startswith("generating"):
            break
    holders = psutil.Process(runner.pid).children()
    try:
        runner.send_signal(number)
        assert runner.wait(60.0) != 0
        assert all_gone(pids)
        assert pids.with_suffix(".drained").exists()
        if number is not signal.SIGKILL:
            assert not any(_runs(holder.pid) for holder in holders)
    finally:
        # `generate` outlives a demo that was killed until its server is gone; this stand-in has no server.
        for holder in holders:
            with contextlib.suppress(psutil.NoSuchProcess):
                holder.kill()


@pytest.mark.cluster
def test_the_real_demo_answers_and_says_where_the_time_went() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton.client.demo"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "hand-off transfer" in done.stdout
