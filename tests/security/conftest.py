"""Certificates, keys and clusters that ask for them."""

from __future__ import annotations

import pytest
from certificates import Certificates
from paper_model import write_paper_tokenizer


@pytest.fixture(scope="session")
def paper_dir(tmp_path_factory):
    return write_paper_tokenizer(tmp_path_factory.mktemp("paper"))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))
