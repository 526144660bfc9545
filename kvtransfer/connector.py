"""The interface through which KV blocks move from one worker's pool to another's.

Owns: the verbs and the values that they take. Refuses to know: sequences, leases, schedulers, gRPC.

    source:       attach -> export ----------------------------------> release
    destination:  attach -> pull -> poll: FINISHED or FAILED, then SETTLED, each exactly once a pull

Destination blocks of a pull may be written until it is SETTLED: they must not be reused before. `pull` and `poll` never
block; both may be called from any one thread at a time.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast

import torch

from baton.proto.messages import KvGeometry
from baton.proto.settings import TransferSettings


class ConnectorError(Exception):
    """A connector cannot do what was asked of it."""


class AddressRefused(ConnectorError):
    """A peer's address is garbled, or its pool and ours do not fit. Reaches callers as the reason of a failed pull."""


class TransportUnavailable(ConnectorError):
    """The transport's library is missing or does not start on this machine."""


@dataclass(frozen=True, slots=True)
class KvPool:
    """A rank's whole KV memory: one tensor [block, layer, kv_head, K/V, token, head_dim], contiguous.

    `first_head`: of the model's KV heads the first that is in it; `geometry` is the whole model's. The tensor must stay
    mapped until the connector is closed: a peer's read of unmapped memory can end the process.
    """

    tensor: torch.Tensor
    geometry: KvGeometry
    first_head: int = 0

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[0]

    @property
    def heads(self) -> range:
        """The KV heads that are here, counted over the whole model."""
        return range(self.first_head, self.first_head + self.tensor.shape[2])

    @property
    def block_bytes(self) -> int:
        return self.tensor[0].numel() * self.tensor.element_size()

    def require_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Raises ConnectorError if the pool lacks one of these blocks."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise ConnectorError(f"blocks {min(block_ids)}..{max(block_ids)} of a pool of {self.num_blocks}")


@dataclass(frozen=True, slots=True)
class Pull:
    """A read of whole blocks: `source_blocks[i]` of the peer at `address` into our `destination_blocks[i]`.

    `pull_id` is unique for the life of the connector. `checksum` is the source's over these blocks, 0 if unknown.
    `heads`: the KV heads to read, counted over the whole model; None reads all that our pool has. A checksum is then of
    more than is read: it asks for the checksums of the heads that have landed, in the event.
    """

    pull_id: int
    peer: str
    address: bytes
    source_blocks: tuple[int, ...]
    destination_blocks: tuple[int, ...]
    checksum: int = 0
    heads: range | None = None


class PullState(Enum):
    FINISHED = "finished"
    FAILED = "failed"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True)
class PullEvent:
    pull_id: int
    state: PullState
    num_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    checksums: tuple[int, ...] = ()


class Connector(Protocol):
    """Moves KV blocks between pools. See the module's drawing for the order of calls."""

    @property
    def name(self) -> str:
        """The connector's name in the configuration."""
        ...

    def attach(self, pool: KvPool) -> bytes:
        """Registers the pool; returns the address that peers need to read from it. Called once."""
        ...

    def export(self, export_id: str, block_ids: tuple[int, ...]) -> int:
        """Lets peers read these blocks until `release(export_id)`; may be called again with further blocks.

        Returns the checksum of the blocks named, 0 where none is computed; raises ConnectorError if the pool lacks one.
        """
        ...

    def pull(self, pull: Pull) -> None:
        """Starts a read and returns at once. Every outcome comes from `poll`, errors included."""
        ...

    def poll(self) -> list[PullEvent]:
        """What has happened since the last call, in order. Never blocks."""
        ...

    def transport(self, peer: str) -> str:
        """How KV comes from a peer that was read from, in a few words; empty if that is not known."""
        ...

    def forget(self, peer: str) -> None:
        """Drops what is known of a peer that is gone. Its pulls fail, and settle when nothing writes any more."""
        ...

    def release(self, export_id: str) -> None:
        """Ends an export. Unknown ids are ignored: release may race with the end of a peer."""
        ...

    def close(self) -> None:
        """Fails what is in flight, waits until it has settled (at most a few seconds) and frees the transport."""
        ...


def open_connector(settings: TransferSettings) -> Connector:
    """The connector that the configuration names: class `<Name>Connector` of the module `connectors/<name>.py`.

    Raises TransportUnavailable if it cannot run here.
    """
    module = importlib.import_module(f"baton.kvtransfer.connectors.{settings.connector}")
    return cast(Connector, getattr(module, f"{settings.connector.capitalize()}Connector")(settings))
