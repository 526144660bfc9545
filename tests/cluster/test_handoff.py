"""Every prompt token's KV reaches decode exactly once, in real processes. `benchmarks/handoff.py` is the long one."""

from __future__ import annotations

import handoff
import pytest
from clusters import shape

pytestmark = pytest.mark.cluster


def test_every_prompt_token_is_transferred_or_cached_exactly_once(launch, tiny_model_dir):
    model_dir = tiny_model_dir("llama")
    with launch(shape(str(model_dir), 2, 2, budget=64), model_dir) as cluster:
        outcome = handoff.run(cluster.address, num_requests=120, concurrency=32)
    assert outcome.violations == []
