"""Steps as a calibration sees them, and the cost model that is the truth about them."""

from __future__ import annotations

import random

from baton.capacity.cost import CostModel, Curve, Origin, Source, StepCost

ORIGIN = Origin(Source.MEASURED)
TRUTH = CostModel(
    ORIGIN,
    StepCost(Curve((1.0, 8.0, 64.0, 512.0, 4096.0), (0.0, 0.002, 0.01, 0.05, 0.5)), 0.004, 3e-8, 5e-5, 2e-7),
)
Work = tuple[int, int, int, int]


def works(number: int, generator: random.Random) -> list[Work]:
    """Steps that only decode, only read prompts, and do both."""
    found = []
    for _ in range(number):
        kind = generator.random()
        prefill = pairs = decode = kv_tokens = 0
        if kind < 0.6 or kind > 0.8:
            decode = int(2 ** generator.uniform(0, 7))
            kv_tokens = decode * int(2 ** generator.uniform(4, 11))
        if kind > 0.6:
            prefill, start = int(2 ** generator.uniform(1, 11)), int(2 ** generator.uniform(0, 11))
            pairs = prefill * start + prefill * (prefill + 1) // 2
        found.append((prefill, pairs, decode, kv_tokens))
    return found
