"""What a decode worker knows of each lane, the way by which a prefill worker's KV reaches it.

Owns: a lane's state and figures, the warning of a slow one, all lanes as messages. Refuses to know: streams and reads;
it is told what came of them.

    MEETING --the two fit--> OPEN --silence, the end of the stream--> LOST     (the next leg has them meet again)
        '------they do not fit--> REFUSED

A rate is measured while at least one read is under way, over one or several of them together:

    reads   |-----------|   |--------|                 bytes of all of them / time with any of them under way
                |--------------|
    busy    |<----------------->|  |<-->| ...          over at least 1 MiB, until no read is under way or 50 ms are full
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from baton.engine.clock import Clock
from baton.proto import worker_pb2 as wire
from baton.proto.messages import HandoffSource

log = logging.getLogger(__name__)

MIN_BYTES = 1 << 20
WINDOW_S = 0.05
SURE_S = 0.005  # of a read: the ends of shorter ones are seen too late to call a lane slow by them
MEASUREMENTS = 8
FORGET_S = 120.0

Tell = Callable[[tuple[wire.Lane, ...]], None]


class LaneState(StrEnum):
    MEETING = "meeting"
    OPEN = "open"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Measurement:
    """`is_sure`: its reads took long enough for their ends to be seen in time."""

    num_bytes: int
    seconds: float
    is_sure: bool

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


@dataclass(slots=True)
class _Lane:
    source: HandoffSource
    changed_s: float
    state: LaneState = LaneState.MEETING
    reason: str = ""
    transport: str = ""
    round_trip_s: float = 0.0
    measurements: deque[Measurement] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS))
    num_reading: int = 0
    since_s: float = 0.0
    busy_s: float = 0.0
    num_bytes: int = 0
    num_reads: int = 0
    warned: bool = False

    @property
    def best(self) -> Measurement | None:
        """Others shared the lane, or the machine, with something else."""
        return max(self.measurements, key=lambda it: it.gb_per_s, default=None)


class LaneBook:
    """The lanes of one decode worker, by the incarnation of the prefill worker; belongs to its event loop.

    `tell` hears of all lanes when one has changed: at once of a state, by the next `tick` of figures.
    """

    def __init__(self, worker_id: str, expected_gb_per_s: float, clock: Clock, tell: Tell) -> None:
        self._worker_id = worker_id
        self._expected_gb_per_s = expected_gb_per_s
        self._clock = clock
        self._tell = tell
        self._lanes: dict[str, _Lane] = {}
        self._news = False

    # --- streams ----------------------------------------------------------------------------------------------------

    def meeting(self, source: HandoffSource) -> None:
        """Two workers are about to meet. A lane that is known keeps what is known of it until they have."""
        if source.incarnation not in self._lanes:
            for former in [lane.source for lane in self._lanes.values() if lane.source.worker_id == source.worker_id]:
                del self._lanes[former.incarnation]
            self._lanes[source.incarnation] = _Lane(source, self._clock())
            self._publish()

    def opened(self, incarnation: str, transport: str) -> None:
        """The two fit. `transport`: empty if that is not known before something was read."""
        self._carry(self._lanes.get(incarnation), transport)
        self._turn(incarnation, LaneState.OPEN, "")

    def ended(self, incarnation: str, reason: str, *, refused: bool) -> None:
        """The two cannot hand over, or cannot any more."""
        self._turn(incarnation, LaneState.REFUSED if refused else LaneState.LOST, reason)

    def heard(self, incarnation: str, round_trip_s: float) -> None:
        """The best of the last round trips."""
        lane = self._lanes.get(incarnation)
        if lane is not None and round_trip_s and abs(round_trip_s - lane.round_trip_s) > lane.round_trip_s / 4:
            lane.round_trip_s = round_trip_s
            self._note(lane)

    # --- reads ------------------------------------------------------------------------------------------------------

    def reading(self, incarnation: str) -> None:
        """A read begins."""
        lane = self._lanes.get(incarnation)
        if lane is not None:
            if lane.num_reading == 0:
                lane.since_s = self._clock()
            lane.num_reading += 1

    def read(self, incarnation: str, num_bytes: int, transport: str) -> None:
        """A read has ended; one that has failed brought no bytes. `transport`: empty if that is not known."""
        lane = self._lanes.get(incarnation)
        if lane is None or lane.num_reading == 0:
            return
        now = self._clock()
        lane.busy_s += now - lane.since_s
        lane.since_s = now
        lane.num_reading -= 1
        lane.num_bytes += num_bytes
        lane.num_reads += 1
        self._carry(lane, transport)
        if lane.num_bytes >= MIN_BYTES and (lane.num_reading == 0 or lane.busy_s >= WINDOW_S):
            self._measure(lane)

    def probed(self, incarnation: str) -> None:
        """Reads for the sake of measuring are over: what came is a figure, also while reads of others are under way."""
        lane = self._lanes.get(incarnation)
        if lane is not None and lane.num_bytes >= MIN_BYTES:
            self._measure(lane)

    def unmeasured(self, incarnation: str, reason: str) -> None:
        """Reads for the sake of measuring have failed. Until one succeeds that is said of an open lane."""
        lane = self._lanes.get(incarnation)
        if lane is not None and lane.state is LaneState.OPEN:
            log.warning("KV from %s to %s cannot be measured: %s", lane.source.worker_id, self._worker_id, reason)
            lane.reason = reason
            self._note(lane)

    # --- what is known ----------------------------------------------------------------------------------------------

    def is_measured(self, incarnation: str) -> bool:
        lane = self._lanes.get(incarnation)
        return lane is not None and bool(lane.measurements)

    def lanes(self) -> tuple[wire.Lane, ...]:
        now = self._clock()
        return tuple(self._message(lane, now) for lane in self._lanes.values())

    def tick(self) -> None:
        """Tells what is new, and forgets workers that nobody has read from for long."""
        now = self._clock()
        for incarnation, lane in list(self._lanes.items()):
            if lane.state is not LaneState.OPEN and now - lane.changed_s > FORGET_S:
                del self._lanes[incarnation]
                self._news = True
        if self._news:
            self._publish()

    def _turn(self, incarnation: str, state: LaneState, reason: str) -> None:
        lane = self._lanes.get(incarnation)
        if lane is not None and (lane.state, lane.reason) != (state, reason):
            lane.state, lane.reason = state, reason
            lane.num_reading = 0
            self._note(lane)
            self._publish()

    def _carry(self, lane: _Lane | None, transport: str) -> None:
        if lane is not None and transport and transport != lane.transport:
            lane.transport = transport
            log.info("KV from %s to %s goes by %s", lane.source.worker_id, self._worker_id, transport)
            self._note(lane)

    def _measure(self, lane: _Lane) -> None:
        is_sure = lane.busy_s >= SURE_S * lane.num_reads
        lane.measurements.append(Measurement(lane.num_bytes, max(lane.busy_s, 1e-6), is_sure))
        lane.busy_s, lane.num_bytes, lane.num_reads, lane.reason = 0.0, 0, 0, ""
        self._note(lane)
        slow, best = self._is_slow(lane), lane.best
        assert best is not None
        if len(lane.measurements) == 2:
            pair = lane.source.worker_id, self._worker_id
            log.info(
                "KV from %s to %s comes at %.3g GB/s, control in %.1f ms", *pair, best.gb_per_s, 1e3 * lane.round_trip_s
            )
        if slow and not lane.warned:
            log.warning(
                "KV from %s to %s comes at %.3g GB/s by %s; %g GB/s are expected (kvtransfer.expected_gb_per_s)",
                lane.source.worker_id,
                self._worker_id,
                best.gb_per_s,
                lane.transport or "an unknown way",
                self._expected_gb_per_s,
            )
        lane.warned = slow

    def _is_slow(self, lane: _Lane) -> bool:
        """The first measurement may have made the connection, and says little."""
        best = lane.best
        if best is None or best.gb_per_s >= self._expected_gb_per_s or len(lane.measurements) < 2:
            return False
        return any(measurement.is_sure for measurement in lane.measurements)

    def _note(self, lane: _Lane) -> None:
        lane.changed_s = self._clock()
        self._news = True

    def _publish(self) -> None:
        self._news = False
        self._tell(self.lanes())

    def _message(self, lane: _Lane, now: float) -> wire.Lane:
        best, source = lane.best, lane.source
        return wire.Lane(
            source=source.worker_id,
            source_incarnation=source.incarnation,
            source_address=source.address,
            transport=lane.transport,
            state=lane.state.value,
            reason=lane.reason,
            gb_per_s=best.gb_per_s if best is not None else 0.0,
            measured_bytes=best.num_bytes if best is not None else 0,
            round_trip_s=lane.round_trip_s,
            expected_gb_per_s=self._expected_gb_per_s,
            is_slow=self._is_slow(lane),
            age_s=now - lane.changed_s,
        )
