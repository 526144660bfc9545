"""Small clusters with an HTTP face, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
from paper_model import PaperRunner, write_paper_tokenizer
from small_cluster import SmallCluster
from web import client_of


@pytest.fixture(scope="session")
def paper_dir(tmp_path_factory):
    return write_paper_tokenizer(tmp_path_factory.mktemp("paper"))


@pytest.fixture
async def cluster(paper_dir) -> AsyncIterator[SmallCluster]:
    async with SmallCluster(paper_dir, PaperRunner) as small:
        small.router.ready.set()
        yield small


@pytest.fixture
async def http(cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(cluster) as client:
        yield client
