"""What befalls a simulated cluster while it serves: a worker fails, drains, takes another role, a pool is resized.

Owns: these events as values. Refuses to know: what follows from them (`capacity.simulate`).
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.proto.messages import Role


@dataclass(frozen=True, slots=True)
class WorkerFails:
    """The worker's process dies, with all that it holds. After `back_after_s` it is back, empty; None: never."""

    at_s: float
    worker_id: str
    back_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerDrains:
    """The worker gets nothing new. What it has not ended after the router's `drain_timeout_s` moves to others."""

    at_s: float
    worker_id: str


@dataclass(frozen=True, slots=True)
class RoleChanges:
    """The worker drains and serves as another role `change_s` after that."""

    at_s: float
    worker_id: str
    role: Role
    change_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolResizes:
    """New workers of a pool serve `start_s` later; surplus ones, the last, drain and go."""

    at_s: float
    pool: str
    size: int
    start_s: float = 0.0


ClusterEvent = WorkerFails | WorkerDrains | RoleChanges | PoolResizes
