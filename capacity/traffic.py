"""What one run is sent: so many requests of a workload or of a trace, at a rate, by a seed.

Owns: `Traffic`, and fitting requests to the model that is to serve them. Every configuration that is compared gets the
same `Traffic`, and so the same arrivals.
Refuses to know: how traffic is made (`workload`) or read (`trace`), and who serves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from baton.capacity import workload
from baton.capacity.trace import Trace
from baton.capacity.workload import Arrival


@dataclass(frozen=True, slots=True)
class Traffic:
    """`name` is that of a workload, or of a trace's file where there is a `trace`.

    Of a trace, `seed` says which stretch of `num_requests` requests is replayed: 0 the first, 1 the next, and so on, as
    far as it goes.
    """

    name: str
    rate: float
    num_requests: int
    seed: int = 0
    scale_prompts: float = 1.0
    scale_outputs: float = 1.0
    trace: Trace | None = None

    def arrivals(self, max_model_len: int) -> Iterator[Arrival]:
        """One by one, from about time 0. What is longer than the model allows is cut, the output last."""
        for arrival in self._arrivals():
            yield fitted(arrival, max_model_len)

    def _arrivals(self) -> Iterator[Arrival]:
        if self.trace is None:
            endless = workload.arrivals(self.name, self.rate, self.seed, self.scale_prompts, self.scale_outputs)
            yield from islice(endless, self.num_requests)
            return
        start = self.seed * self.num_requests % max(self.trace.num_requests - self.num_requests + 1, 1)
        replayed = self.trace.arrivals(self.rate, self.scale_prompts, self.scale_outputs)
        first_s: float | None = None
        for arrival in islice(replayed, start, start + self.num_requests):
            first_s = arrival.time_s if first_s is None else first_s
            yield replace(arrival, time_s=arrival.time_s - first_s)

    def drifted(self, prompts: float, outputs: float) -> Traffic:
        """With lengths that have moved by these factors."""
        return replace(self, scale_prompts=self.scale_prompts * prompts, scale_outputs=self.scale_outputs * outputs)


def fitted(arrival: Arrival, max_model_len: int) -> Arrival:
    output = min(arrival.output_tokens, max(max_model_len // 2, 1))
    prompt = min(arrival.prompt_tokens, max(max_model_len - output, 1))
    if (prompt, output) == (arrival.prompt_tokens, arrival.output_tokens):
        return arrival
    return replace(
        arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_tokens=min(arrival.prefix_tokens, prompt),
        shared_tokens=min(arrival.shared_tokens, prompt),
    )
