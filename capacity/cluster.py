"""What is compared: a cluster of a certain shape under certain settings. A row of a sweep.

Owns: `PoolSetup` and `ClusterSetup`. Refuses to know: traffic, and how a cluster is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.proto.messages import Role
from baton.proto.settings import SchedulerSettings
from baton.router.config import RouterSettings


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """`size` workers that are all alike, each with `num_blocks` blocks of KV."""

    role: Role
    size: int
    num_blocks: int
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """A cluster. `label` is what people read: `2:1`, `co-located`.

    `shared_cores`: all workers, the router and the client are on one machine with so many cores. None: every worker has
    cores of its own, and nothing slows it down.
    """

    label: str
    pools: tuple[PoolSetup, ...]
    max_model_len: int
    block_size: int = 16
    kv_bytes_per_token: int = 0
    router: RouterSettings = field(default_factory=RouterSettings)
    lease_s: float = 10.0
    idle_report_s: float = 0.1
    shared_cores: float | None = None
