"""What a pocket calculator says: how long workers of each kind work on a request, and in which ratio they match.

Owns: the rate-matched ratio, a formula without queues, bursts and hand-offs. It starts searches and stands beside what
the simulator finds.
Refuses to know: schedulers and time.

    prefill   a worker reads its whole chunk budget in every step           seconds of prefill work of a request
    decode    a worker decodes as many sequences as its step stays within   seconds of decode work of a request
              the TPOT bound, its memory and `max_num_seqs` allow
    share     prefill / (prefill + decode): of the workers, those that should be prefill workers
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.capacity.cluster import ClusterSetup, PoolSetup
from baton.capacity.cost import CostModel
from baton.capacity.grid import Shape
from baton.capacity.outcome import Slo
from baton.capacity.workload import Arrival
from baton.proto.messages import Role


@dataclass(frozen=True, slots=True)
class Lengths:
    """Means over requests. `pairs`: of tokens that attend to one another while a prompt is read. `context`: of a token
    that is generated."""

    prompt: float
    output: float
    pairs: float
    context: float

    @classmethod
    def of(cls, arrivals: Iterable[Arrival]) -> Lengths:
        """Prompts count as far as they are not shared with the session's request before."""
        number = prompt = output = pairs = context = 0.0
        for arrival in arrivals:
            new = arrival.prompt_tokens - min(arrival.prefix_tokens, arrival.prompt_tokens - 1)
            number += 1
            prompt += new
            output += arrival.output_tokens
            pairs += new * (arrival.prompt_tokens - new) + new * (new + 1) / 2
            context += arrival.output_tokens * (arrival.prompt_tokens + arrival.output_tokens / 2)
        number = max(number, 1)
        return cls(prompt / number, output / number, pairs / number, context / max(output, 1))


@dataclass(frozen=True, slots=True)
class Match:
    """Worker seconds of one request, alone in its pool. `batch`: sequences of a decode step, `is_slow` if even one of
    them is slower than the TPOT bound."""

    prefill_s: float
    decode_s: float
    batch: int
    is_slow: bool

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / (self.prefill_s + self.decode_s)

    def split(self, total: int) -> Shape:
        """The whole numbers nearest to the share, at least one of each."""
        prefill = min(max(round(total * self.prefill_share), 1), max(total - 1, 1))
        return Shape(prefill, max(total - prefill, 1))

    def rate(self, shape: Shape) -> float:
        """Requests a second that the scarcer pool could serve if it were never idle."""
        if shape.colocated:
            return shape.colocated / (self.prefill_s + self.decode_s)
        return min(shape.prefill / self.prefill_s, shape.decode / self.decode_s)


def match(setup: ClusterSetup, cost: CostModel, lengths: Lengths, slo: Slo) -> Match:
    """Of the pools that read prompts and those that write: the same one where workers are co-located."""
    reader = _pool(setup, Role.PREFILL)
    writer = _pool(setup, Role.DECODE)
    budget = reader.scheduler.max_num_batched_tokens
    pairs = round(lengths.pairs / max(lengths.prompt, 1.0) * budget)
    prefill_s = cost.step_s(budget, pairs, 0, 0) / budget * lengths.prompt
    held = max(int(writer.num_blocks * setup.block_size / max(lengths.context + lengths.output / 2, 1.0)), 1)
    most = min(writer.scheduler.max_num_seqs, writer.scheduler.max_num_batched_tokens, held)
    batch = _largest(most, lambda number: cost.step_s(0, 0, number, round(number * lengths.context)) <= slo.tpot_s)
    step_s = cost.step_s(0, 0, max(batch, 1), round(max(batch, 1) * lengths.context))
    decode_s = step_s / max(batch, 1) * max(lengths.output - 1, 0.0)
    return Match(max(prefill_s, 1e-9), max(decode_s, 1e-9), batch, is_slow=batch == 0 and math.isfinite(slo.tpot_s))


def _pool(setup: ClusterSetup, role: Role) -> PoolSetup:
    return next((pool for pool in setup.pools if pool.role is role), setup.pools[0])


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, where all below it fit too; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
