"""Whether a machine has what Baton needs: memory, /dev/shm, GPUs.

Owns: the bounds. Refuses to know: where the figures come from, and what the needs follow from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.client.checks.finding import Finding, gib
from baton.proto import worker_pb2 as wire

RAY_SHM_BYTES = 128 << 20  # Ray's object store, as Baton starts it
PROCESS_SHM_BYTES = 8 << 20  # UCX's queues to its neighbours, and semaphores
RUNNING_SHM_BYTES = 32 << 20
RUNNING_MEMORY_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Needs:
    """What all processes that would start on a machine take of it. `kv_bytes`, `weight_bytes`: outside of GPUs."""

    num_processes: int
    kv_bytes: int
    weight_bytes: int
    num_gpus: float


def room_to_start(machine: wire.Machine, needs: Needs) -> Iterator[Finding]:
    """What stands in the way of a start on this machine."""
    needed = needs.kv_bytes + needs.weight_bytes
    if needed > machine.available_bytes:
        yield Finding(
            "memory",
            machine.host,
            f"the KV pools of {needs.num_processes} processes take {gib(needs.kv_bytes)} and their weights about "
            f"{gib(needs.weight_bytes)}, {gib(machine.available_bytes)} of {gib(machine.memory_bytes)} are available",
            "lower metadata.baton.engine.kv_cache_gib or the pools' sizes, or free memory",
        )
    shm = RAY_SHM_BYTES + PROCESS_SHM_BYTES * needs.num_processes
    yield from _shared_memory(machine, shm, "a start needs")
    if needs.num_gpus > machine.num_gpus:
        yield Finding(
            "gpus",
            machine.host,
            f"the pools take {needs.num_gpus:g} GPUs, this machine shows {machine.num_gpus}",
            "use engine.device: cpu, smaller pools, or look whether driver and container show the GPUs (nvidia-smi)",
        )


def room_to_run(machine: wire.Machine) -> Iterator[Finding]:
    """What a machine on which Baton runs is short of."""
    if machine.available_bytes < machine.memory_bytes * RUNNING_MEMORY_SHARE:
        yield Finding(
            "memory",
            machine.host,
            f"{gib(machine.available_bytes)} of {gib(machine.memory_bytes)} of memory are available, at least "
            f"{RUNNING_MEMORY_SHARE:.0%} should be",
            "end what else runs there, or lower engine.kv_cache_gib: the system kills a process when nothing is left",
        )
    yield from _shared_memory(machine, RUNNING_SHM_BYTES, "running processes need")


def _shared_memory(machine: wire.Machine, needed: int, who: str) -> Iterator[Finding]:
    if machine.shm_free_bytes < needed:
        yield Finding(
            "shm",
            machine.host,
            f"/dev/shm has {gib(machine.shm_free_bytes)} free of {gib(machine.shm_bytes)}, {who} {gib(needed)} for "
            "Ray's object store and UCX",
            "remove stale files from /dev/shm, or make it larger: mount -o remount,size=2G /dev/shm, --shm-size of a "
            "container, an emptyDir with medium: Memory in Kubernetes",
        )
