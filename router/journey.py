"""The whole life of one output: queue, prefill, hand-off, decode, and what follows when a part of it fails.

Owns: the legs of each attempt, the order of tokens, the ledger of times, and every decision to try again.
Refuses to know: text, stop strings, gRPC contexts, and how a worker is chosen.

    place -> open legs -> [first token from prefill] -> [tokens from decode] -> Ended
      ^                          |                             |
      +---- prompt + tokens so far, on other workers <-- failed leg (a value)          too often, too late: Failed

Closing the generator, at any moment, aborts what is in progress on both legs.

Of a request's several outputs the first goes this way. The others wait until its prompt's KV is on the worker that
decodes, and start there with a whole request, which shares all full blocks and computes the few tokens after them. What
keeps one from that (nothing landed, the worker is gone or has evicted the blocks) sends it the way above.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from baton.proto.messages import (
    FailureKind,
    FinishReason,
    HandoffSource,
    Leg,
    LegFailure,
    LegSummary,
    Request,
    Sampling,
    StageTimes,
    TokenBatch,
    TokenLogprob,
)
from baton.proto.value import value
from baton.router.dispatch import DeadlinePassed, Dispatcher, NoWorker, Outcome, QueueFull
from baton.router.fork import Fork, Landing
from baton.router.ledger import Ledger
from baton.router.legs import LegLink, Legs
from baton.router.load import LoadBook
from baton.router.placement import Placement, PlacementQuery


@value
class Errand:
    """One output that a client wants. `resume_token_ids`: output tokens that it already has.

    `arrived_s` and `deadline_s` are times of the router's clock. `journey_id` is unique in the cluster.
    """

    journey_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    arrived_s: float
    deadline_s: float | None = None
    resume_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    traceparent: str = ""


class Tokens(NamedTuple):
    """Output tokens in order, without gap or repeat. `first_index` is the position of the first in the output."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Trouble(Enum):
    """Why an output could not be finished, in the words of the protocol's status codes."""

    INVALID = "invalid"
    NOT_FOUND = "not found"
    EXISTS = "exists"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Failed:
    trouble: Trouble
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    reason: FinishReason


Piece = Tokens | Ended | Failed

RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.02, 1.0
"""Before the second fruitless retry in a row; four times as much before each further one."""


@dataclass(frozen=True, slots=True)
class JourneySettings:
    """`max_retries` counts attempts in a row that brought no token.

    `handoff_timeout_s`: from the first token to the first one of the decode worker.
    """

    max_retries: int = 5
    handoff_timeout_s: float = 30.0


