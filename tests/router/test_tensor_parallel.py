"""A pool's workers may be split over ranks: what the configuration says of it, and what is refused before a start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.router.__main__ import StartError, check, num_processes, sharing_cores
from baton.router.config import ClusterConfig, ConfigError, from_mapping

PAIR: dict[str, Any] = {"prefill": {"role": "prefill", "size": 2}, "decode": {"role": "decode"}}


def read(**baton: Any) -> ClusterConfig:
    return from_mapping({"metadata": {"baton": {"pools": PAIR} | baton}})


def test_pools_may_be_split_over_different_numbers_of_ranks() -> None:
    pools = PAIR | {"decode": {"role": "decode", "engine": {"tensor_parallel": 4}}}
    config = read(engine={"tensor_parallel": 2}, pools=pools)
    assert [pool.engine.tensor_parallel for pool in config.pools] == [2, 4]
    assert list(map(num_processes, config.pools)) == [4, 4]


@pytest.mark.parametrize(("ranks", "problem"), [(0, "at least 1"), (65, "at most 64"), (1.5, "a whole number")])
def test_a_number_of_ranks_out_of_bounds_is_refused(ranks: float, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"metadata.baton.engine.tensor_parallel is {ranks}, must be {problem}"):
        read(engine={"tensor_parallel": ranks})


def test_ranks_share_the_cores_as_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    config = sharing_cores(read(engine={"tensor_parallel": 2}))
    assert [pool.engine.threads for pool in config.pools] == [2, 2]


def test_a_model_that_cannot_be_split_is_refused_before_anything_starts(tiny_model_dir: Callable[..., Path]) -> None:
    config = read(model=str(tiny_model_dir("llama")), engine={"tensor_parallel": 3})
    config = replace(config, router=replace(config.router, port=0, http_port=0))
    with pytest.raises(StartError, match=r"pools.prefill.engine: tensor_parallel 3: num_attention_heads 4 is no mult"):
        check(config)
