"""Small clusters and cost models for tests of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.capacity.cluster import ClusterSetup, PoolSetup
from baton.capacity.cost import CostModel, Curve, Origin, RoutingCost, Source, StepCost, TransferCost
from baton.capacity.virtual_loop import VirtualLoop
from baton.proto.messages import Role
from baton.proto.settings import SchedulerSettings
from baton.router.config import RouterSettings

SLOW_LINK = TransferCost(start_s=0.001, byte_s=1e-8, control_s=0.002)
NEAR = RoutingCost(routing_s=0.002, delivery_s=0.003, report_delay_s=0.001)


def cost_model(transfer: TransferCost = SLOW_LINK, routing: RoutingCost = NEAR) -> CostModel:
    """A step takes 10 ms, 0.1 ms for each prompt token and 0.1 ms for each sequence that decodes."""
    steps = StepCost(rows=Curve((0.0, 1.0), (0.0, 1e-4)), overhead_s=0.01)
    return CostModel(Origin(Source.ESTIMATE), steps, transfer, routing)


def cluster(
    prefill: int = 0,
    decode: int = 0,
    colocated: int = 0,
    num_blocks: int = 1024,
    router: RouterSettings | None = None,
    kv_bytes_per_token: int = 100,
    **scheduler: object,
) -> ClusterSetup:
    sizes = {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: colocated}
    settings = SchedulerSettings(**{"max_num_batched_tokens": 256, "max_num_seqs": 64, **scheduler})
    pools = tuple(PoolSetup(role, size, num_blocks, settings) for role, size in sizes.items() if size)
    return ClusterSetup(
        "test", pools, max_model_len=8192, kv_bytes_per_token=kv_bytes_per_token, router=router or RouterSettings()
    )


def ends_on(loop: VirtualLoop, works: Sequence[tuple[float, Callable[[Callable[[], None]], object]]]) -> list[float]:
    """When works end of which each begins at a time, by a function that is told what to call at its end."""
    ends = [0.0] * len(works)
    left = len(works)

    def ended(index: int) -> None:
        nonlocal left
        ends[index] = loop.time()
        left -= 1
        if not left:
            loop.stop()

    for index, (start_s, begin) in enumerate(works):
        loop.at(start_s, lambda index=index, begin=begin: begin(lambda: ended(index)))
    loop.run()
    return ends
