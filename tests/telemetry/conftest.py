"""Fixtures for tests of traces and logs: the paper model's tokenizer, and a collector that takes OTLP over HTTP."""

from __future__ import annotations

import pytest
from collector import Collector
from paper_model import write_paper_tokenizer


@pytest.fixture(scope="session")
def paper_dir(tmp_path_factory):
    return write_paper_tokenizer(tmp_path_factory.mktemp("paper"))


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector
