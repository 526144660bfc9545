"""What is built and installed is what is in the repository: wheel, source distribution, lock files, make targets."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = sorted(link.name for link in (ROOT / "src" / "baton").iterdir() if link.is_symlink() and link.is_dir())
LOCK = ROOT / "requirements.lock"
NODEPS_LOCK = ROOT / "requirements-nodeps.lock"
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, links kept, without caches."""
    copy = tmp_path_factory.mktemp("checkout") / "baton"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("src", *FOLDERS):
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_every_file_of_every_folder(checkout: Path, wheel: Path) -> None:
    expected = {f"baton/{name}" for name in _files_below(checkout, FOLDERS)} | {"baton/__init__.py", "baton/py.typed"}
    assert "baton/proto/worker.proto" in expected
    assert _package_files(wheel) == expected


def test_the_source_distribution_builds_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "sdist"
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=checkout, check=True, capture_output=True)
    (archive,) = out.iterdir()
    with tarfile.open(archive) as source:
        source.extractall(tmp_path / "source", filter="data")
    (source_tree,) = (tmp_path / "source").iterdir()
    assert _package_files(_build_wheel(source_tree, tmp_path)) == _package_files(wheel)


def test_the_wheel_is_imported_by_a_clean_interpreter(unpacked: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import baton, baton.proto.messages, baton.proto.worker_pb2_grpc, baton.scheduler.plan, baton.client.demo\n"
        "print(baton.__version__, baton.client.demo.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(unpacked)], cwd="/", check=True, capture_output=True, text=True
    )
    version, path = done.stdout.split()
    assert version == PROJECT["version"]
    assert Path(path).is_relative_to(unpacked)


def test_the_baton_command_of_the_wheel_runs(unpacked: Path) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read(next(unpacked.glob("*.dist-info/entry_points.txt")))
    module, _, function = entry_points["console_scripts"]["baton"].partition(":")
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'baton'\n"
        f"from {module} import {function} as main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(unpacked), "--help"], cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_the_licence_travels_with_the_wheel(unpacked: Path) -> None:
    (licence,) = unpacked.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence.read_text()


@pytest.mark.parametrize("lock", [LOCK, NODEPS_LOCK], ids=lambda path: path.name)
def test_a_lock_file_is_nothing_but_sorted_pins(lock: Path) -> None:
    pins = _pins(lock)
    assert pins
    assert [pin for pin in pins if not PIN.fullmatch(pin)] == []
    names = [pin.partition("==")[0].lower() for pin in pins]
    assert names == sorted(set(names))


def test_the_locks_satisfy_what_pyproject_asks_for() -> None:
    locked = {canonicalize_name(name): version for name, version in _locked()}
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(text) for text in (*PROJECT["dependencies"], *(text for e in extras.values() for text in e))]
    unmet = [str(r) for r in wanted if not r.specifier.contains(locked.get(canonicalize_name(r.name), "0"))]
    assert unmet == []


def test_every_package_that_the_code_imports_is_a_declared_dependency() -> None:
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *extras["demo"], *extras["nixl"], *extras["gpu"], *extras["capacity"]]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    owners = importlib.metadata.packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)} imports {package}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for package in _imported_packages(path)
        if package not in sys.stdlib_module_names and package != "baton"
        if not declared.intersection(map(canonicalize_name, owners.get(package, [])))
    }
    assert undeclared == set()


def test_torch_is_pinned_without_saying_which_build() -> None:
    assert "torch==2.13.0" in _pins(LOCK)


def test_every_make_target_is_explained() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    explained = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True, env=_outer_make()).stdout
    assert {line.split()[1] for line in explained.splitlines()} == set(phony.group(1).split())
    assert {"demo", "serve", "test", "lint", "proto", "bench", "venv", "clean"} <= set(phony.group(1).split())


def test_the_check_script_can_be_executed() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def _build_wheel(tree: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-w", str(out), str(tree)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def _files_below(root: Path, folders: list[str]) -> set[str]:
    return {
        path.relative_to(root).as_posix() for folder in folders for path in (root / folder).rglob("*") if path.is_file()
    }


def _package_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("baton/")}


def _pins(lock: Path) -> list[str]:
    return [line for line in lock.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def _imported_packages(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def _locked() -> list[list[str]]:
    return [pin.split("==") for lock in (LOCK, NODEPS_LOCK) for pin in _pins(lock)]


def _outer_make() -> dict[str, str]:
    """The environment without what a surrounding `make test` hands down to the makes below it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
