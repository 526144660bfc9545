"""The connector of a worker whose KV heads are split over ranks: one connector a rank, commanded from rank 0 as one.

Owns: who reads which heads from whom, and what several parts of a pull add up to. Refuses to know: how bytes move (each
rank's own connector does that), who started the ranks, and how many ranks a peer has before it reads its address.

    source, 2 ranks       [ 0 1 | 2 3 ]  heads                      pull -> a part for each arrow -> poll
                            |     | |                                 all parts finished:            FINISHED
    destination, 4 ranks  [ 0 | 1 | 2 | 3 ]                           one failed, all decided:       FAILED
                                                                      nothing writes any more:       SETTLED

    rank 0: ShardedConnector -- its own connector
                             -- RemoteConnector ====== line ====== serve: a thread around rank r's connector
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from baton.kvtransfer.address import decode_group, encode_group
from baton.kvtransfer.connector import Connector, ConnectorError, KvPool, Pull, PullEvent, PullState, open_connector
from baton.kvtransfer.layout import head_map, joined
from baton.kvtransfer.outcomes import Outcomes
from baton.proto import worker_pb2 as wire
from baton.proto.settings import TransferSettings

_ANSWER_S = 5.0
_ATTACH_S = 60.0
_CLOSE_S = 8.0
_POLL_S = 0.0005

Lost = Callable[[BaseException], None]


@dataclass(slots=True)
class _Whole:
    """A pull whose parts are under way. `landed`: the checksum of each head that is here."""

    pull: Pull
    undecided: int
    unsettled: int
    num_bytes: int = 0
    reason: str = ""
    landed: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    whole: _Whole
    heads: range
    num_bytes: int


class ShardedConnector:
    """See `Connector`. `members` are the ranks' connectors in their order; a worker of one process has one.

    Its addresses name every rank's. Raises ConnectorError from `attach` if the ranks cannot share the model's KV heads.
    """

    def __init__(self, members: Sequence[Connector]) -> None:
        self._members = list(members)
        self._outcomes = Outcomes()
        self._numbers = itertools.count(1)
        self._parts: dict[int, _Part] = {}
        self._num_sources: dict[str, int] = {}
        self._pool: KvPool | None = None

    @property
    def name(self) -> str:
        return self._members[0].name

    def attach(self, pool: KvPool) -> bytes:
        """Registers rank 0's pool; the other ranks have registered theirs."""
        size = len(self._members)
        try:
            head_map(size, size, pool.geometry.num_kv_heads)
        except ValueError as error:
            raise ConnectorError(str(error)) from error
        addresses = [member.attach(pool) for member in self._members]
        self._pool = pool
        return encode_group(addresses)

    def export(self, export_id: str, block_ids: tuple[int, ...]) -> int:
        checksums = [member.export(export_id, block_ids) for member in self._members]
        copies = max(1, len(checksums) // self._attached_pool().geometry.num_kv_heads)
        counted = checksums[::copies]  # ranks that hold the same head say the same
        return joined(counted) if all(counted) else 0

    def pull(self, pull: Pull) -> None:
        self._outcomes.opened(pull.pull_id)
        try:
            parts = self._cut(pull)
        except (ConnectorError, ValueError) as error:
            self._outcomes.failed(pull.pull_id, f"peer {pull.peer}: {error}", quiet=True)
            return
        for member, part in parts:
            self._members[member].pull(part)

    def poll(self) -> list[PullEvent]:
        self._collect()
        return self._outcomes.drain()

    def transport(self, peer: str) -> str:
        return self._members[0].transport(_name(peer, 0))

    def forget(self, peer: str) -> None:
        for source in range(self._num_sources.pop(peer, 0)):
            for member in self._members:
                member.forget(_name(peer, source))

    def release(self, export_id: str) -> None:
        for member in self._members:
            member.release(export_id)

    def close(self) -> None:
        for member in self._members:
            member.close()
        self._collect()

    def _collect(self) -> None:
        for member in self._members:
            for event in member.poll():
                self._heard(event)

    def _attached_pool(self) -> KvPool:
        if self._pool is None:
            raise ConnectorError("no pool is attached")
        return self._pool

    def _cut(self, pull: Pull) -> list[tuple[int, Pull]]:
        """The parts of a pull, each with the member that reads it."""
        pool, size = self._attached_pool(), len(self._members)
        addresses = decode_group(pull.address)
        num_heads = pool.geometry.num_kv_heads
        slices = head_map(len(addresses), size, num_heads)
        head_bytes = pool.block_bytes // len(pool.heads) * len(pull.destination_blocks)
        self._num_sources[pull.peer] = len(addresses)
        whole = _Whole(pull, undecided=len(slices), unsettled=len(slices))
        parts = []
        for cut in slices:
            first = cut.decode_rank * num_heads // size + cut.destination_head
            heads = range(first, first + cut.num_heads)
            number = next(self._numbers)
            self._parts[number] = _Part(whole, heads, head_bytes * cut.num_heads)
            part = Pull(
                pull_id=number,
                peer=_name(pull.peer, cut.prefill_rank),
                address=addresses[cut.prefill_rank],
                source_blocks=pull.source_blocks,
                destination_blocks=pull.destination_blocks,
                checksum=pull.checksum,
                heads=heads if len(slices) > 1 else None,
            )
            parts.append((cut.decode_rank, part))
        return parts

    def _heard(self, event: PullEvent) -> None:
        part = self._parts.get(event.pull_id)
        if part is None:
            return
        whole = part.whole
        match event.state:
            case PullState.FINISHED:
                whole.undecided -= 1
                whole.num_bytes += event.num_bytes
                whole.reason = whole.reason or _found_wrong(part, event)
                whole.landed.update(zip(part.heads, event.checksums, strict=False))
            case PullState.FAILED:
                whole.undecided -= 1
                whole.reason = whole.reason or event.reason
            case PullState.SETTLED:
                whole.unsettled -= 1
                del self._parts[event.pull_id]
        if whole.undecided:
            return
        if not whole.reason and whole.landed and joined(whole.landed.values()) != whole.pull.checksum:
            found, told = joined(whole.landed.values()), whole.pull.checksum
            whole.reason = f"peer {whole.pull.peer}: checksum {found:#010x}, the source has {told:#010x}"
        if whole.reason:
            self._outcomes.failed(whole.pull.pull_id, whole.reason, quiet=not whole.unsettled)
        elif not whole.unsettled:
            self._outcomes.finished(whole.pull.pull_id, whole.num_bytes)


def _found_wrong(part: _Part, event: PullEvent) -> str:
    """What a part that has finished gives away all the same; empty if nothing."""
    peer = part.whole.pull.peer
    if event.num_bytes != part.num_bytes:
        return f"peer {peer}: {event.num_bytes} bytes of heads {part.heads} moved, {part.num_bytes} expected"
    for head, checksum in zip(part.heads, event.checksums, strict=False):
        if part.whole.landed.get(head, checksum) != checksum:
            return f"peer {peer}: ranks that share head {head} have read different KV"
    return ""


def _name(peer: str, rank: int) -> str:
    """What a rank's connector knows a peer's rank as: an address of its own needs a name of its own."""
    return f"{peer}/{rank}"


def open_sharded(settings: TransferSettings, lines: Sequence[Connection], lost: Lost) -> ShardedConnector:
    """The connector of rank 0, whose other ranks `serve` theirs at the other ends of these lines.

    `lost` hears of a rank's connector that has ended. Raises TransportUnavailable if the transport cannot run here.
    """
    remote = [RemoteConnector(rank, line, settings, lost) for rank, line in enumerate(lines, start=1)]
    return ShardedConnector([open_connector(settings), *remote])


# --- a rank's connector, seen from rank 0 ---------------------------------------------------------------------------


class RemoteConnector:
    """See `Connector`; `rank`'s pool is attached over there. A thread of its own hears what it reports."""

    def __init__(self, rank: int, line: Connection, settings: TransferSettings, lost: Lost) -> None:
        self._rank = rank
        self._line = line
        self._settings = settings
        self._lost = lost
        self._sending = threading.Lock()
        self._outcomes = Outcomes()
        self._opening = threading.Lock()
        self._open: set[int] = set()
        self._gone = False
        self._address: Future[bytes] = Future()
        self._export_numbers = itertools.count(1)
        self._exports: dict[int, Future[int]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name=f"kv-rank-{rank}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._settings.connector

    def attach(self, pool: KvPool) -> bytes:
        """Waits for the address of the rank's own pool; `pool` is rank 0's and stays out of this."""
        try:
            return self._address.result(_ATTACH_S)
        except TimeoutError:
            raise ConnectorError(f"rank {self._rank} has attached no pool within {_ATTACH_S:.0f} s") from None

    def export(self, export_id: str, block_ids: tuple[int, ...]) -> int:
        """Waits for the rank's checksum only where any are computed."""
        number = next(self._export_numbers)
        answer: Future[int] | None = None
        if self._settings.checksums != "off":
            answer = self._exports[number] = Future()
        part = wire.ExportPart(number=number, export_id=export_id, block_ids=block_ids)
        if not self._send(wire.ConnectorCommand(export=part)):
            raise ConnectorError(f"rank {self._rank} cannot be reached")
        if answer is None:
            return 0
        try:
            return answer.result(_ANSWER_S)
        except TimeoutError:
            raise ConnectorError(f"rank {self._rank} has exported nothing within {_ANSWER_S:.0f} s") from None

    def pull(self, pull: Pull) -> None:
        self._outcomes.opened(pull.pull_id)
        with self._opening:
            self._open.add(pull.pull_id)
        part = wire.PullPart(
            pull_id=pull.pull_id,
            peer=pull.peer,
            address=pull.address,
            checksum=pull.checksum,
            first_head=pull.heads.start if pull.heads is not None else 0,
            num_heads=len(pull.heads) if pull.heads is not None else 0,
        )
        try:
            part.source_blocks.extend(pull.source_blocks)
            part.destination_blocks.extend(pull.destination_blocks)
        except ValueError as error:
            self._end(pull.pull_id, f"peer {pull.peer}: {error}")
            return
        if not self._send(wire.ConnectorCommand(pull=part)) or self._gone:
            self._end(pull.pull_id, f"rank {self._rank} cannot be reached")

    def poll(self) -> list[PullEvent]:
        return self._outcomes.drain()

    def transport(self, peer: str) -> str:
        """Only rank 0 is asked."""
        return ""

    def forget(self, peer: str) -> None:
        self._send(wire.ConnectorCommand(forget=peer))

    def release(self, export_id: str) -> None:
        self._send(wire.ConnectorCommand(release=export_id))

    def close(self) -> None:
        self._closed = True
        self._send(wire.ConnectorCommand(close=True))
        self._thread.join(_CLOSE_S)

    def _send(self, command: wire.ConnectorCommand) -> bool:
        """Whether the line took it; if not, its end has been or will be heard."""
        try:
            with self._sending:
                self._line.send_bytes(command.SerializeToString())
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        try:
            while True:
                report = wire.ConnectorReport()
                report.ParseFromString(self._line.recv_bytes())
                self._hear(report)
        except (EOFError, OSError):
            # The rank's process, or its connector, is gone: nothing writes into its pool any more.
            self._gone = True
            for pull_id in list(self._open):
                self._end(pull_id, f"the connector of rank {self._rank} has ended")
            if not self._closed:
                self._lost(ConnectorError(f"the connector of rank {self._rank} has ended"))

    def _hear(self, report: wire.ConnectorReport) -> None:
        if report.address:
            self._address.set_result(report.address)
        if report.exported and (answer := self._exports.pop(report.exported, None)):
            answer.set_result(report.checksum)
        for event in report.events:
            match PullState(event.state):
                case PullState.FINISHED:
                    if self._taken(event.pull_id):
                        self._outcomes.finished(event.pull_id, event.num_bytes, tuple(event.checksums))
                case PullState.FAILED:
                    if event.pull_id in self._open:
                        self._outcomes.failed(event.pull_id, event.reason, quiet=False)
                case PullState.SETTLED:
                    self._end(event.pull_id, "")

    def _end(self, pull_id: int, reason: str) -> None:
        """Settles a pull that has failed, or fails it now."""
        if self._taken(pull_id):
            self._outcomes.failed(pull_id, reason, quiet=True)

    def _taken(self, pull_id: int) -> bool:
        """Whether it was open; it is so no more."""
        with self._opening:
            known = pull_id in self._open
            self._open.discard(pull_id)
        return known


# --- a rank's connector, beside the rank ----------------------------------------------------------------------------


def serve(line: Connection, connector: Connector, pool: KvPool) -> threading.Thread:
    """Attaches the pool and lets rank 0 command the connector over the line, on a thread that ends with the line.

    An error that is no answer to a command ends the thread and with it the line, so that rank 0 hears of it.
    """
    address = connector.attach(pool)
    line.send_bytes(wire.ConnectorReport(address=address).SerializeToString())
    thread = threading.Thread(target=_serve, args=(line, connector), name="kv-rank", daemon=True)
    thread.start()
    return thread


def _serve(line: Connection, connector: Connector) -> None:
    num_open = 0
    try:
        while True:
            if line.poll(_POLL_S if num_open else None):
                command = wire.ConnectorCommand()
                command.ParseFromString(line.recv_bytes())
                if command.WhichOneof("command") == "close":
                    return
                num_open += _obey(command, connector, line)
            if num_open and (events := connector.poll()):
                num_open -= sum(event.state is PullState.SETTLED for event in events)
                line.send_bytes(wire.ConnectorReport(events=map(_told, events)).SerializeToString())
    except (EOFError, OSError):
        pass  # rank 0 is gone: its step line says so too, to whoever computes
    finally:
        connector.close()
        line.close()


def _obey(command: wire.ConnectorCommand, connector: Connector, line: Connection) -> int:
    """Returns how many pulls it has opened."""
    match command.WhichOneof("command"):
        case "export":
            part = command.export
            checksum = connector.export(part.export_id, tuple(part.block_ids))
            line.send_bytes(wire.ConnectorReport(exported=part.number, checksum=checksum).SerializeToString())
        case "pull":
            connector.pull(_pull_of(command.pull))
            return 1
        case "forget":
            connector.forget(command.forget)
        case "release":
            connector.release(command.release)
    return 0


def _pull_of(part: wire.PullPart) -> Pull:
    return Pull(
        pull_id=part.pull_id,
        peer=part.peer,
        address=part.address,
        source_blocks=tuple(part.source_blocks),
        destination_blocks=tuple(part.destination_blocks),
        checksum=part.checksum,
        heads=range(part.first_head, part.first_head + part.num_heads) if part.num_heads else None,
    )


def _told(event: PullEvent) -> wire.PullPartEvent:
    return wire.PullPartEvent(
        pull_id=event.pull_id,
        state=event.state.value,
        num_bytes=event.num_bytes,
        reason=event.reason,
        checksums=event.checksums,
    )
