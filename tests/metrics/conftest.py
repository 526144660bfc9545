"""A tokenizer for the paper model, and one run of a cluster that several tests look at."""

from __future__ import annotations

import asyncio

import pytest
from metrics.scraping import Run, run_with_trouble
from paper_model import write_paper_tokenizer


@pytest.fixture(scope="session")
def paper_dir(tmp_path_factory):
    return write_paper_tokenizer(tmp_path_factory.mktemp("paper"))


@pytest.fixture(scope="session")
def run(paper_dir) -> Run:
    return asyncio.run(run_with_trouble(paper_dir))
