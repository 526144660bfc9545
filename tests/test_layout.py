"""The house has the shape that docs/architecture.md draws: who imports whom, and where a few things may stand at all.

Each rule is a function from a `House` to the violations that it found. It is run on this repository, and on a small
synthetic one with a violation planted in it, so that a rule that has gone blind fails too.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ALLOWED_IMPORTS = {
    "kernels": set(),
    "proto": set(),
    "scheduler": {"proto"},
    "kvtransfer": {"proto"},
    "telemetry": {"proto"},
    "engine": {"kernels", "scheduler", "telemetry", "proto"},
    "prefill_worker": {"engine", "kvtransfer", "scheduler", "telemetry", "proto"},
    "decode_worker": {"engine", "kvtransfer", "scheduler", "telemetry", "proto"},
    "router": {"proto", "scheduler", "telemetry"},
    "fleet": {"router", "telemetry", "proto"},
    "capacity": {"router", "kvtransfer", "scheduler", "proto"},
    "client": {"proto"},
}
FOLDERS = set(ALLOWED_IMPORTS)
COMPOSITION = {
    "client/calibrate.py",
    "client/capacity.py",
    "client/cli.py",
    "client/demo.py",
    "client/doctor.py",
    "client/live.py",
    "fleet/worker.py",
    "router/__main__.py",
}
ONE_PLACE = {  # a package that is imported in one file or folder only, tests apart
    "ray": "fleet/",
    "nixl": "kvtransfer/nixl_agent.py",
    "nixl_cu12": "kvtransfer/nixl_agent.py",
    "nixl_cu13": "kvtransfer/nixl_agent.py",
}
IMPORTS_BY_COMPUTED_NAME = {"kvtransfer/nixl_agent.py"}  # whichever build of NIXL is installed
NOT_IN_SCHEDULER = {"torch", "time", "datetime", "asyncio", "threading", "logging"}
NOT_ON_A_VIRTUAL_CLOCK = {"torch", "numpy", "time", "ray", "grpc", "aiohttp"}
RUN_BY_CAPACITY = {"router", "kvtransfer"}  # what it reaches of these runs on a virtual clock
ENVIRONMENT_USERS = {
    "client/access.py",  # a client's token, which may not stand on a command line
    "capacity/simulation.py",  # how processes that simulate keep their objects
    "engine/checkpoint.py",  # where the cache directory is
    "kvtransfer/lane.py",  # what NCCL and torch read when a group opens
    "kvtransfer/nixl_agent.py",  # what UCX and NIXL read when they are loaded
    "fleet/launch.py",  # what Ray reads when it starts
}
MEANINGLESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name. `target` is dotted; of `from a.b import c` it is `a.b.c`, as c may be a module."""

    target: str
    line: int
    relative: bool = False

    @property
    def package(self) -> str:
        return self.target.split(".")[0]

    @property
    def folder(self) -> str | None:
        """The top-level folder, if the target is inside baton."""
        parts = self.target.split(".")
        return parts[1] if parts[0] == "baton" and len(parts) > 1 and parts[1] in FOLDERS else None


class SourceFile:
    """One parsed .py file; `name` is its path from the root, with slashes."""

    def __init__(self, root: Path, path: Path) -> None:
        self.name = path.relative_to(root).as_posix()
        self.folder = self.name.split("/")[0]
        self.generated = path.stem.endswith(("_pb2", "_pb2_grpc"))
        self.tree = ast.parse(path.read_text(encoding="utf-8"), filename=self.name)
        self.imports = list(_imports(self.tree))

    @property
    def module(self) -> str:
        return "baton." + self.name.removesuffix(".py").replace("/", ".")


