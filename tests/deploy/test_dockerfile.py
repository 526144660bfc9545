"""The image is built from pinned parts, from nothing but what it needs, and does not run as root."""

from __future__ import annotations

from pathlib import Path

import pytest
from deploy.dockerfile import in_context, instructions, problems

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8")
FOLDERS = sorted(link.name for link in (ROOT / "src" / "baton").iterdir() if link.is_symlink())


def test_nothing_is_wrong_with_the_dockerfile() -> None:
    assert problems(TEXT, ROOT, IGNORED) == []


@pytest.mark.parametrize("name", ["src", "pyproject.toml", "README.md", "LICENSE", *FOLDERS])
def test_what_the_wheel_is_made_of_is_sent_to_the_builder(name: str) -> None:
    assert in_context(name, IGNORED)


@pytest.mark.parametrize(
    "name", [".git", ".venv", "tests", "benchmarks", "deploy", "docs", "dist", ".env", "id_ed25519"]
)
def test_all_else_stays_at_home(name: str) -> None:
    assert not in_context(name, IGNORED)


def test_both_builds_come_from_one_file() -> None:
    assert [step.rest for step in instructions(TEXT) if step.word == "ARG"] == [
        "PYTHON_IMAGE=python:3.11.14-slim-bookworm",
        "TARGET=cuda",
    ]
    assert {"cuda)", "cpu)"} <= {word for step in instructions(TEXT) for word in step.rest.split()}


PLANTED = [
    ("any base", "python:3.11.14-slim-bookworm", "python:latest", "is not pinned"),
    ("a base without a tag", "python:3.11.14-slim-bookworm", "python", "is not pinned"),
    ("a base written out", "FROM ${PYTHON_IMAGE} AS wheel", "FROM python:3.11.14 AS wheel", "is written out"),
    ("root", "USER 1000:1000\n", "", "runs as root"),
    ("root by name", "USER 1000:1000", "USER root", "runs as root"),
    ("a user by name", "USER 1000:1000", "USER baton", "is no number"),
    ("a file that is not there", "COPY requirements.lock ./", "COPY requirements.txt ./", "no such file"),
    ("a file that is not sent", "COPY requirements.lock ./", "COPY Makefile ./", "not in the context"),
    ("no lock", "--constraint requirements.lock setuptools", "setuptools", "takes setuptools in whatever version"),
    ("another lock", "/locks/requirements-nodeps.lock", "/locks/all.txt", "not a lock of this repository"),
    ("a download", "&& rm -rf", "&& curl https://example.com/x | sh && rm -rf", "no lock names"),
    ("recommended packages", "--no-install-recommends ", "", "--no-install-recommends"),
    ("lists of packages", "&& rm -rf /var/lib/apt/lists/* \\\n    ", "", "lists of apt-get"),
    ("a secret", "ENV HF_HOME", "ENV HF_TOKEN=hf_123 HF_HOME", "holds HF_TOKEN"),
]


@pytest.mark.parametrize(("right", "wrong", "told"), [plant[1:] for plant in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_mistake_is_found(right: str, wrong: str, told: str) -> None:
    assert right in TEXT
    found = problems(TEXT.replace(right, wrong), ROOT, IGNORED)
    assert any(told in problem for problem in found), found
