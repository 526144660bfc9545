"""What can be wrong with the Dockerfile, found without Docker.

Owns: how its instructions are read, the rules for them, and what the ignore file lets into the context.
Refuses to know: which folders the wheel needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from deploy.pools import image_is_pinned, unpinned

LOCKS = ("requirements.lock", "requirements-nodeps.lock")
SECRET = re.compile(r"(?i)\b\w*(token|password|secret|api_?key)\w*=\S+")


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


def instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            found.append(Instruction(word.upper(), rest.strip()))
    return found


def problems(text: str, root: Path, ignored: str) -> list[str]:
    steps = instructions(text)
    return [
        *_bases_are_pinned(steps),
        *_nobody_is_root(steps),
        *_sources_exist(steps, root, ignored),
        *_installs_are_pinned(steps),
        *_nothing_secret(steps),
    ]


def in_context(name: str, ignored: str) -> bool:
    """Whether a top-level file or folder is sent to the builder."""
    kept = True
    for line in ignored.splitlines():
        rule = line.strip()
        if rule and not rule.startswith("#"):
            keeps = rule.startswith("!")
            if fnmatch(name, rule.removeprefix("!").rstrip("/")):
                kept = keeps
    return kept


def _bases_are_pinned(steps: list[Instruction]) -> Iterator[str]:
    arguments: dict[str, str] = {}
    stages: set[str] = set()
    for step in steps:
        if step.word == "ARG":
            name, _, value = step.rest.partition("=")
            arguments[name] = value
        if step.word == "FROM":
            words = step.rest.split()
            image = re.sub(r"\$\{?(\w+)\}?", lambda found: arguments.get(found[1], ""), words[0])
            if words[0] not in stages:
                if not image_is_pinned(image):
                    yield f"FROM {words[0]} is {image!r}, which is not pinned"
                if "$" not in words[0]:
                    yield f"FROM {words[0]} is written out: an ARG lets a mirror take its place"
            if len(words) == 3:
                stages.add(words[2])


def _nobody_is_root(steps: list[Instruction]) -> Iterator[str]:
    last = max(number for number, step in enumerate(steps) if step.word == "FROM")
    users = [step.rest for step in steps[last:] if step.word == "USER"]
    if not users or users[-1].split(":")[0] in ("0", "root"):
        yield f"the image runs as {users[-1] if users else 'root'}"
    elif not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]):
        yield f"USER {users[-1]} is no number: Kubernetes cannot tell that it is not root"


def _sources_exist(steps: list[Instruction], root: Path, ignored: str) -> Iterator[str]:
    for step in steps:
        if step.word == "ADD":
            yield "ADD fetches and unpacks: use COPY"
        if step.word != "COPY" or "--from=" in step.rest:
            continue
        *sources, _ = (word for word in step.rest.split() if not word.startswith("--"))
        for source in sources:
            if not (root / source).exists():
                yield f"COPY {source}: there is no such file"
            elif source != "." and not in_context(source.split("/")[0], ignored):
                yield f"COPY {source}: it is not in the context"


def _installs_are_pinned(steps: list[Instruction]) -> Iterator[str]:
    for step in steps:
        if step.word != "RUN":
            continue
        for command in re.split(r"&&|;|\|\|", step.rest):
            if "pip install" in command and (wrong := unpinned(command, LOCKS)):
                yield f"a pip install {wrong}"
            if re.search(r"\b(curl|wget) ", command) and "apt-get" not in command:
                yield f"something is fetched that no lock names: {command.strip()}"
        if "apt-get install" in step.rest and "--no-install-recommends" not in step.rest:
            yield "apt-get install without --no-install-recommends"
        if "apt-get update" in step.rest and "/var/lib/apt/lists" not in step.rest:
            yield "the lists of apt-get stay in the image"


def _nothing_secret(steps: list[Instruction]) -> Iterator[str]:
    for step in steps:
        if step.word in ("ENV", "ARG", "RUN") and (found := SECRET.search(step.rest)):
            yield f"{step.word} holds {found[0].partition('=')[0]}"