class Journey:
    """One output's way through the cluster. Use `run` once; `ledger` may be read at any time.

    `fork`: shared with the journeys of the same request's other outputs, None if there are none.
    """

    def __init__(
        self,
        errand: Errand,
        dispatcher: Dispatcher,
        links: Mapping[str, LegLink],
        book: LoadBook,
        prefix_hashes: Callable[[tuple[int, ...]], tuple[Hashable, ...]],
        settings: JourneySettings,
        clock: Callable[[], float],
        fork: Fork | None = None,
    ) -> None:
        self._errand = errand
        self._dispatcher = dispatcher
        self._links = links
        self._book = book
        self._prefix_hashes = prefix_hashes
        self._settings = settings
        self._clock = clock
        self._output: list[int] = list(errand.resume_token_ids)
        self._listener: Callable[[Tokens], bool] | None = None
        self._fork = fork
        self._brings: Fork | None = None  # to be told when the prompt's KV is on a worker
        self._forked: Landing | None = None  # where the present attempt has started from
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._computed_before = 0
        self._recomputed: dict[str, int] = {}
        self.ledger = Ledger(errand.arrived_s, attempt_s=errand.arrived_s)

    @property
    def output(self) -> Sequence[int]:
        """The tokens so far, with those that the client had before. To be read only."""
        return self._output

    def run(self, hear: Callable[[Tokens], bool] | None = None) -> AsyncGenerator[Piece, None]:
        """Yields tokens, then Ended or Failed. See the module's drawing.

        With `hear`, most tokens are not yielded: it is called with them the moment they come, in order with those that
        are yielded. When it returns True, the generator ends without Ended or Failed.
        """
        self._listener = hear
        return self._attempts() if self._fork is None else self._part(self._fork)

    async def _part(self, fork: Fork) -> AsyncGenerator[Piece, None]:
        """The way of one of several outputs: the first brings the prompt's KV to a worker, the others wait for it."""
        if fork.take():
            self._brings = fork
            try:
                async with aclosing(self._attempts()) as pieces:
                    async for piece in pieces:
                        yield piece
            finally:
                fork.parted(None)
            return
        try:
            landing = await fork.landing(self._time_left())
        except TimeoutError:
            yield self._end(Failed(Trouble.DEADLINE, "the deadline passed before the request's first output had begun"))
            return
        # Admitted with the first output: the queue's bounds are not for it.
        async with aclosing(self._attempts(1, landing)) as pieces:
            async for piece in pieces:
                yield piece

    async def _attempts(self, first: int = 0, landing: Landing | None = None) -> AsyncGenerator[Piece, None]:
        """Attempts from number `first` on; the first of them where the prompt's KV has landed, if it has."""
        avoid: frozenset[str] = frozenset()
        fruitless = 0
        for attempt in range(first, 1_000_000):
            self.ledger.begin(self._clock() if self.ledger.retries else self._errand.arrived_s)
            num_before = len(self._output)
            handoff_until_s: float | None = None
            query = self._query(attempt, avoid)
            prefill_id, decode_id = query.leg_id(Leg.PREFILL), query.leg_id(Leg.DECODE)
            placed = await self._place(query, landing)
            landing = None
            if not isinstance(placed, Placement):
                yield self._end(_refusal(placed))
                return
            self.ledger.sent_s = self._clock()
            legs = Legs(query, placed, self._links, self._book)
            try:
                failure: LegFailure | None = None
                self._open(legs, query, placed)
                while failure is None:
                    event = await legs.next(self._time_left(handoff_until_s))
                    if event is None and legs.heard_enough:
                        return
                    if event is None and self._time_left() == 0.0:
                        yield self._end(Failed(Trouble.DEADLINE, "the deadline passed while the request was running"))
                        return
                    if event is None:
                        limit_s = self._settings.handoff_timeout_s
                        message = f"{placed.decode} had no token {limit_s:.1f} s after the first"
                        failure = LegFailure(decode_id, FailureKind.WORKER_LOST, message)
                    elif isinstance(event, LegFailure):
                        failure = event
                    else:
                        tokens = self._take(event, decodes=event.sequence_id == decode_id)
                        if self._brings is not None and event.sequence_id != prefill_id:
                            self._tell(self._brings, placed)
                        if tokens is not None:
                            yield tokens
                        if event.finish_reason is not None:
                            legs.ended(event.sequence_id)
                            yield self._end(Ended(event.finish_reason))
                            return
                        if event.sequence_id == decode_id:
                            # Decode runs, so it has the KV and prefill has its blocks back.
                            handoff_until_s = None
                            legs.ended(prefill_id)
                            self._stream(legs, decode_id)
                        elif event.sequence_id == prefill_id:
                            self._book.prefilled(event.sequence_id)
                            if placed.decode is None:
                                late = await self._dispatcher.place_decode(query, self._errand.deadline_s)
                                if not isinstance(late, Placement):
                                    yield self._end(_refusal(late))
                                    return
                                placed = replace(placed, decode=late.decode)
                                legs.add(late)
                                self._open_decode(legs, query, placed)
                            handoff_until_s = self._clock() + self._settings.handoff_timeout_s
                        else:
                            self._stream(legs, event.sequence_id)
            finally:
                legs.close()
                self._dispatcher.wake()
            fruitless = 0 if len(self._output) > num_before else fruitless + 1
            verdict = _verdict(failure, fruitless > self._settings.max_retries)
            if verdict is not None:
                yield self._end(verdict)
                return
            avoid = _to_avoid(failure, query, placed)
            if len(self._output) > num_before:
                # All but the last token had KV on some worker.
                self._computed_before = len(self._errand.prompt_token_ids) + len(self._output) - 1
            self.ledger.retries += 1
            self._book.counts.retries[failure.kind] += 1
            if fruitless > 1:
                # What failed at once may be about to be seen as lost, or to come back.
                pause_s = min(RETRY_PAUSE_S * 4 ** (fruitless - 2), MAX_RETRY_PAUSE_S)
                left_s = self._time_left()
                await asyncio.sleep(pause_s if left_s is None else min(pause_s, left_s))

    # --- opening ----------------------------------------------------------------------------------------------------

    def _query(self, attempt: int, avoid: frozenset[str]) -> PlacementQuery:
        token_ids = self._errand.prompt_token_ids + tuple(self._output)
        return PlacementQuery(
            attempt_id=f"{self._errand.journey_id}.{attempt}",
            num_tokens=len(token_ids),
            max_new_tokens=self._errand.sampling.max_tokens - len(self._output),
            priority=self._errand.priority,
            arrived_s=self._errand.arrived_s,
            attempt=attempt,
            prefix_hashes=self._prefix_hashes(token_ids),
            avoid=avoid,
        )

    async def _place(self, query: PlacementQuery, landing: Landing | None) -> Outcome | QueueFull:
        """Where the prompt's KV is, if it is anywhere and its worker takes more; else where there is room."""
        self._forked = None
        if landing is not None:
            at = replace(query, at=landing.worker_id)
            placed = await self._dispatcher.place_fork(at, self._errand.deadline_s)
            if not isinstance(placed, NoWorker):
                self._forked = landing
                return placed
        return await self._dispatcher.place(query, self._errand.deadline_s)

    def _open(self, legs: Legs, query: PlacementQuery, placed: Placement) -> None:
        if placed.whole is not None:
            self.ledger.prefill_worker = self.ledger.decode_worker = placed.whole
            if self._forked is not None:
                self.ledger.fork(self._forked.ledger, self._forked.landed_s)
            legs.open(placed.whole, self._request(query, Leg.WHOLE))
            return
        assert placed.prefill is not None
        self.ledger.prefill_worker, self.ledger.decode_worker = placed.prefill, ""
        legs.open(placed.prefill, self._request(query, Leg.PREFILL))
        if placed.decode is not None and query.max_new_tokens > 1:
            self._open_decode(legs, query, placed)

    def _open_decode(self, legs: Legs, query: PlacementQuery, placed: Placement) -> None:
        assert placed.prefill is not None
        assert placed.decode is not None
        self.ledger.decode_worker = placed.decode
        link = self._links.get(placed.prefill)
        if link is None:
            legs.lose(query.leg_id(Leg.PREFILL), placed.prefill)
            return
        source = HandoffSource(
            worker_id=placed.prefill,
            incarnation=link.description.incarnation,
            address=link.description.address,
            sequence_id=query.leg_id(Leg.PREFILL),
        )
        legs.open(placed.decode, self._request(query, Leg.DECODE, source))

    def _request(self, query: PlacementQuery, leg: Leg, source: HandoffSource | None = None) -> Request:
        """The leg's part; `query.num_tokens` tokens, also where the first token has come meanwhile (late binding)."""
        prompt, sampling = self._errand.prompt_token_ids, self._errand.sampling
        if self._forked is not None:
            # They are there already, and who is asked for them computes the whole prompt.
            sampling = replace(sampling, prompt_logprobs=None)
        return Request(
            sequence_id=query.leg_id(leg),
            token_ids=(prompt + tuple(self._output))[: query.num_tokens],
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            leg=leg,
            priority=self._errand.priority,
            deadline_s=self._time_left(),
            cache_salt=self._errand.cache_salt,
            adapter=self._errand.adapter,
            source=source,
            traceparent=self._errand.traceparent,
        )

    def _time_left(self, until_s: float | None = None) -> float | None:
        """Until the deadline, or until a time before it; None if there is neither."""
        times = [time for time in (self._errand.deadline_s, until_s) if time is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    # --- listening --------------------------------------------------------------------------------------------------

    def _tell(self, fork: Fork, placed: Placement) -> None:
        """Decode runs, or the whole: the prompt's full blocks are in its worker's prefix cache."""
        worker_id = placed.whole or placed.decode
        assert worker_id is not None
        fork.parted(Landing(worker_id, self._clock(), replace(self.ledger), self._prompt_logprobs))
        self._brings = None

    def _stream(self, legs: Legs, sequence_id: str) -> None:
        """Generation has begun on this leg. What is left of it needs no decision until it ends."""
        listener = self._listener
        if listener is None:
            return

        def hear(batch: TokenBatch) -> bool:
            tokens = self._take(batch, decodes=True)
            return tokens is not None and listener(tokens)

        legs.stream(sequence_id, hear)

    def _take(self, batch: TokenBatch, decodes: bool) -> Tokens | None:
        """What a batch adds to the output: nothing that the client has already."""
        if self.ledger.first_s is None:
            self.ledger.first_s = self._clock()
        if batch.summary is not None:
            self._account(batch.summary, batch.sequence_id, decodes)
        repeated = len(self._output) - batch.first_index
        if repeated < 0:
            raise AssertionError(
                f"{batch.sequence_id}: token {batch.first_index} came when {len(self._output)} was due"
            )
        token_ids = batch.token_ids[repeated:]
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if not self._output:
            prompt_logprobs = self._forked.prompt_logprobs if self._forked is not None else batch.prompt_logprobs
            self._prompt_logprobs = prompt_logprobs
        if not token_ids:
            return None
        first_index = len(self._output)
        self._output.extend(token_ids)
        return Tokens(first_index, token_ids, batch.logprobs[repeated:], prompt_logprobs)

    def _account(self, summary: LegSummary, leg_id: str, decodes: bool) -> None:
        """Takes in a leg's account so far; a later one of the same leg replaces it."""
        ledger, times, stages = self.ledger, summary.times, self.ledger.stages
        self._recomputed[leg_id] = summary.recomputed_tokens
        if decodes:
            ledger.transferred_tokens = summary.transferred_tokens
            ledger.connector = summary.connector if summary.transferred_tokens else ledger.connector
            ledger.stages = StageTimes(
                prefill_compute=stages.prefill_compute,
                handoff_wait=times.handoff_wait,
                handoff_transfer=times.handoff_transfer,
                decode_admission=times.decode_admission,
            )
        else:
            self._recomputed[leg_id] += max(0, self._computed_before - summary.cached_tokens)
            ledger.cached_tokens = min(summary.cached_tokens, len(self._errand.prompt_token_ids))
            if self._forked is None:
                ledger.stages = StageTimes(
                    prefill_compute=times.prefill_compute,
                    handoff_wait=stages.handoff_wait,
                    handoff_transfer=stages.handoff_transfer,
                    decode_admission=stages.decode_admission,
                )
            elif ledger.forked_s is not None:
                ledger.admitted(times.prefill_compute, self._clock())
        ledger.recomputed_tokens = sum(self._recomputed.values())

    def _end(self, piece: Ended | Failed) -> Ended | Failed:
        self.ledger.ended_s = self._clock()
        return piece


def _refusal(outcome: QueueFull | NoWorker | DeadlinePassed) -> Failed:
    if isinstance(outcome, QueueFull):
        return Failed(Trouble.OVERLOADED, outcome.message, outcome.retry_after_s)
    return Failed(Trouble.UNAVAILABLE if isinstance(outcome, NoWorker) else Trouble.DEADLINE, outcome.message)


def _verdict(failure: LegFailure, exhausted: bool) -> Failed | None:
    """What follows from a failed leg: None is another attempt."""
    match failure.kind:
        case FailureKind.REFUSED:
            return Failed(Trouble.INVALID, failure.message)
        case FailureKind.DEADLINE:
            return Failed(Trouble.DEADLINE, failure.message)
        case FailureKind.INTERNAL if exhausted:
            return Failed(Trouble.INTERNAL, failure.message)
        case FailureKind.OVERLOADED if exhausted:
            return Failed(Trouble.OVERLOADED, failure.message)
        case _ if exhausted:
            return Failed(Trouble.UNAVAILABLE, failure.message)
        case _:
            return None


def _to_avoid(failure: LegFailure, query: PlacementQuery, placed: Placement) -> frozenset[str]:
    """The workers to avoid next time: the one that failed, or the source of a hand-off that did.

    A fork whose worker has evicted the prompt's KV has none: nothing is wrong with that worker.
    """
    if failure.kind is FailureKind.SOURCE_LOST:
        return frozenset({placed.prefill} if placed.prefill is not None else ())
    workers = {query.leg_id(leg): worker_id for leg, worker_id in placed.legs()}
    return frozenset({workers[failure.sequence_id]} if failure.sequence_id in workers else ())