class House:
    """All Python files of a repository, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> list[SourceFile]:
        """The files of the top-level folders."""
        return [file for folder in sorted(FOLDERS) for file in self._in(folder)]

    @cached_property
    def all_files(self) -> list[SourceFile]:
        """The same, with tests and benchmarks."""
        return [*self.files, *self._in("tests"), *self._in("benchmarks")]

    def _in(self, folder: str) -> list[SourceFile]:
        paths = sorted((self.root / folder).rglob("*.py"))
        return [SourceFile(self.root, path) for path in paths if "__pycache__" not in path.parts]


Rule = Callable[[House], Iterator[str]]


def imports_go_downwards(house: House) -> Iterator[str]:
    for file in house.files:
        if file.name in COMPOSITION:
            continue
        allowed = ALLOWED_IMPORTS[file.folder] | {file.folder}
        for found in file.imports:
            if found.folder is not None and found.folder not in allowed:
                yield f"{file.name}:{found.line} imports {found.target}"


def capacity_runs_without_wire_and_clock(house: House) -> Iterator[str]:
    modules = {file.module: file for file in house.files}
    start = [file for file in house.files if file.folder == "capacity"]
    reached: dict[str, SourceFile] = {}
    queue = list(start)
    while queue:
        file = queue.pop()
        for found in file.imports:
            for name in (found.target, found.target.rpartition(".")[0]):
                if name in modules and name not in reached and modules[name].folder in RUN_BY_CAPACITY:
                    reached[name] = modules[name]
                    queue.append(modules[name])
    for file in reached.values():
        for found in file.imports:
            if found.package in NOT_ON_A_VIRTUAL_CLOCK:
                yield f"{file.name}:{found.line} imports {found.target}, and capacity/ runs it"


def baton_is_imported_by_its_full_name(house: House) -> Iterator[str]:
    for file in house.all_files:
        for found in file.imports:
            if found.relative or found.package in FOLDERS:
                yield f"{file.name}:{found.line} imports {found.target}: write baton.<folder>.<file>"


def scheduler_is_pure(house: House) -> Iterator[str]:
    for file in house.files:
        for found in file.imports:
            if file.folder == "scheduler" and found.package in NOT_IN_SCHEDULER:
                yield f"{file.name}:{found.line} imports {found.target}"


def one_place_calls_each_runtime(house: House) -> Iterator[str]:
    for file in house.files:
        for found in file.imports:
            if found.package in ONE_PLACE and not file.name.startswith(ONE_PLACE[found.package]):
                yield f"{file.name}:{found.line} imports {found.target}"


def imports_say_what_they_import(house: House) -> Iterator[str]:
    for file in house.files:
        for found in file.imports:
            if not found.target and file.name not in IMPORTS_BY_COMPUTED_NAME:
                yield f"{file.name}:{found.line} imports by a computed name, which no rule here can see"


def environment_is_used_in_few_places(house: House) -> Iterator[str]:
    for file in house.files:
        if file.name in ENVIRONMENT_USERS:
            continue
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                names = [alias.name for alias in node.names]
            else:
                continue
            if {"environ", "environb", "getenv", "putenv"}.intersection(names):
                yield f"{file.name}:{node.lineno} uses the environment"


def no_exception_is_swallowed(house: House) -> Iterator[str]:
    for file in house.all_files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ExceptHandler) and _catches_everything(node) and all(map(_is_idle, node.body)):
                yield f"{file.name}:{node.lineno} catches everything and goes on"


def modules_say_what_they_own(house: House) -> Iterator[str]:
    for file in house.all_files:
        if not file.generated and not ast.get_docstring(file.tree):
            yield f"{file.name} has no docstring"


def files_are_named_after_nouns(house: House) -> Iterator[str]:
    for file in house.all_files:
        for part in Path(file.name).with_suffix("").parts:
            if part in MEANINGLESS_NAMES:
                yield f"{file.name}: {part} says nothing"


def folders_have_no_init(house: House) -> Iterator[str]:
    """With one, `proto` and `kernels` would hide the installed packages of these names where the root is the path."""
    yield from (file.name for file in house.files if file.name.endswith("/__init__.py"))


def links_point_to_their_folders(house: House) -> Iterator[str]:
    package = house.root / "src" / "baton"
    for folder in sorted(FOLDERS):
        if (house.root / folder).is_dir() and any(file.folder == folder for file in house.files):
            link = package / folder
            if not link.is_symlink():
                yield f"src/baton/{folder} is not a link"
            elif (target := os.readlink(link)) != f"../../{folder}":
                yield f"src/baton/{folder} points to {target}"
    for entry in package.iterdir():
        if entry.name not in {*FOLDERS, "__init__.py", "py.typed", "__pycache__"}:
            yield f"src/baton/{entry.name} does not belong there"


RULES: list[Rule] = [
    imports_go_downwards,
    capacity_runs_without_wire_and_clock,
    baton_is_imported_by_its_full_name,
    scheduler_is_pure,
    one_place_calls_each_runtime,
    imports_say_what_they_import,
    environment_is_used_in_few_places,
    no_exception_is_swallowed,
    modules_say_what_they_own,
    files_are_named_after_nouns,
    folders_have_no_init,
    links_point_to_their_folders,
]


@pytest.fixture(scope="module")
def repository() -> House:
    return House(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_repository_keeps_the_rule(rule: Rule, repository: House) -> None:
    assert repository.files
    assert not list(rule(repository))


SOUND = {
    "proto/messages.py": '"""Values."""\nimport dataclasses\n',
    "proto/worker_pb2.py": "from baton.proto import messages\n",
    "scheduler/plan.py": '"""Plans."""\nfrom baton.proto.messages import Request\n',
    "kernels/norm.py": '"""Norm."""\nimport torch\n',
    "engine/loop.py": '"""Loop."""\nimport time\nfrom baton.kernels import norm\nimport baton.scheduler.plan\n',
    "router/load.py": '"""Load."""\nfrom baton.scheduler.plan import Step\n',
    "fleet/fleet.py": '"""Fleet."""\nimport ray\nfrom ray.util import state\n',
    "router/placement.py": '"""Placement."""\nx = importlib.import_module(f"baton.router.policies.{name}")\n',
    "engine/checkpoint.py": '"""Checkpoint."""\nimport os\nHOME = os.environ["HOME"]\n',
    "router/__main__.py": '"""Wires."""\nimport baton.engine.loop\n',
    "kvtransfer/nixl_agent.py": '"""NIXL."""\ndef agent():\n    import nixl\n    return import_module(name)\n',
    "capacity/workload.py": '"""Workload."""\nfrom baton.router.load import Load\n',
    "client/bench.py": '"""Bench."""\nfrom baton.proto import inference_pb2\n',
    "client/cli.py": '"""Composes."""\nfrom baton.fleet.fleet import Fleet\n',
    "tests/test_fleet.py": '"""Tests may."""\nimport ray\nfrom baton.decode_worker import worker\n',
}


def _build(root: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    package = root / "src" / "baton"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for folder in FOLDERS:
        (package / folder).symlink_to(f"../../{folder}")
    return House(root)


def test_a_sound_house_breaks_no_rule(tmp_path: Path) -> None:
    house = _build(tmp_path, SOUND)
    assert [violation for rule in RULES for violation in rule(house)] == []


PLANTED: list[tuple[Rule, str, str]] = [
    (imports_go_downwards, "scheduler/plan.py", "from baton.engine.loop import Loop"),
    (imports_go_downwards, "scheduler/plan.py", "from baton import kernels"),
    (imports_go_downwards, "scheduler/plan.py", "import baton.router.load as load"),
    (imports_go_downwards, "kernels/norm.py", "from baton.proto import messages"),
    (imports_go_downwards, "engine/loop.py", "def f():\n    from baton.kvtransfer import connector"),
    (imports_go_downwards, "engine/loop.py", "if TYPE_CHECKING:\n    from baton.router.load import Load"),
    (imports_go_downwards, "decode_worker/worker.py", "from baton.prefill_worker.worker import Worker"),
    (imports_go_downwards, "client/bench.py", "from baton.capacity.workload import requests"),
    (imports_go_downwards, "router/load.py", "m = importlib.import_module('baton.engine.loop')"),
    (imports_go_downwards, "router/load.py", "m = import_module(f'baton.client.{name}')"),
    (capacity_runs_without_wire_and_clock, "router/load.py", "import time"),
    (capacity_runs_without_wire_and_clock, "router/load.py", "def f():\n    from grpc import aio"),
    (baton_is_imported_by_its_full_name, "client/cli.py", "import router"),
    (baton_is_imported_by_its_full_name, "tests/test_fleet.py", "from proto.messages import Request"),
    (baton_is_imported_by_its_full_name, "router/load.py", "from . import fleet"),
    (scheduler_is_pure, "scheduler/plan.py", "import torch.nn"),
    (scheduler_is_pure, "scheduler/plan.py", "from time import monotonic"),
    (scheduler_is_pure, "scheduler/policies/fcfs.py", "def f():\n    import asyncio"),
    (scheduler_is_pure, "scheduler/plan.py", "import logging"),
    (one_place_calls_each_runtime, "router/load.py", "import ray.util"),
    (one_place_calls_each_runtime, "client/cli.py", "def f():\n    import ray"),
    (one_place_calls_each_runtime, "kvtransfer/connectors/local.py", "from nixl._api import nixl_agent"),
    (one_place_calls_each_runtime, "engine/loop.py", "m = importlib.import_module('nixl_cu12')"),
    (imports_say_what_they_import, "engine/loop.py", "m = importlib.import_module(name)"),
    (imports_say_what_they_import, "router/load.py", "m = __import__(f'{name}.fleet')"),
    (environment_is_used_in_few_places, "engine/loop.py", "import os\nx = os.environ.get('X')"),
    (environment_is_used_in_few_places, "engine/loop.py", "import os\ndef f():\n    return os.getenv('X')"),
    (environment_is_used_in_few_places, "client/cli.py", "from os import environ"),
    (no_exception_is_swallowed, "engine/loop.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (no_exception_is_swallowed, "engine/loop.py", "try:\n    f()\nexcept:\n    ..."),
    (no_exception_is_swallowed, "tests/test_fleet.py", "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
    (
        no_exception_is_swallowed,
        "engine/loop.py",
        "for f in fs:\n    try:\n        f()\n    except Exception:\n        continue",
    ),
    (files_are_named_after_nouns, "engine/utils.py", ""),
    (files_are_named_after_nouns, "router/helpers/text.py", ""),
    (folders_have_no_init, "proto/__init__.py", ""),
    (folders_have_no_init, "router/policies/__init__.py", ""),
]


@pytest.mark.parametrize(("rule", "name", "planted"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, name: str, planted: str, tmp_path: Path) -> None:
    text = SOUND.get(name, '"""Planted."""\n') + planted + "\n"
    found = list(rule(_build(tmp_path, {**SOUND, name: text})))
    assert [violation.startswith(name) for violation in found] == [True]


def test_a_module_without_a_docstring_is_found(tmp_path: Path) -> None:
    house = _build(tmp_path, {**SOUND, "engine/graphs.py": "import torch\n"})
    assert list(modules_say_what_they_own(house)) == ["engine/graphs.py has no docstring"]


@pytest.mark.parametrize("target", ["../../scheduler", None, "/absolute"], ids=["other", "folder", "absolute"])
def test_a_link_that_does_not_point_to_its_folder_is_found(target: str | None, tmp_path: Path) -> None:
    house = _build(tmp_path, SOUND)
    link = tmp_path / "src" / "baton" / "router"
    link.unlink()
    if target is None:
        link.mkdir()
    else:
        link.symlink_to(target)
    assert len(list(links_point_to_their_folders(house))) == 1


def _imports(tree: ast.AST) -> Iterator[Import]:
    """All imports, wherever they stand; also those by name through importlib, as far as the name is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (Import(f"{prefix}.{alias.name}", node.lineno, node.level > 0) for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in {"import_module", "__import__"} and node.args:
            yield Import(_leading_text(node.args[0]), node.lineno)


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _leading_text(expression: ast.expr) -> str:
    if isinstance(expression, ast.JoinedStr) and expression.values:
        expression = expression.values[0]
    if isinstance(expression, ast.BinOp):
        return _leading_text(expression.left)
    return expression.value if isinstance(expression, ast.Constant) and isinstance(expression.value, str) else ""


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(t is None or (isinstance(t, ast.Name) and t.id in {"Exception", "BaseException"}) for t in types)


def _is_idle(statement: ast.stmt) -> bool:
    """pass, continue, or a bare constant such as `...`."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Continue)
