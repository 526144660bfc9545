"""Where a model's files are: a directory, the Hugging Face cache, or the demo model, converted once.

Owns: what a model's name means, and the cache directory. The only file that reads the environment (`BATON_CACHE`,
`XDG_CACHE_HOME`). Refuses to know: what is inside the files.

    demo -> <cache>/models/<its directory>  (made by the first process that asks; others wait for it)
    a directory -> itself                   org/name -> huggingface_hub's cache, downloaded where possible
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.engine import demo

DEMO = "demo"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_CONVERSION_DEADLINE_S = 300.0
_POLL_S = 0.1


class CheckpointError(ValueError):
    """A model that cannot be found, is incomplete, or cannot be converted."""


def resolve_model(name: str) -> Path:
    """The local directory, with config.json and safetensors, that `name` stands for; raises CheckpointError."""
    if name == DEMO:
        return _demo_directory()
    directory = Path(name).expanduser()
    if directory.exists():
        return _complete(directory)
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise CheckpointError(f"{name}: no such directory, and neither 'demo' nor a Hugging Face id (org/name)")
    return _complete(_hub_directory(name))


def local_model(name: str) -> Path | None:
    """The directory that `resolve_model` would return, if it is here; None if it would have to be made or fetched.

    Raises CheckpointError where `resolve_model` would find fault with what is here.
    """
    if name == DEMO:
        target = cache_directory() / "models" / demo.DIRECTORY
        return _complete(target) if target.is_dir() else None
    directory = Path(name).expanduser()
    if directory.exists() or not _HUB_ID.fullmatch(name) or name.startswith("."):
        return resolve_model(name)
    try:
        return _complete(_hub_directory(name, local_files_only=True))
    except CheckpointError:
        return None


def model_name(name: str) -> str:
    """What to call the model: the last part of a directory, or the name itself where it is no directory."""
    directory = Path(name).expanduser()
    return directory.resolve().name if name != DEMO and directory.exists() else name


def cache_directory() -> Path:
    """Where Baton keeps what it can make again: `$BATON_CACHE`, or `baton` in the user's cache directory."""
    if own := os.environ.get("BATON_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton"


def _complete(directory: Path) -> Path:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory}: config.json is missing")
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory}: no *.safetensors file is there")
    return directory.resolve()


def _hub_directory(name: str, local_files_only: bool = False) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise CheckpointError(f"{name}: no such directory, and huggingface_hub is not installed") from error
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=local_files_only))
    except (OSError, ValueError) as error:
        # The hub client's errors all derive from these two; its own texts run over many lines.
        raise CheckpointError(f"{name}: not in the Hugging Face cache and not to be had: {error}") from error


def _demo_directory() -> Path:
    models = cache_directory() / "models"
    target = models / demo.DIRECTORY
    if target.is_dir():
        return _complete(target)
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{models}: cannot be made: {error}") from error
    with _locked(models / f"{demo.DIRECTORY}.lock", _CONVERSION_DEADLINE_S):
        if not target.is_dir():
            _convert_demo(target)
    return _complete(target)


def _convert_demo(target: Path) -> None:
    """Converts beside the target, then renames: the target is there in full or not at all. Needs the lock."""
    prefix = f".{target.name}-"
    for abandoned in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        demo.convert(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except (OSError, ImportError, ValueError) as error:
        raise CheckpointError(
            f"demo model: {error}; it needs the packages of `pip install baton-serve[demo]`"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    """Holds an exclusive lock on a file; the system drops it when the process dies, whatever it dies of."""
    end = time.monotonic() + deadline_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise CheckpointError(f"{path}: still locked by another process after {deadline_s:.0f} s") from None
                time.sleep(_POLL_S)
        yield
