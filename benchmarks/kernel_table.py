"""Compiles every Triton kernel for GPUs that need not be there, and tells what each takes of a processor.

The launchers themselves are called, on CPU tensors; in place of a launch, what would be launched is compiled for sm_80,
sm_90 and gfx942. So the table shows the very code that runs on such a GPU: same shapes of tiles, same specialisation.

    registers   of a thread, from the code object (cuobjdump's figures; the code object's notes on AMD)
    spilled     bytes of a thread's own memory: not zero means that registers did not suffice
    shared      bytes of a program

    python benchmarks/kernel_table.py [--write docs/kernels.md] [--jobs 2]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.kernels.kv_store import Slots
from baton.kernels.rope import Rotation
from baton.kernels.triton import (
    gated_activation,
    kv_copy,
    kv_store,
    paged_attention,
    penalties,
    rms_norm,
    rope,
    rope_store,
    sampling_filters,
    sampling_noise,
    token_choice,
    token_logprobs,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
_VOCABULARY = 128_256
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to launch; the main ones are those of common models, and must not spill on sm_80 and sm_90."""

    name: str
    main: bool
    launch: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """What one kernel of one configuration takes on one target."""

    kernel: str
    configuration: str
    target: str
    registers: int
    spilled: int
    shared: int
    warps: int


class _Driver:
    """Passes for the driver of a GPU that can be compiled for, and no more."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return [target.arch for target in TARGETS.values()].index(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def configurations() -> list[Configuration]:
    """All of them, in the order of the table."""
    found = [
        _attention("chunk", 64, _BF16, main=True, heads=(9, 3)),
        _attention("chunk", 128, _BF16, main=True),
        _attention("decode", 64, _BF16, main=True, heads=(9, 3)),
        _attention("decode", 128, _BF16, main=True),
    ]
    for kind in ("chunk", "decode"):
        found += [_attention(kind, dim, _BF16) for dim in (80, 96, 256)]
        found += [_attention(kind, 128, _FP16), _attention(kind, 128, _FP32), _attention(kind, 64, _FP32)]
        found.append(_attention(kind, 128, _BF16, window=4096, soft_cap=50.0))
    rows = torch.empty(8, 4096, dtype=_BF16)
    heads = torch.empty(8, 40, 128, dtype=_BF16)
    wide = torch.empty(8, 48, 128, dtype=_BF16)
    turn = Rotation(torch.empty(8, 1, 128, dtype=_BF16), torch.empty(8, 1, 128, dtype=_BF16))
    pool = torch.empty(4, 2, 8, 2, 16, 128, dtype=_BF16)
    slots = Slots(torch.empty(8, dtype=torch.int64), torch.empty(8, dtype=torch.int64))
    scores = torch.empty(8, _VOCABULARY)
    keys, ids = torch.empty(8, 2, dtype=torch.int32), torch.empty(1, _VOCABULARY, dtype=torch.int32)
    fp32, int32, int64 = torch.empty(8), torch.empty(8, dtype=torch.int32), torch.empty(8, dtype=torch.int64)
    filters = sampling_filters.Filters(int32, torch.empty(8, dtype=torch.float64), fp32)
    history = penalties.History(torch.empty(64, dtype=torch.int32), torch.empty(9, dtype=torch.int32), int32, 64)
    small: list[tuple[str, Callable[[], object]]] = [
        ("E 4096 bf16", lambda: rms_norm.rms_norm(rows, rows[0], 1e-5)),
        ("E 4096 bf16, residual", lambda: rms_norm.add_rms_norm(rows, rows, rows[0], 1e-5)),
        ("D 128 bf16, 40 heads", lambda: rms_norm.rms_norm(heads, heads[0], 1e-5)),
        ("I 14336 bf16", lambda: gated_activation.gated_activation(torch.empty(8, 28_672, dtype=_BF16))),
        ("D 128 bf16", lambda: rope.rope(heads, turn)),
        ("D 128 bf16", lambda: kv_store.kv_store(wide[:, 32:40], wide[:, 40:], pool, 0, slots)),
        ("D 128 bf16", lambda: rope_store.rope_store(wide, None, 1e-5, turn, pool, 0, slots)),
        ("D 128 bf16, head norm", lambda: rope_store.rope_store(wide, heads[0], 1e-5, turn, pool, 0, slots)),
        ("gather bf16", lambda: kv_copy.kv_gather(pool, int64[:4], 0, torch.empty_like(pool))),
        ("scatter bf16", lambda: kv_copy.kv_scatter(pool, torch.empty_like(pool), int64[:4], 0)),
        (f"V {_VOCABULARY}", lambda: sampling_noise.gumbel_noise(keys, ids)),
        (f"V {_VOCABULARY}", lambda: token_choice.choose(scores, keys, int32, fp32)),
        (f"V {_VOCABULARY}", lambda: sampling_filters.filter_thresholds(scores, filters)),
        (f"V {_VOCABULARY}", lambda: penalties.penalize(scores, history, penalties.Penalties(fp32, fp32, fp32))),
        (f"V {_VOCABULARY}", lambda: token_logprobs.chosen_logprobs(scores, int64)),
    ]
    return found + [Configuration(name, True, launch) for name, launch in small]


def compile_one(index: int, target: str) -> list[Row]:
    """The kernels of one configuration, compiled; they come from Triton's cache if they are there."""
    configuration = configurations()[index]
    with _compiling_for(TARGETS[target]) as kernels:
        configuration.launch()
    return [_row(kernel, configuration.name, target) for kernel in kernels]


