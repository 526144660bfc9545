"""What outlives every process of a cluster: notes in Ray's own store, found again by whoever comes next.

Owns: the notes' keys and their form. Refuses to know: when a note is made, and what follows from it.

A note lasts as long as the Ray that it is in, with RAY_gcs_storage also through a restart of Ray's head. These calls
block, and for as long as Ray's head is away.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

from ray.experimental import internal_kv

from baton.proto.messages import Role

NAMESPACE = "baton"


class Note:
    """One value under one key. Clusters in different namespaces share a Ray, and no note."""

    def __init__(self, namespace: str, *path: str) -> None:
        self._key = "/".join((namespace, *path))

    def get(self) -> str | None:
        noted: bytes | None = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE)
        return noted.decode() if noted is not None else None

    def put(self, value: str) -> None:
        internal_kv._internal_kv_put(self._key, value, namespace=NAMESPACE)

    def forget(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=NAMESPACE)


class NotedRole:
    """The role that was given to a worker after its start, as its next process finds it."""

    def __init__(self, namespace: str, worker_id: str) -> None:
        self._note = Note(namespace, worker_id, "role")

    def read(self) -> Role | None:
        noted = self._note.get()
        return Role(noted) if noted else None

    def write(self, role: Role) -> None:
        self._note.put(role.value)

    def forget(self) -> None:
        self._note.forget()


class NotedLife:
    """Which process fills a worker's post: a name that each process makes for itself when it starts."""

    def __init__(self, namespace: str, worker_id: str) -> None:
        self._note = Note(namespace, worker_id, "life")

    def read(self) -> str | None:
        return self._note.get()

    def write(self, life: str) -> None:
        self._note.put(life)

    def forget(self) -> None:
        self._note.forget()


class NotedWorkers:
    """The numbers of a pool's workers, once they differ from what the configuration says: after a scaling, a drain."""

    def __init__(self, namespace: str, pool: str) -> None:
        self._note = Note(namespace, pool, "workers")

    def read(self) -> list[int] | None:
        noted = self._note.get()
        numbers: list[int] | None = json.loads(noted) if noted else None
        return numbers

    def write(self, numbers: Iterable[int]) -> None:
        self._note.put(json.dumps(sorted(numbers)))

    def forget(self) -> None:
        self._note.forget()


class NotedNodes:
    """Machines, by Ray's ids of them, that were drained: no worker is placed there again."""

    def __init__(self, namespace: str) -> None:
        self._note = Note(namespace, "drained-nodes")

    def read(self) -> list[str]:
        node_ids: list[str] = json.loads(self._note.get() or "[]")
        return node_ids

    def write(self, node_ids: Collection[str]) -> None:
        self._note.put(json.dumps(sorted(node_ids)))

    def forget(self) -> None:
        self._note.forget()


def forget_all(namespace: str) -> None:
    """Forgets whatever was noted of a cluster."""
    internal_kv._internal_kv_del(f"{namespace}/", del_by_prefix=True, namespace=NAMESPACE)
