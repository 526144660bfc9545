"""The bytes by which a peer finds a pool: what `attach` returns and `Pull.address` carries.

Owns: their encoding. Refuses to know: what a transport keeps in `metadata`.
Bytes from a peer are data, never code: a fixed header, two lengths and a crc over all, checked before any is believed.

    magic | crc32
    connector | on gpu | device index | base | block bytes | num blocks | geometry | name length | metadata length
    name | metadata
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

from baton.kvtransfer.connector import AddressRefused, KvPool
from baton.proto.messages import KvGeometry

_MAGIC = b"KVA1"
_PREFIX = struct.Struct("<4sI")
_HEADER = struct.Struct("<8s?iQQI8sHI")


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Where a pool lies. `name` is unique to one connector of one process; `geometry` is a digest of the KvGeometry."""

    connector: str
    name: str
    on_gpu: bool
    device_index: int
    base: int
    block_bytes: int
    num_blocks: int
    geometry: bytes
    metadata: bytes = b""

    @classmethod
    def of(cls, pool: KvPool, connector: str, name: str, metadata: bytes = b"") -> PoolAddress:
        tensor = pool.tensor
        return cls(
            connector=connector,
            name=name,
            on_gpu=tensor.is_cuda,
            device_index=tensor.get_device() if tensor.is_cuda else 0,
            base=tensor.data_ptr(),
            block_bytes=pool.block_bytes,
            num_blocks=pool.num_blocks,
            geometry=geometry_digest(pool.geometry),
            metadata=metadata,
        )

    def encode(self) -> bytes:
        name = self.name.encode()
        body = _HEADER.pack(
            self.connector.encode(),
            self.on_gpu,
            self.device_index,
            self.base,
            self.block_bytes,
            self.num_blocks,
            self.geometry,
            len(name),
            len(self.metadata),
        )
        body += name + self.metadata
        return _PREFIX.pack(_MAGIC, zlib.crc32(body)) + body

    @classmethod
    def decode(cls, address: bytes) -> PoolAddress:
        """Raises AddressRefused if these are not the bytes that `encode` made."""
        if len(address) < _PREFIX.size + _HEADER.size:
            raise AddressRefused(f"address of {len(address)} bytes, at least {_PREFIX.size + _HEADER.size} expected")
        magic, crc = _PREFIX.unpack_from(address)
        body = address[_PREFIX.size :]
        if magic != _MAGIC or crc != zlib.crc32(body):
            raise AddressRefused(f"address of {len(address)} bytes: mark {magic!r}, crc {crc} over {zlib.crc32(body)}")
        connector, on_gpu, index, base, block_bytes, num_blocks, geometry, name_len, meta_len = _HEADER.unpack_from(
            body
        )
        rest = body[_HEADER.size :]
        if len(rest) != name_len + meta_len:
            raise AddressRefused(f"address carries {len(rest)} bytes, its header says {name_len} + {meta_len}")
        return cls(
            connector=connector.rstrip(b"\0").decode(),
            name=rest[:name_len].decode(),
            on_gpu=on_gpu,
            device_index=index,
            base=base,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            geometry=geometry,
            metadata=rest[name_len:],
        )

    def require_match(self, pool: KvPool, connector: str) -> None:
        """Raises AddressRefused unless blocks of the pool at this address can be read into blocks of `pool`."""
        if self.connector != connector:
            raise AddressRefused(f"address of connector {self.connector!r}, this is {connector!r}")
        if self.block_bytes != pool.block_bytes:
            raise AddressRefused(f"blocks of {self.block_bytes} bytes there, of {pool.block_bytes} here")
        mine = geometry_digest(pool.geometry)
        if self.geometry != mine:
            raise AddressRefused(f"geometry {self.geometry.hex()} there, {mine.hex()} here ({pool.geometry})")

    def require_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Raises AddressRefused if the pool at this address lacks one of these blocks."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise AddressRefused(
                f"source blocks {min(block_ids)}..{max(block_ids)} of {self.name}, which has {self.num_blocks}"
            )


def geometry_digest(geometry: KvGeometry) -> bytes:
    """Eight bytes that differ where two geometries differ."""
    return hashlib.blake2b(geometry.to_wire().SerializeToString(deterministic=True), digest_size=8).digest()