def table(indices: Sequence[int], targets: Sequence[str], jobs: int) -> list[Row]:
    """Rows of these configurations, by several processes."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(compile_one, index, target) for index in indices for target in targets]
        return list(dict.fromkeys(row for task in tasks for row in task.result()))


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/kernels.md."""
    lines = [
        "| kernel | configuration | target | registers | spilled | shared | warps |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += ["| " + " | ".join(str(value) for value in astuple(row)) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, help="the document whose table is replaced")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    text = markdown(table(range(len(configurations())), arguments.targets, arguments.jobs))
    print(text)
    if arguments.write:
        before, _, rest = arguments.write.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        arguments.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _attention(
    kind: str,
    dim: int,
    dtype: torch.dtype,
    *,
    main: bool = False,
    heads: tuple[int, int] = (32, 8),
    window: int = 0,
    soft_cap: float = 0.0,
) -> Configuration:
    num_heads, num_kv_heads = heads
    query_len = 1 if kind == "decode" else 512

    def launch() -> object:
        pool = torch.empty(512, 2, num_kv_heads, 2, 16, dim, dtype=dtype)
        plan = paged_attention.plan_attention(
            pool,
            [query_len],
            [8192],
            [np.arange(512)],
            num_heads=num_heads,
            window=window,
            soft_cap=soft_cap,
            num_splits=8,
        )
        return paged_attention.paged_attention(torch.empty(query_len, num_heads, dim, dtype=dtype), pool, 0, plan)

    name = f"D {dim} {str(dtype).removeprefix('torch.')}, {num_heads}/{num_kv_heads} heads"
    name = name.replace("bfloat", "bf").replace("float", "fp")
    return Configuration(name + (f", window {window}, soft cap" if window else ""), main, launch)


@contextlib.contextmanager
def _compiling_for(target: GPUTarget) -> Iterator[list[Any]]:
    """In here, launches compile for this target and are collected instead of launched.

    The driver stays replaced: where there is no GPU, there is none to go back to.
    """
    kernels: list[Any] = []
    launch = JITFunction.run

    def compile_instead(self: Any, *operands: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append((self.__name__, launch(self, *operands, grid=grid, warmup=True, **options)))

    driver.set_active(_Driver(target))
    JITFunction.run = compile_instead
    try:
        yield kernels
    finally:
        JITFunction.run = launch


def _row(kernel: tuple[str, Any], configuration: str, target: str) -> Row:
    name, compiled = kernel
    taken = _nvidia(compiled.asm["cubin"]) if target.startswith("sm_") else _amd(compiled.asm["amdgcn"])
    return Row(
        name.strip("_"), configuration, target, *taken, int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    )


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes. What ptxas spills lies on the stack: these kernels keep nothing else there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([command, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd(assembly: str) -> tuple[int, int]:
    def note(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])  # type: ignore[index]

    return note("vgpr_count"), note("private_segment_fixed_size")


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    main()
