"""Tensor parallelism: the processes, or ranks, over which one worker's model is split, and the lines between them.

Owns: how ranks find each other, the message that starts a step, and the verdict that a rank is lost. Refuses to know:
who starts the processes (they get RankSettings), how KV moves (each rank has a line of its own for that), scheduling.

    rank 0                                              rank r
    Ranks: listen, start(RankSettings) ----------------> follow: connect two lines
           <======= process group (gloo or nccl) ======>
    load its part                                       load its part, serve the side line
           <-------------------- ready -----------------
    StepInputs ---------- step line, one message ------> compute the same step
    compute <======= sums, gathered scores ============>
           <-------------------- beat, every second ----

A rank that ends, says why, or is silent for SILENCE_S is lost, and the worker with it: `failed` hears of it once; until
all are ready, the call that waits for them raises it instead. A rank whose step line ends has lost rank 0 and ends too.
A rank that lives and does not compute is noticed by the process group's timeout, TURN_S: as long as a worker waits for
any step.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

import torch

from baton.engine.group import LOOPBACK, ProcessGroup, join_store, open_store
from baton.engine.part import ModelPart
from baton.engine.step_inputs import StepInputs
from baton.engine.vital import Failed
from baton.proto.settings import EngineSettings, RankSettings

SILENCE_S = 10.0
TURN_S = 120.0
JOIN_S = 120.0
LOAD_S = 1800.0
_BEAT_S = 1.0
_GREETING_S = 5.0
_KEY_BYTES = 32
_STEP_LINE, _SIDE_LINE = 0, 1
_BEAT, _READY, _LAST_WORDS = b"b", b"r", b"!"

StartRank = Callable[[RankSettings], None]
"""Starts a process that calls `follow` with these; returns without waiting for it."""


class RankLost(RuntimeError):
    """A rank did not come, has ended or does not answer: the worker's model is no longer whole."""


class Ranks:
    """The other ranks, as rank 0 knows them. The constructor returns when all have come and can compute together.

    `side_lines[r - 1]` is for whatever else the two sides want to tell each other. `failed` is called from a thread of
    its own. Raises RankLost.
    """

    def __init__(self, settings: EngineSettings, start: StartRank, failed: Failed, join_s: float = JOIN_S) -> None:
        size = settings.tensor_parallel
        key = secrets.token_bytes(_KEY_BYTES)
        deadline = time.monotonic() + join_s
        with socket.create_server((LOOPBACK, 0)) as door, socket.create_server((LOOPBACK, 0)) as store_door:
            store_port: int = store_door.getsockname()[1]
            store = open_store(store_door, join_s)
            for rank in range(1, size):
                start(RankSettings(rank, size, door.getsockname()[1], store_port, key))
            lines = _accept(door, size, key, deadline)
        self._step_lines = [lines[rank, _STEP_LINE] for rank in range(1, size)]
        self.side_lines = [lines[rank, _SIDE_LINE] for rank in range(1, size)]
        self._failed = failed
        self._closed = False
        self._waiting = set(range(1, size))
        self._ready = threading.Condition()
        self._lost: RankLost | None = None
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        try:
            self.group = ProcessGroup(store, 0, size, torch.device(settings.device), TURN_S)
        except RuntimeError as error:
            # torch's words for it; a rank that has ended has told more.
            self.close()
            raise self._lost or RankLost(f"the ranks do not find one another: {error}") from error

    def wait_ready(self, timeout_s: float = LOAD_S) -> None:
        """Returns when every rank has loaded its part; raises RankLost."""
        with self._ready:
            if not self._ready.wait_for(lambda: self._lost is not None or not self._waiting, timeout_s):
                raise RankLost(f"ranks {sorted(self._waiting)} have not loaded their parts within {timeout_s:.0f} s")
            if self._lost is not None:
                raise self._lost

    def send(self, inputs: StepInputs) -> None:
        """Starts a step on every rank. Raises RankLost."""
        message = inputs.encode()
        for rank, line in enumerate(self._step_lines, start=1):
            try:
                line.send_bytes(message)
            except OSError as error:
                raise RankLost(f"rank {rank} cannot be reached: {error}") from error

    def close(self) -> None:
        """Ends the ranks: each ends itself when its step line does."""
        self._closed = True
        for line in self._step_lines + self.side_lines:
            line.close()

    def _watch(self) -> None:
        ranks = {line: rank for rank, line in enumerate(self._step_lines, start=1)}
        heard_s = dict.fromkeys(ranks.values(), time.monotonic())
        try:
            while not self._closed:
                for line in wait(list(ranks), _BEAT_S):
                    assert isinstance(line, Connection)
                    self._hear(ranks[line], line)
                    heard_s[ranks[line]] = time.monotonic()
                silent = [rank for rank, at in heard_s.items() if time.monotonic() - at > SILENCE_S]
                if silent:
                    raise RankLost(f"rank {silent[0]} has been silent for {SILENCE_S:.0f} s")
        except (RankLost, OSError, ValueError) as error:
            if self._closed:
                return
            lost = error if isinstance(error, RankLost) else RankLost(f"a rank's line is broken: {error}")
            with self._ready:
                self._lost = lost
                loading = bool(self._waiting)
                self._ready.notify_all()
            if not loading:
                self._failed(lost)

    def _hear(self, rank: int, line: Connection) -> None:
        try:
            message = line.recv_bytes()
        except (EOFError, ConnectionError):
            raise RankLost(f"rank {rank} has ended") from None
        if message.startswith(_LAST_WORDS):
            raise RankLost(f"rank {rank}: {message.removeprefix(_LAST_WORDS).decode(errors='replace')}")
        if message == _READY:
            with self._ready:
                self._waiting.discard(rank)
                self._ready.notify_all()


