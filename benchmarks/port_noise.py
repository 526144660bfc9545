"""Random bytes for a port: what strangers, scanners and broken clients say to one, and those who say nothing.

Owns: the noise and the attackers. Refuses to know: what listens there, and what it may answer.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

ATTACKERS = 16
HOLD_S = 0.05
MAX_HELD = 64
HEADERS, RST_STREAM, END_STREAM = 1, 3, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METHODS = (
    b"/baton.v1.Inference/Generate",
    b"/baton.v1.Cluster/WatchStatus",
    b"/baton.v1.Worker/Connect",
    b"/baton.v1.Handoff/Watch",
    b"/baton.v1.Replica/Follow",
    b"/grpc.health.v1.Health/Watch",
    b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    b"/nothing",
)


@dataclass(frozen=True, slots=True)
class Port:
    """Where something listens, and whose process it is. `tls`: whether what it reads first should be a handshake."""

    name: str
    host: str
    number: int
    pid: int
    tls: bool = False


@dataclass(slots=True)
class Tally:
    connections: int = 0
    sent_bytes: int = 0
    refused: int = 0


def noise(rng: random.Random) -> bytes:
    """What one connection says, of one of many kinds."""
    return rng.choice((_bytes, _http, _frames, _frames, _call, _call, _hello, lambda rng: b""))(rng)


def _bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 9, 64, 1500, 70_000)))


def _http(rng: random.Random) -> bytes:
    method, version = rng.choice((b"GET", b"POST", b"\xff", b"PRI")), rng.choice((b"1.1", b"0.9", b"2.0", b"x"))
    head = b"%s /%s HTTP/%s\r\n" % (method, rng.randbytes(rng.randint(0, 30)), version)
    fields = b"".join(b"%s: %s\r\n" % (rng.randbytes(4), rng.randbytes(20)) for _ in range(rng.randint(0, 50)))
    return head + fields + rng.choice((b"", b"\r\n", b"\r\n" + rng.randbytes(500)))


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """Of HTTP/2; with a length that need not be the payload's."""
    length = len(payload) if length is None else length
    return struct.pack(">I", length & 0xFFFFFF)[1:] + struct.pack(">BBI", kind & 0xFF, flags & 0xFF, stream) + payload


GREETING = PREFACE + frame(4, 0, 0, b"")


def _frames(rng: random.Random) -> bytes:
    """A connection that begins as it should and goes on with frames of any kind."""
    said = GREETING
    for _ in range(rng.randint(1, 30)):
        payload = rng.randbytes(rng.choice((0, 4, 5, 8, 40, 400)))
        length = len(payload) if rng.random() < 0.9 else rng.randrange(1 << 24)
        said += frame(
            rng.randrange(12), rng.choice((0, 1, 4, 5, 8, 0x2D, 255)), rng.choice((0, 1, 2, 3, 77)), payload, length
        )
    return said


def half_open(number: int, method: bytes = METHODS[0]) -> bytes:
    """A connection with so many calls whose requests never come."""
    return GREETING + b"".join(opened(2 * index + 1, method) for index in range(number))


def opened(stream: int, method: bytes, content_type: bytes = b"application/grpc", junk: bytes = b"") -> bytes:
    """The headers of a call."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method),
        (b":authority", b"x"),
        (b"content-type", content_type),
        (b"te", b"trailers"),
    ]
    if junk:
        fields.append((b"x-junk-bin", junk))
    return frame(1, 4, stream, b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields))


def _call(rng: random.Random) -> bytes:
    """Calls whose requests are garbage, or never come."""
    said = GREETING
    for number in range(rng.randint(1, 40)):
        stream = 2 * number + 1
        content_type = rng.choice((b"application/grpc", b"text/plain"))
        said += opened(stream, rng.choice(METHODS), content_type, rng.choice((b"", b"", b"", rng.randbytes(100))))
        if rng.random() < 0.7:
            body = rng.randbytes(rng.randint(0, 300))
            length = len(body) if rng.random() < 0.7 else rng.choice((0, 1 << 20, 0xFFFFFFFF))
            said += frame(0, rng.choice((0, 1)), stream, struct.pack(">BI", rng.choice((0, 0, 1, 7)), length) + body)
    return said


def _text(value: bytes) -> bytes:
    """A literal of HPACK, its length in the prefix of 7 bits."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    return b"\x7f" + bytes([len(value) - 127]) + value


def _hello(rng: random.Random) -> bytes:
    """The start of a TLS handshake, cut off or wrong."""
    return (
        b"\x16\x03\x01" + struct.pack(">H", rng.choice((0, 200, 16_384, 65_535))) + rng.randbytes(rng.randint(0, 600))
    )


async def bombard(port: Port, seconds: float, seed: int, attackers: int = ATTACKERS) -> Tally:
    """Connects, says something and goes away, or stays and says nothing more, for so long. Never raises for what the
    other side does."""
    tally = Tally()
    context = stranger()
    until_s = time.monotonic() + seconds

    async def attack(number: int) -> None:
        rng = random.Random(f"{seed} {port.name} {number}")
        held: list[asyncio.StreamWriter] = []
        try:
            while time.monotonic() < until_s:
                shown = context if port.tls and rng.random() < 0.5 else None
                try:
                    async with asyncio.timeout(5.0):
                        reader, writer = await asyncio.open_connection(port.host, port.number, ssl=shown)
                except (OSError, TimeoutError):
                    tally.refused += 1
                    await asyncio.sleep(HOLD_S)
                    continue
                tally.connections += 1
                said = noise(rng)
                tally.sent_bytes += len(said)
                held.append(writer)
                with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                    async with asyncio.timeout(HOLD_S):
                        writer.write(said)
                        await writer.drain()
                        await reader.read(1 << 16)
                if rng.random() < 0.5:
                    held.pop().transport.abort()
                if len(held) > MAX_HELD // attackers:
                    held.pop(0).transport.abort()
        finally:
            for writer in held:
                writer.transport.abort()

    await asyncio.gather(*(attack(number) for number in range(attackers)))
    return tally


async def ended_streams(port: Port, number: int) -> int:
    """Opens so many calls on one connection, says nothing more, and counts those that the server ends until all are
    or the connection is."""
    context = stranger() if port.tls else None
    reader, writer = await asyncio.open_connection(port.host, port.number, ssl=context)
    writer.write(half_open(number))
    ended: set[int] = set()
    try:
        while len(ended) < number:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3]))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
            if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                ended.add(stream)
    except asyncio.IncompleteReadError:
        pass
    finally:
        writer.close()
    return len(ended)


def stranger() -> ssl.SSLContext:
    """TLS with whoever is there, and no certificate to show; speaks HTTP/2, as gRPC's ports ask."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def accepts(port: Port) -> bool:
    """Whether somebody still listens."""
    with suppress(OSError), socket.create_connection((port.host, port.number), timeout=5.0):
        return True
    return False
