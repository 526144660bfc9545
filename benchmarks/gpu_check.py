"""What benchmarks/gpu_check.sh runs: tests of every kernel, their speed, and an 8B-shaped model through the engine.

    kernels     TB/s or TFLOP/s that each achieves, as part of what a copy and a matrix product achieve in the same run,
                and beside torch (scaled_dot_product_attention on dense tensors; the plain kernels for the rest)
    hand-off    KV from one process to another by NIXL, as part of what bare NIXL achieves
    model       prefill and decode steps of a random 8B-shaped model, decode as recorded graphs

With --dry-run nothing is measured: every case runs once at a small shape and is compared with its reference.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from gpu_cases import Case, Result, cases
from triton import knobs
from triton_interpreter import compute_bfloat16_exactly

from baton.kvtransfer.connector import ConnectorError
from baton.proto.settings import TransferSettings

_TESTS_S = 240
_TEST_PROCESSES = 12  # what takes time is compiling, and that is one core each


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: `part` of the copy's or the product's rate, and torch's time over the kernel's."""

    name: str
    verdict: str
    milliseconds: float | None = None
    rate: str = ""
    part: float | None = None
    times_torch: float | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU, in Triton's interpreter")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--skip-tests", action="store_true", help="speed only")
    parser.add_argument("--skip-handoff", action="store_true", help="without NIXL")
    parser.add_argument("--skip-model", action="store_true", help="kernels only")
    arguments = parser.parse_args()
    if arguments.dry_run != knobs.runtime.interpret:
        parser.error("--dry-run needs TRITON_INTERPRET=1, and only that: run benchmarks/gpu_check.sh")
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU: --dry-run does without")
    started = time.monotonic()
    lines: list[Line] = []
    if arguments.dry_run:
        compute_bfloat16_exactly()
        lines += [_compared(case) for case in cases(torch.device("cpu"), small=True)]
    else:
        if not arguments.skip_tests:
            lines += [_tests("on_device.py"), _tests("on_device_sampler.py")]
        lines += _measured(cases(torch.device("cuda"), small=False))
    if not arguments.skip_handoff:
        lines += _handoff(arguments.dry_run)
    if not arguments.skip_model:
        lines += _model(arguments.dry_run)
    print(_table(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": _machine(), "seconds": time.monotonic() - started, "lines": [asdict(line) for line in lines]}
    (arguments.out / "gpu_check.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(any(line.verdict.startswith("FAIL") for line in lines))


def _tests(name: str) -> Line:
    """The kernels' own tests, on the GPU: a failure is printed with what pytest says."""
    command = [sys.executable, "-m", "pytest", f"tests/kernels/{name}", "-q", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(_TEST_PROCESSES, os.cpu_count() or 1))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TESTS_S, check=False)
    except subprocess.TimeoutExpired:
        return Line(f"tests: {name}", f"FAIL: not done after {_TESTS_S} s")
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:])
    return Line(f"tests: {name}", "FAIL" if done.returncode else "ok")


def _compared(case: Case) -> Line:
    difference = case.compare()
    return Line(case.name, "ok" if difference <= case.tolerance else f"FAIL: off by {difference:.3g}")


def _measured(found: Sequence[Case]) -> list[Line]:
    """Times with a cold cache. The first two cases are the copy and the matrix product that the rest is set against."""
    lines: list[Line] = []
    copied = multiplied = 0.0
    for case in found:
        result = _time(case.kernel)
        bytes_s, flop_s = case.num_bytes / result.seconds, case.flop / result.seconds
        copied, multiplied = copied or bytes_s, multiplied or flop_s
        by_memory = case.num_bytes / copied >= (case.flop / multiplied if multiplied else 0.0)
        other = _time(case.torch).seconds if case.torch else None
        difference = case.compare() if case.torch else 0.0
        lines.append(
            Line(
                case.name,
                "ok" if difference <= case.tolerance else f"FAIL: off by {difference:.3g}",
                result.seconds * 1e3,
                f"{bytes_s / 1e12:.2f} TB/s" if by_memory else f"{flop_s / 1e12:.0f} TFLOP/s",
                bytes_s / copied if by_memory else flop_s / multiplied,
                other / result.seconds if other else None,
            )
        )
    return lines


def _time(call: Callable[[], object]) -> Result:
    milliseconds = triton.testing.do_bench(call, warmup=20, rep=150, return_mode="median")
    return Result(milliseconds / 1e3)


def _model(dry_run: bool) -> list[Line]:
    try:
        from gpu_model import EIGHT_BILLION, TINY, measure, write_checkpoint
    except ModuleNotFoundError as missing:
        return [Line("model", f"FAIL: needs {missing.name}, as in requirements.lock")]
    shape = TINY if dry_run else EIGHT_BILLION
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape)
        speeds = measure(Path(folder), shape, "cpu" if dry_run else "cuda", rounds=1 if dry_run else 10)
    return [Line(f"model: {s.name}", "ok", s.step_ms, f"{s.tokens_s:.0f} tokens/s") for s in speeds]


def _handoff(dry_run: bool) -> list[Line]:
    """KV from one process's pool to another's by the NIXL connector: both on the GPU, or both on the CPU."""
    from kv_pull import between_processes

    settings = TransferSettings(connector="nixl")
    mib, rounds, device = (2, 1, "cpu") if dry_run else (1024, 7, "cuda")
    try:
        results = between_processes(settings, mib, [1, 64], rounds, device)
    except (ConnectorError, RuntimeError, TimeoutError) as error:
        return [Line("hand-off", f"FAIL: {error}")]
    return [
        Line(
            f"hand-off: {mib} MiB, {device} to {device}, runs of {result.run_blocks}",
            "ok",
            mib * 2**20 / result.pull_gb_s / 1e6,
            f"{result.pull_gb_s:.2f} GB/s",
            result.pull_gb_s / result.raw_gb_s,
        )
        for result in results
    ]


def _table(lines: Sequence[Line]) -> str:
    rows = ["| what | verdict | ms | rate | part of limit | x torch |", "|---|---|---:|---:|---:|---:|"]
    for line in lines:
        cells = [
            line.name,
            line.verdict,
            "" if line.milliseconds is None else f"{line.milliseconds:.3f}",
            line.rate,
            "" if line.part is None else f"{line.part:.0%}",
            "" if line.times_torch is None else f"{line.times_torch:.2f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _machine() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: interpreter"
    return {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
