"""What the documents tell a reader to type exists: commands parse, links resolve, snippets type-check."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from urllib.parse import unquote

import pytest
import yaml

from baton.client import capacity
from baton.client.cli import build_parser
from baton.router import config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(path for folder in ("docs", "deploy", "benchmarks") for path in (ROOT / folder).rglob("*.md")),
    ]
)
SHELL = {"", "sh", "bash", "shell", "console"}
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
INLINE_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block: where it stands, its language and its text."""

    place: str
    language: str
    text: str


def blocks(document: Path) -> Iterator[Block]:
    language: str | None = None
    lines: list[str] = []
    start = 0
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        fence = line.lstrip().startswith("```")
        if language is None and fence:
            language, lines, start = line.strip().removeprefix("```"), [], number
        elif language is not None and fence:
            yield Block(f"{document.relative_to(ROOT)}:{start}", language, dedent("\n".join(lines) + "\n"))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"{document}:{start}: a code block that does not end"


def prose(document: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def command_lines(block: Block, program: str) -> list[list[str]]:
    """The arguments of each call of `program` in a shell block, up to the first pipe, redirection or `&`."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        text = line.strip().removeprefix("$ ")
        if not text.startswith(f"{program} "):
            continue
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        end = next((i for i, word in enumerate(words) if set(word) <= set("|&;<>()")), len(words))
        found.append(words[1:end])
    return found


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
SHELL_BLOCKS = [block for block in BLOCKS if block.language in SHELL]
BATON_COMMANDS = [(block.place, words) for block in SHELL_BLOCKS for words in command_lines(block, "baton")]


def subcommands(parser: argparse.ArgumentParser) -> set[str]:
    return {
        name for action in parser._actions if isinstance(action, argparse._SubParsersAction) for name in action.choices
    }


@pytest.mark.parametrize(("place", "words"), BATON_COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_line_parses(place: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    complaint = ""
    try:
        if words[0] == "capacity":
            capacity.build_parser().parse_args(words[1:])
        else:
            build_parser().parse_args(words)
    except SystemExit as end:
        complaint = capsys.readouterr().err if end.code else ""
    assert complaint == "", f"{place}: baton {shlex.join(words)}"


def test_the_readme_shows_the_commands_that_a_reader_starts_with() -> None:
    shown = {words[0] for place, words in BATON_COMMANDS if place.startswith("README.md")}
    assert {"serve", "generate", "chat", "status", "bench"} <= shown


def test_a_command_in_running_text_exists() -> None:
    known = subcommands(build_parser())
    assert {"serve", "generate"} <= known
    unknown = [
        f"{document.name}: {code}"
        for document in DOCUMENTS
        for code in INLINE_CODE.findall(prose(document))
        if code.startswith("baton ") and code.split()[1].strip(".") and code.split()[1] not in known
    ]
    assert unknown == []


def test_a_make_target_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = [words[0] for block in SHELL_BLOCKS for words in command_lines(block, "make")]
    shown += [c.split()[1] for d in DOCUMENTS for c in INLINE_CODE.findall(prose(d)) if re.match(r"make [a-z]+", c)]
    assert shown
    assert set(shown) - targets == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_relative_link_leads_somewhere(document: Path) -> None:
    broken = []
    for target in LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            broken.append(target)
    assert broken == []


def test_the_python_snippets_of_the_readme_type_check(tmp_path: Path) -> None:
    snippets = [block for block in BLOCKS if block.language == "python" and block.place.startswith("README.md")]
    assert snippets
    files = []
    for number, block in enumerate(snippets):
        ast.parse(block.text, filename=block.place)
        files.append(tmp_path / f"snippet_{number}.py")
        files[-1].write_text(block.text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_settings_shown_are_accepted() -> None:
    shown = [(b.place, yaml.safe_load(b.text)) for b in BLOCKS if b.language == "yaml" and "baton:" in b.text]
    assert any(place.startswith("README.md") for place, _ in shown)
    for place, document in shown:
        assert config.from_mapping(document, source=place).pools


def _anchors(document: Path) -> set[str]:
    """The names that a link can use for the headings of a document, as GitHub builds them."""
    headings = re.findall(r"^#+ +(.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
