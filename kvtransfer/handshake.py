"""What two workers must agree on before KV moves from one to the other, compared when they first meet.

Owns: which fields may not differ, and the sentence that names the first that does. Refuses to know: streams, and what
becomes of a pair that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.kvtransfer.layout import head_map
from baton.proto.messages import KvGeometry


@dataclass(frozen=True, slots=True)
class Party:
    """One side of a meeting, as it describes itself."""

    worker_id: str
    connector: str
    geometry: KvGeometry


def mismatch(lender: Party, reader: Party) -> str:
    """Why the reader cannot take the lender's KV: the field, with both values; empty if it can."""
    if name := lender.geometry.differs_in(reader.geometry):
        return _both(name, lender, getattr(lender.geometry, name), reader, getattr(reader.geometry, name))
    if lender.connector != reader.connector:
        return _both("connector", lender, lender.connector, reader, reader.connector)
    ranks = lender.geometry.tp_size, reader.geometry.tp_size
    if lender.connector == "nccl" and ranks[0] != ranks[1]:
        reads = "the connector nccl reads whole blocks"
        return f"{_both('tensor_parallel', lender, ranks[0], reader, ranks[1])}: {reads}"
    try:
        head_map(*ranks, lender.geometry.num_kv_heads)
    except ValueError as error:
        return f"{_both('tensor_parallel', lender, ranks[0], reader, ranks[1])}: {error}"
    return ""


def _both(name: str, lender: Party, lent: object, reader: Party, read: object) -> str:
    return f"{name} is {lent!r} on {lender.worker_id} and {read!r} on {reader.worker_id}"