def open_ranks(settings: EngineSettings, start: StartRank, failed: Failed) -> Ranks | None:
    """The ranks besides 0 that these settings ask for; None if there are none. Raises RankLost."""
    return Ranks(settings, start, failed) if settings.tensor_parallel > 1 else None


def follow(settings: EngineSettings, place: RankSettings, serve: Callable[[ModelPart, Connection], None]) -> None:
    """The life of a rank: joins rank 0, computes what it computes, and returns when rank 0 ends.

    `serve` is called once, with the loaded part and the side line, and returns at once. Rank 0 hears the reason of any
    exception that leaves this.
    """
    step_line, side_line = (_connect(place, kind) for kind in (_STEP_LINE, _SIDE_LINE))
    tongue = threading.Lock()
    over = threading.Event()
    threading.Thread(target=_beat, args=(step_line, tongue, over), name="rank-beat", daemon=True).start()
    try:
        store = join_store(place.store_port, JOIN_S)
        group = ProcessGroup(store, place.rank, place.size, torch.device(settings.device), TURN_S)
        part = ModelPart(settings, group)
        serve(part, side_line)
        with tongue:
            step_line.send_bytes(_READY)
        while True:
            try:
                message = step_line.recv_bytes()
            except (EOFError, ConnectionError):
                return
            part.follow(StepInputs.decode(message))
    except BaseException as error:
        _say(step_line, tongue, f"{type(error).__name__}: {error}")
        raise
    finally:
        over.set()


def _accept(door: socket.socket, size: int, key: bytes, deadline: float) -> dict[tuple[int, int], Connection]:
    """Two lines from each rank. Whoever does not know the key is hung up on."""
    lines: dict[tuple[int, int], Connection] = {}
    while len(lines) < 2 * (size - 1):
        remaining_s = deadline - time.monotonic()
        missing = sorted(set(range(1, size)) - {rank for rank, _ in lines})
        if remaining_s <= 0:
            raise RankLost(f"ranks {missing} have not come")
        door.settimeout(remaining_s)
        try:
            caller, _ = door.accept()
        except TimeoutError:
            continue
        caller.settimeout(min(_GREETING_S, remaining_s))
        greeting = _read_exactly(caller, _KEY_BYTES + 2)
        place = (greeting[-2], greeting[-1]) if len(greeting) == _KEY_BYTES + 2 else (0, 0)
        if not hmac.compare_digest(greeting[:_KEY_BYTES], key) or not 0 < place[0] < size or place in lines:
            caller.close()
            continue
        caller.settimeout(None)
        lines[place] = Connection(caller.detach())
    return lines


def _read_exactly(caller: socket.socket, length: int) -> bytes:
    """So many bytes, or fewer from one who stops earlier."""
    data = b""
    try:
        while len(data) < length and (piece := caller.recv(length - len(data))):
            data += piece
    except OSError:
        pass
    return data


def _connect(place: RankSettings, kind: int) -> Connection:
    caller = socket.create_connection((LOOPBACK, place.port), timeout=_GREETING_S)
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.sendall(place.key + bytes((place.rank, kind)))
    caller.settimeout(None)
    return Connection(caller.detach())


def _beat(line: Connection, tongue: threading.Lock, over: threading.Event) -> None:
    while not over.wait(_BEAT_S):
        try:
            with tongue:
                line.send_bytes(_BEAT)
        except OSError:
            return  # the step line has ended; whoever reads it notices


def _say(line: Connection, tongue: threading.Lock, reason: str) -> None:
    try:
        with tongue:
            line.send_bytes(_LAST_WORDS + reason.encode())
    except OSError:
        pass  # nobody is left to hear it
