"""The decoder on Triton kernels, in a process of its own: `on_triton.py` in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_models_on_interpreted_triton_kernels_give_the_tokens_of_plain_torch() -> None:
    cases = Path(__file__).with_name("on_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(cases), "-v"],
        cwd=cases.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 16
