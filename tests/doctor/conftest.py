"""A tokenizer for the paper model."""

from __future__ import annotations

import pytest
from paper_model import write_paper_tokenizer


@pytest.fixture(scope="session")
def paper_dir(tmp_path_factory):
    return write_paper_tokenizer(tmp_path_factory.mktemp("paper"))
