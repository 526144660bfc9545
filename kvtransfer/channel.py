"""The control connection of two connectors: small messages over TCP, each bounded, checked and with a deadline.

Owns: framing, the messages, and how a thread that waits for one is woken. Refuses to know: lanes, pools, pulls.
Bytes from a peer are data, never code: a length below a bound, a kind, and a body that must fit it exactly.

    destination                         source
        Hello ----------------------->            which pool is meant, what ours is like
              <---------- Welcome | Refused       by which lane bytes will move
        Entry <---------------------> Entry       what the two ends of the lane tell each other to meet
        Request --------------------->            these blocks, please
              <---------- Sending | Refused       the lane carries them now
"""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from baton.kvtransfer.connector import ConnectorError

MAX_REQUEST_BLOCKS = 1 << 14
_MAGIC = b"KVP1"
_FRAME = struct.Struct("<IB")
_HELLO = struct.Struct("<4s8sQIHH")
_NUMBER = struct.Struct("<Q")
_LENGTH = struct.Struct("<H")
_MAX_BODY = _NUMBER.size + 4 * MAX_REQUEST_BLOCKS
_MAX_REASON = 1000
_SEND_WAIT_S = 3.0
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}


class ChannelLost(ConnectorError):
    """The peer has closed the connection, is gone, or has sent what makes no sense."""


@dataclass(frozen=True, slots=True)
class Hello:
    """`name`: the source's connector, as its address has it. `gpu`: the reader's, empty if NCCL is out of question."""

    name: str
    geometry: bytes
    block_bytes: int
    num_blocks: int
    gpu: str

    def encode(self) -> bytes:
        name, gpu = self.name.encode(), self.gpu.encode()
        head = _HELLO.pack(_MAGIC, self.geometry, self.block_bytes, self.num_blocks, len(name), len(gpu))
        return head + name + gpu

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        magic, geometry, block_bytes, num_blocks, name_len, gpu_len = _HELLO.unpack_from(body)
        rest = body[_HELLO.size :]
        if magic != _MAGIC or len(rest) != name_len + gpu_len:
            raise ValueError(f"mark {magic!r} with {len(rest)} bytes, {name_len} + {gpu_len} expected")
        return cls(rest[:name_len].decode(), geometry, block_bytes, num_blocks, rest[name_len:].decode())


@dataclass(frozen=True, slots=True)
class Welcome:
    lane: str

    def encode(self) -> bytes:
        return self.lane.encode()

    @classmethod
    def decode(cls, body: bytes) -> Welcome:
        return cls(body.decode())


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str

    def encode(self) -> bytes:
        return self.reason[:_MAX_REASON].encode()

    @classmethod
    def decode(cls, body: bytes) -> Refused:
        return cls(body.decode())


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of the store through which the two ends of a process group find each other."""

    key: str
    value: bytes

    def encode(self) -> bytes:
        key = self.key.encode()
        return _LENGTH.pack(len(key)) + key + self.value

    @classmethod
    def decode(cls, body: bytes) -> Entry:
        (key_len,) = _LENGTH.unpack_from(body)
        rest = body[_LENGTH.size :]
        if key_len > len(rest):
            raise ValueError(f"a key of {key_len} bytes in {len(rest)}")
        return cls(rest[:key_len].decode(), rest[key_len:])


@dataclass(frozen=True, slots=True)
class Request:
    """`number` counts the requests of a connection from 0."""

    number: int
    blocks: tuple[int, ...]

    def encode(self) -> bytes:
        return _NUMBER.pack(self.number) + np.array(self.blocks, "<u4").tobytes()

    @classmethod
    def decode(cls, body: bytes) -> Request:
        (number,) = _NUMBER.unpack_from(body)
        return cls(number, tuple(np.frombuffer(body, "<u4", offset=_NUMBER.size).tolist()))


@dataclass(frozen=True, slots=True)
class Sending:
    number: int

    def encode(self) -> bytes:
        return _NUMBER.pack(self.number)

    @classmethod
    def decode(cls, body: bytes) -> Sending:
        (number,) = _NUMBER.unpack(body)
        return cls(number)


Message = Hello | Welcome | Refused | Entry | Request | Sending
_KINDS: tuple[type[Message], ...] = (Hello, Welcome, Refused, Entry, Request, Sending)


class Wake:
    """Ends another thread's wait for a message. `ring` may come from any thread, before or during the wait."""

    def __init__(self) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)

    def ring(self) -> None:
        with suppress(OSError):  # rung often enough, or nobody listens any more
            self._bell.send(b"\0")

    def fileno(self) -> int:
        return self._ear.fileno()

    def heard(self) -> None:
        """Takes back all rings so far."""
        with suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass

    def close(self) -> None:
        self._ear.close()
        self._bell.close()


class Channel:
    """One end of a connection. One thread sends and receives; `hang_up` may come from any."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        connection.settimeout(_SEND_WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():  # a machine that is gone never says so
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @classmethod
    def connect(cls, host: str, port: int, wait_s: float) -> Channel:
        """Raises ChannelLost."""
        try:
            return cls(socket.create_connection((host, port), wait_s))
        except OSError as error:
            raise ChannelLost(f"{host}:{port}: {error}") from error

    @property
    def own_host(self) -> str:
        """The address of this machine that the peer reaches."""
        host: str = self._socket.getsockname()[0]
        return host

    def send(self, message: Message) -> None:
        """Raises ChannelLost."""
        body = message.encode()
        try:
            self._socket.sendall(_FRAME.pack(len(body), _KINDS.index(type(message))) + body)
        except OSError as error:
            raise ChannelLost(f"sending {type(message).__name__}: {error}") from error

    def receive(self, wait_s: float | None, wake: Wake | None = None) -> Message | None:
        """The next message; None if `wait_s` (None: no end) has passed or `wake` has rung. Raises ChannelLost."""
        deadline = None if wait_s is None else time.monotonic() + wait_s
        message: Message | None
        while (message := self._decoded()) is None:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if wake is not None:
                poll.register(wake, select.POLLIN)
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = [number for number, _ in poll.poll(None if left_s is None else left_s * 1000)]
            if self._socket.fileno() in ready:
                self._read()
            elif wake is not None and ready:
                wake.heard()
                return None
            elif not ready:
                return None
        return message

    @property
    def hung_up(self) -> bool:
        """Whether the peer has closed the connection or is dead; what it sent before may still be unread."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """Ends the connection; a thread that waits for a message on it gets ChannelLost."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        try:
            piece = self._socket.recv(1 << 16)
        except OSError as error:
            raise ChannelLost(f"receiving: {error}") from error
        if not piece:
            raise ChannelLost("the connection is closed")
        self._received += piece

    def _decoded(self) -> Message | None:
        if len(self._received) < _FRAME.size:
            return None
        length, kind = _FRAME.unpack_from(self._received)
        if length > _MAX_BODY or kind >= len(_KINDS):
            raise ChannelLost(f"a message of kind {kind} and {length} bytes; at most {len(_KINDS) - 1} and {_MAX_BODY}")
        if len(self._received) < _FRAME.size + length:
            return None
        body = bytes(self._received[_FRAME.size : _FRAME.size + length])
        del self._received[: _FRAME.size + length]
        try:
            message: Message = _KINDS[kind].decode(body)
            return message
        except (struct.error, ValueError) as error:
            raise ChannelLost(f"a {_KINDS[kind].__name__} of {length} bytes: {error}") from error
