"""The bytes by which a peer finds a pool: what `attach` returns and `Pull.address` carries.

Owns: their encoding, of one pool and of those of all ranks of a worker. Refuses to know: what a transport keeps in
`metadata`. Bytes from a peer are data, never code: a fixed header, lengths and a crc over all, checked before any is
believed.

    magic | crc32                                                     magic | crc32
    connector | on gpu | device index | base | block bytes | ...      ranks | length, address | length, address | ...
    num blocks | first head | num heads | geometry | lengths
    name | metadata
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.kvtransfer.connector import AddressRefused, KvPool
from baton.kvtransfer.layout import HeadCut
from baton.proto.messages import KvGeometry

_MAGIC = b"KVA2"
_GROUP_MAGIC = b"KVG1"
_PREFIX = struct.Struct("<4sI")
_HEADER = struct.Struct("<8s?iQQIII8sHI")
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Where a pool lies. `name` is unique to one connector of one process; `geometry` is a digest of the KvGeometry;
    the pool holds `num_heads` of the model's KV heads, from `first_head` on.
    """

    connector: str
    name: str
    on_gpu: bool
    device_index: int
    base: int
    block_bytes: int
    num_blocks: int
    first_head: int
    num_heads: int
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
            first_head=pool.first_head,
            num_heads=len(pool.heads),
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
            self.first_head,
            self.num_heads,
            self.geometry,
            len(name),
            len(self.metadata),
        )
        body += name + self.metadata
        return _PREFIX.pack(_MAGIC, zlib.crc32(body)) + body

    @classmethod
    def decode(cls, address: bytes) -> PoolAddress:
        """Raises AddressRefused if these are not the bytes that `encode` made."""
        body = _checked_body(address, _MAGIC, _HEADER.size)
        fields = _HEADER.unpack_from(body)
        connector, on_gpu, index, base, block_bytes, num_blocks, first_head, num_heads = fields[:8]
        geometry, name_len, meta_len = fields[8:]
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
            first_head=first_head,
            num_heads=num_heads,
            geometry=geometry,
            metadata=rest[name_len:],
        )

    def require_match(self, pool: KvPool, connector: str, heads: range | None = None) -> HeadCut:
        """How blocks of the pool at this address are read into blocks of `pool`, or these heads of them.

        Raises AddressRefused if they cannot be.
        """
        if self.connector != connector:
            raise AddressRefused(f"address of connector {self.connector!r}, this is {connector!r}")
        mine = geometry_digest(pool.geometry)
        if self.geometry != mine:
            raise AddressRefused(f"geometry {self.geometry.hex()} there, {mine.hex()} here ({pool.geometry})")
        if self.block_bytes * len(pool.heads) != pool.block_bytes * self.num_heads:
            problem = f"blocks of {self.block_bytes} bytes for {self.num_heads} heads there"
            raise AddressRefused(f"{problem}, of {pool.block_bytes} for {len(pool.heads)} here")
        theirs = range(self.first_head, self.first_head + self.num_heads)
        try:
            return HeadCut.of(theirs, pool.heads, pool.heads if heads is None else heads)
        except ValueError as error:
            raise AddressRefused(str(error)) from error

    def require_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Raises AddressRefused if the pool at this address lacks one of these blocks."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise AddressRefused(
                f"source blocks {min(block_ids)}..{max(block_ids)} of {self.name}, which has {self.num_blocks}"
            )


def encode_group(addresses: Sequence[bytes]) -> bytes:
    """The addresses of a worker's ranks, in their order, as one."""
    body = _COUNT.pack(len(addresses)) + b"".join(_COUNT.pack(len(address)) + address for address in addresses)
    return _PREFIX.pack(_GROUP_MAGIC, zlib.crc32(body)) + body


def decode_group(address: bytes) -> tuple[bytes, ...]:
    """Raises AddressRefused if these are not the bytes that `encode_group` made."""
    body = _checked_body(address, _GROUP_MAGIC, _COUNT.size)
    (count,) = _COUNT.unpack_from(body)
    at = _COUNT.size
    addresses: list[bytes] = []
    for _ in range(count):
        if at + _COUNT.size > len(body):
            raise AddressRefused(f"address of {count} ranks ends within that of rank {len(addresses)}")
        (length,) = _COUNT.unpack_from(body, at)
        at += _COUNT.size
        addresses.append(body[at : at + length])
        at += length
    if not addresses or at != len(body):
        raise AddressRefused(f"address of {count} ranks: {len(body)} bytes, {at} expected")
    return tuple(addresses)


def _checked_body(address: bytes, magic: bytes, least: int) -> bytes:
    if len(address) < _PREFIX.size + least:
        raise AddressRefused(f"address of {len(address)} bytes, at least {_PREFIX.size + least} expected")
    mark, crc = _PREFIX.unpack_from(address)
    body = address[_PREFIX.size :]
    if mark != magic or crc != zlib.crc32(body):
        raise AddressRefused(f"address of {len(address)} bytes: mark {mark!r}, crc {crc} over {zlib.crc32(body)}")
    return body


def geometry_digest(geometry: KvGeometry) -> bytes:
    """Eight bytes that differ where two geometries do; over how many ranks the heads are split is no difference."""
    alike = replace(geometry, tp_size=1).to_wire().SerializeToString(deterministic=True)
    return hashlib.blake2b(alike, digest_size=8).digest()
