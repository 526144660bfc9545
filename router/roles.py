"""Whether a worker may take another role, or leave, and for how long its running requests may hold that up.

Owns: these rules. Refuses to know: how the change is made (`baton.fleet` asks, `engine.roles` does it).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.proto.messages import Role
from baton.router.placement import can_serve


def refusal(worker_id: str, role: Role, others: Collection[Role]) -> str:
    """Why a worker may not take a role; empty if it may. `others`: the roles of those that serve beside it."""
    after = {*others, role}
    if can_serve(after):
        return ""
    lacking = Role.DECODE if Role.PREFILL in after else Role.PREFILL
    return (
        f"{worker_id} as a {role} worker would leave no {lacking} worker and no colocated one: nothing could be served"
    )


def departure_refusal(leaving: Sequence[str], others: Collection[Role]) -> str:
    """Why these workers may not leave; empty if they may. `others`: the roles of those that serve without them."""
    if can_serve(others) or not leaving:
        return ""
    left = ", ".join(sorted(role.value for role in set(others)))
    remain = f"only {left} workers would be left" if left else "no worker would be left"
    return f"without {', '.join(leaving)} nothing could be served: {remain}"


def allowed_drain_s(wanted_s: float, others: Collection[Role], no_worker_grace_s: float) -> float:
    """How long running legs may go on. Where nobody else can serve, new requests wait meanwhile, and are refused when
    the grace is over: half of it is left for the change."""
    return wanted_s if can_serve(others) else min(wanted_s, no_worker_grace_s / 2)
