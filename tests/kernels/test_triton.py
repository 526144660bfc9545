"""The Triton kernels without a GPU: in Triton's interpreter against their references, and compiled for GPUs.

Both run in processes of their own: an interpreted kernel cannot be compiled, nor the other way round.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kernel_table
import pytest
import torch

from baton.kernels import dispatch

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "kernels.md"
SMALL = ("rms_norm", "rope_store", "choose", "filter_thresholds")  # gfx942 is compiled for these


def run(*command: str, timeout_s: float, **environment: str) -> str:
    """A command's output; fails with it if the command does."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout


@pytest.mark.timeout(900)
def test_interpreted_kernels_equal_their_references() -> None:
    cases = [str(ROOT / "tests" / "kernels" / name) for name in ("on_device.py", "on_device_sampler.py")]
    told = run(sys.executable, "-m", "pytest", *cases, "-v", timeout_s=880, TRITON_INTERPRET="1")
    assert int(re.search(r"(\d+) passed", told)[1]) > 150
    assert "skipped" not in told


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[kernel_table.Row]:
    """The main configurations for sm_80 and sm_90, by two processes."""
    main = [i for i, configuration in enumerate(kernel_table.configurations()) if configuration.main]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        patch.delenv("TRITON_INTERPRET", raising=False)
        return kernel_table.table(main, ["sm_80", "sm_90"], jobs=2)


@pytest.mark.timeout(900)
def test_main_configurations_compile_and_spill_nothing(compiled: list[kernel_table.Row]) -> None:
    assert {row.kernel for row in compiled} >= {"chunk_attention", "decode_attention", "combine", *SMALL}
    assert [row for row in compiled if row.spilled] == []
    assert all(16 <= row.registers <= 255 or row.kernel == "among_parts" for row in compiled)


def test_the_shared_memory_of_main_configurations_lets_an_a100_start_them(compiled: list[kernel_table.Row]) -> None:
    assert max(row.shared for row in compiled if row.target == "sm_80") <= 163 * 1024
    assert max(row.shared for row in compiled if row.target == "sm_90") <= 227 * 1024


def documented() -> set[tuple[str, str, str]]:
    """Kernel, configuration and target of each row in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    body = text.partition(kernel_table.BEGIN)[2].partition(kernel_table.END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.strip().splitlines()[2:]]
    return {(row[0], row[1], row[2]) for row in rows}


def test_the_document_has_every_configuration_on_every_target(compiled: list[kernel_table.Row]) -> None:
    rows = documented()
    names = {configuration.name for configuration in kernel_table.configurations()}
    assert {name for _, name, _ in rows} == names
    for name in names:
        kernels = [{kernel for kernel, told, on in rows if (told, on) == (name, t)} for t in kernel_table.TARGETS]
        assert kernels[0]
        assert kernels.count(kernels[0]) == len(kernels)
    assert {(row.kernel, row.configuration, row.target) for row in compiled} <= rows


@pytest.mark.timeout(600)
def test_the_gpu_check_passes_its_dry_run(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "gpu_check.sh")
    told = run("bash", script, "--dry-run", "--out", str(tmp_path), timeout_s=580, PYTHON=sys.executable)
    assert "FAIL" not in told
    assert (tmp_path / "gpu_check.json").is_file()


@pytest.mark.parametrize(
    ("device", "has_triton", "chosen"),
    [("cpu", True, "PlainKernels"), ("cuda", False, "PlainKernels"), ("cuda", True, "TritonKernels")],
)
def test_the_device_decides_which_kernels_run(
    device: str, has_triton: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_triton:
        find: Callable[[str], object] = lambda name: None  # noqa: E731
        monkeypatch.setattr(dispatch.importlib.util, "find_spec", find)
    assert type(dispatch.kernels_for(torch.device(device))).__name__ == chosen
