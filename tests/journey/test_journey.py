"""One output's life against workers that are scripts: what is tried again, what is passed over, what is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from asking import until

from baton.proto.messages import (
    FailureKind,
    FinishReason,
    Leg,
    LegFailure,
    LegSummary,
    Request,
    Role,
    Sampling,
    StageTimes,
    TokenBatch,
    WorkerDescription,
)
from baton.router.journey import Ended, Errand, Failed, Journey, JourneySettings, Tokens, Trouble
from baton.router.ledger import Ledger
from baton.router.load import LoadBook
from baton.router.placement import Placement

PROMPT = tuple(range(20))


def description(worker_id: str) -> WorkerDescription:
    role = Role(worker_id.rpartition("-")[0])
    return WorkerDescription(
        worker_id, f"{worker_id}+", "127.0.0.1:1", role, "m", 4096, 300, 16, 256, 2048, 256, "f", "local", "0", 1, 1
    )


class Link:
    """A worker that does what the test says. `legs`: what is on it, with the mailbox of each."""

    def __init__(self, worker_id: str) -> None:
        self.description = description(worker_id)
        self.worker_id = worker_id
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.legs: dict[str, Callable] = {}

    def submit(self, request: Request, mailbox: Callable) -> int:
        self.requests.append(request)
        self.legs[request.sequence_id] = mailbox
        return len(self.requests)

    def abort(self, sequence_id: str) -> None:
        self.aborted.append(sequence_id)
        self.legs.pop(sequence_id, None)

    def forget(self, sequence_id: str) -> None:
        self.legs.pop(sequence_id, None)

    async def asked(self) -> Request:
        """The leg that it has now."""
        await until(lambda: self.legs, what=f"a leg on {self.worker_id}")
        return next(request for request in reversed(self.requests) if request.sequence_id in self.legs)

    def say(self, request: Request, index: int, token: int, finish=None, **summary) -> None:
        mailbox = self.legs[request.sequence_id]
        mailbox(
            TokenBatch(
                request.sequence_id,
                index,
                (token,),
                finish_reason=finish,
                summary=LegSummary(**summary) if summary or finish else None,
            )
        )

    def fail(self, request: Request, kind: FailureKind, message: str = "it broke") -> None:
        self.legs.pop(request.sequence_id)(LegFailure(request.sequence_id, kind, message))


class Dispatcher:
    """Gives out the placements of a list; a decode worker waits for the gate."""

    def __init__(self, book: LoadBook, placements: list[Placement], late: list[Placement]) -> None:
        self._book = book
        self._placements = placements
        self._late = late
        self.queries: list = []
        self.gate = asyncio.Event()

    async def place(self, query, deadline=None):
        self.queries.append(query)
        placement = self._placements.pop(0) if len(self._placements) > 1 else self._placements[0]
        self._book.book(query, placement)
        return placement

    async def place_decode(self, query, deadline=None):
        await self.gate.wait()
        placement = self._late.pop(0)
        self._book.book(query, placement)
        return placement

    def wake(self) -> None:
        pass


class World:
    """A journey between scripted workers; `pieces` is what it has yielded."""

    def __init__(self, *placements: Placement, late: tuple[Placement, ...] = (), max_tokens=3, left_s=None, **settings):
        names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "colocated-0"]
        self.links = {name: Link(name) for name in names}
        self.book = LoadBook()
        for link in self.links.values():
            self.book.add_worker(link.description)
        self.dispatcher = Dispatcher(self.book, list(placements), list(late))
        now = time.monotonic()
        deadline_s = now + left_s if left_s is not None else None
        errand = Errand("j", PROMPT, Sampling(max_tokens=max_tokens), now, deadline_s)
        self.journey = Journey(
            errand,
            self.dispatcher,
            self.links,
            self.book,
            lambda token_ids: (),
            JourneySettings(**settings),
            time.monotonic,
        )
        self.pieces: list = []

    async def __aenter__(self) -> World:
        self.task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        async for piece in self.journey.run():
            self.pieces.append(piece)

    async def __aexit__(self, *exc: object) -> None:
        if exc[0] is not None:
            self.task.cancel()
            return
        async with asyncio.timeout(5):
            await self.task
        assert self.book.in_flight == 0
        self.book.check()
        assert not any(link.legs for link in self.links.values()), "a leg is left"

    def __getitem__(self, name: str) -> Link:
        return self.links[name]

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces if isinstance(piece, Tokens) for token in piece.token_ids]


PAIR = Placement(prefill="prefill-0", decode="decode-0")
OTHER = Placement(prefill="prefill-1", decode="decode-1")


async def finish(world: World, decode: Link, first_index: int = 1) -> None:
    leg = await decode.asked()
    decode.say(leg, first_index, 11)
    decode.say(leg, first_index + 1, 12, FinishReason.LENGTH)


async def test_decode_tokens_that_overtake_the_first_one_come_after_it():
    async with World(PAIR) as world:
        prefill = await world["prefill-0"].asked()
        await finish(world, world["decode-0"])
        await asyncio.sleep(0)
        assert world.pieces == []
        world["prefill-0"].say(prefill, 0, 10)
    assert world.tokens == [10, 11, 12]
    assert world.pieces[-1] == Ended(FinishReason.LENGTH)


async def test_a_prefill_leg_that_fails_after_its_token_is_passed_over_when_decode_is_under_way():
    async with World(PAIR) as world:
        prefill = await world["prefill-0"].asked()
        world["prefill-0"].say(prefill, 0, 10)
        world["prefill-0"].fail(prefill, FailureKind.WORKER_LOST)
        await finish(world, world["decode-0"])
    assert world.tokens == [10, 11, 12]
    assert world.journey.ledger.retries == 0


@pytest.mark.parametrize("how", ["it says so", "its link is gone"])
async def test_a_prefill_worker_lost_while_a_decode_worker_is_waited_for_costs_a_retry_and_no_hang(how):
    half = Placement(prefill="prefill-0")
    async with World(half, OTHER, late=(Placement(decode="decode-0"),)) as world:
        prefill = await world["prefill-0"].asked()
        world["prefill-0"].say(prefill, 0, 10)
        await until(lambda: world.tokens)
        if how == "it says so":
            world["prefill-0"].fail(prefill, FailureKind.LEASE_LOST)
        else:
            world.links.pop("prefill-0")
        world.dispatcher.gate.set()
        second = await world["prefill-1"].asked()
        assert second.token_ids == (*PROMPT, 10)
        world["prefill-1"].say(second, 1, 11)
        leg = await world["decode-1"].asked()
        world["decode-1"].say(leg, 2, 12, FinishReason.LENGTH)
    assert world.tokens == [10, 11, 12]


async def test_a_decode_worker_that_stays_silent_after_the_first_token_is_given_up_and_avoided():
    async with World(PAIR, OTHER, handoff_timeout_s=0.05) as world:
        prefill = await world["prefill-0"].asked()
        world["prefill-0"].say(prefill, 0, 10)
        second = await world["prefill-1"].asked()
        assert world["decode-0"].aborted == ["j.0.decode"]
        assert world.dispatcher.queries[1].avoid == {"decode-0"}
        world["prefill-1"].say(second, 1, 11)
        leg = await world["decode-1"].asked()
        world["decode-1"].say(leg, 2, 12, FinishReason.LENGTH)
    assert world.tokens == [10, 11, 12]


async def test_the_hand_offs_time_ends_with_decodes_first_token():
    async with World(PAIR, handoff_timeout_s=0.1) as world:
        prefill = await world["prefill-0"].asked()
        world["prefill-0"].say(prefill, 0, 10)
        leg = await world["decode-0"].asked()
        world["decode-0"].say(leg, 1, 11)
        await asyncio.sleep(0.2)
        world["decode-0"].say(leg, 2, 12, FinishReason.LENGTH)
    assert world.journey.ledger.retries == 0


async def test_retries_in_a_row_that_bring_no_token_wait_longer_each_and_end():
    async with World(PAIR, max_retries=3) as world:
        moments = []
        for _ in range(4):
            leg = await world["prefill-0"].asked()
            moments.append(time.monotonic())
            world["prefill-0"].fail(leg, FailureKind.WORKER_LOST, "gone")
    assert world.pieces == [Failed(Trouble.UNAVAILABLE, "gone")]
    assert moments[2] - moments[1] > 0.015
    assert moments[3] - moments[2] > 0.06


async def test_the_deadline_ends_both_legs():
    async with World(PAIR, left_s=0.1) as world:
        await world["prefill-0"].asked()
    assert world.pieces[-1].trouble is Trouble.DEADLINE
    assert world["prefill-0"].aborted == ["j.0.prefill"]
    assert world["decode-0"].aborted == ["j.0.decode"]


async def test_a_worker_that_is_gone_before_the_leg_is_sent_costs_a_retry():
    async with World(PAIR, OTHER) as world:
        world.links.pop("prefill-0")
        prefill = await world["prefill-1"].asked()
        world["prefill-1"].say(prefill, 0, 10)
        await finish(world, world["decode-1"])
    assert world.tokens == [10, 11, 12]


async def test_recomputed_tokens_are_counted_once_however_often_a_leg_reports_them():
    async with World(PAIR) as world:
        prefill = await world["prefill-0"].asked()
        world["prefill-0"].say(prefill, 0, 10, cached_tokens=0)
        leg = await world["decode-0"].asked()
        world["decode-0"].say(leg, 1, 11, recomputed_tokens=21)
        world["decode-0"].say(leg, 2, 12, FinishReason.LENGTH, recomputed_tokens=21)
    assert world.journey.ledger.recomputed_tokens == 21


async def test_what_a_lost_worker_had_computed_and_no_cache_has_counts_as_recomputed():
    async with World(PAIR, OTHER, max_tokens=4) as world:
        prefill = await world["prefill-0"].asked()
        world["prefill-0"].say(prefill, 0, 10, cached_tokens=0)
        leg = await world["decode-0"].asked()
        world["decode-0"].say(leg, 1, 11)
        world["decode-0"].fail(leg, FailureKind.WORKER_LOST)
        second = await world["prefill-1"].asked()
        world["prefill-1"].say(second, 2, 12, cached_tokens=16)
        leg = await world["decode-1"].asked()
        world["decode-1"].say(leg, 3, 13, FinishReason.LENGTH)
    # 20 prompt tokens and the first output token had KV; 16 were found in a cache.
    assert world.journey.ledger.recomputed_tokens == 5


async def test_an_attempt_that_computed_nothing_makes_nothing_recomputed():
    async with World(PAIR, OTHER) as world:
        first = await world["prefill-0"].asked()
        world["prefill-0"].fail(first, FailureKind.WORKER_LOST)
        second = await world["prefill-1"].asked()
        world["prefill-1"].say(second, 0, 10, cached_tokens=0)
        await finish(world, world["decode-1"])
    assert world.journey.ledger.recomputed_tokens == 0


async def test_closing_a_journey_ends_both_legs():
    world = World(PAIR)
    run = world.journey.run()
    waiting = asyncio.create_task(anext(run))
    prefill = await world["prefill-0"].asked()
    world["prefill-0"].say(prefill, 0, 10)
    await waiting
    await run.aclose()
    assert world["prefill-0"].aborted == ["j.0.prefill"]
    assert world["decode-0"].aborted == ["j.0.decode"]
    assert world.book.in_flight == 0


def stages(ledger: Ledger, now: float) -> dict[str, float]:
    timeline = ledger.timeline(now)
    return {name: getattr(timeline, name) for name in timeline.__slots__ if name != "total"}


def test_what_workers_do_not_see_counts_to_the_stage_that_the_router_waited_for():
    ledger = Ledger(100.0)
    ledger.begin(100.0)
    ledger.sent_s, ledger.first_s, ledger.ended_s = 101.0, 104.0, 110.0
    ledger.stages = StageTimes(0.5, 2.0, 0.25, 0.5, 0.25, 4.0)
    assert stages(ledger, 999.0) == {
        "router_wait": 1.0,
        "prefill_queue": 1.0,
        "prefill_compute": 2.0,
        "handoff_wait": 0.25,
        "handoff_transfer": 0.5,
        "decode_admission": 0.25,
        "decode": 5.0,
        "retry": 0.0,
    }


@pytest.mark.parametrize("moment", ["queued", "sent", "first token", "second attempt"])
def test_the_stages_of_an_output_that_is_cut_short_add_up_too(moment):
    ledger = Ledger(100.0)
    ledger.begin(100.0)
    if moment != "queued":
        ledger.sent_s = 101.0
    if moment in ("first token", "second attempt"):
        ledger.first_s = 102.0
        ledger.stages = StageTimes(prefill_compute=0.5)
    if moment == "second attempt":
        ledger.begin(104.0)
    assert sum(stages(ledger, 107.0).values()) == pytest.approx(7.0)


def test_legs_have_names_of_their_own_in_every_attempt():
    query = World(PAIR).journey._query(3, frozenset())
    assert query.leg_id(Leg.DECODE) == "j.3.decode"


class Listening:
    """A world whose journey tells its tokens to a listener; `heard` is what came, by either way."""

    def __init__(self, stop_at: int = 0, breaks_at: int = 0, **options) -> None:
        self.world = World(PAIR, max_tokens=9, **options)
        self.heard: list[int] = []
        self.directly: list[int] = []
        self._stop_at, self._breaks_at = stop_at, breaks_at
        self.error: BaseException | None = None

    def hear(self, tokens: Tokens) -> bool:
        if self._breaks_at in tokens.token_ids:
            raise ArithmeticError("a bug in who listens")
        self.directly += tokens.token_ids
        self.heard += tokens.token_ids
        return self._stop_at in tokens.token_ids

    async def run(self) -> None:
        try:
            async for piece in self.world.journey.run(self.hear):
                if isinstance(piece, Tokens):
                    self.heard += piece.token_ids
                else:
                    self.world.pieces.append(piece)
        except ArithmeticError as error:
            self.error = error

    async def __aenter__(self) -> Listening:
        self.task = asyncio.create_task(self.run())
        prefill = await self.world["prefill-0"].asked()
        self.world["prefill-0"].say(prefill, 0, 10)
        self.leg = await self.world["decode-0"].asked()
        self.decode = self.world["decode-0"]
        self.decode.say(self.leg, 1, 11)
        await until(lambda: 11 in self.heard, what="decode's first token")
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with asyncio.timeout(5):
            await self.task
        assert self.world.book.in_flight == 0
        assert not any(link.legs for link in self.world.links.values()), "a leg is left"


async def test_a_listener_hears_tokens_when_they_come_and_the_end_after_them():
    async with Listening() as listening:
        for index in range(2, 6):
            listening.decode.say(listening.leg, index, 10 + index)
            assert listening.heard[-1] == 10 + index, "it was not told at once"
        listening.decode.say(listening.leg, 6, 16, FinishReason.LENGTH)
    assert listening.heard == [10, 11, 12, 13, 14, 15, 16]
    assert listening.directly == [12, 13, 14, 15]
    assert listening.world.pieces == [Ended(FinishReason.LENGTH)]


async def test_a_listener_that_has_heard_enough_ends_the_output_and_its_leg():
    async with Listening(stop_at=13) as listening:
        for index in range(2, 6):
            listening.decode.say(listening.leg, index, 10 + index)
    assert listening.heard == [10, 11, 12, 13]
    assert listening.decode.aborted == ["j.0.decode"]
    assert listening.world.pieces == []


async def test_what_a_listener_raises_is_its_own_outputs_and_not_the_workers():
    async with Listening(breaks_at=13) as listening:
        for index in range(2, 6):
            listening.decode.say(listening.leg, index, 10 + index)
    assert isinstance(listening.error, ArithmeticError)
    assert listening.heard == [10, 11, 12]
    assert listening.decode.aborted == ["j.0.decode"]


async def test_a_listener_hears_each_token_once_across_a_lost_worker():
    async with Listening() as listening:
        listening.decode.say(listening.leg, 2, 12)
        listening.decode.fail(listening.leg, FailureKind.WORKER_LOST)
        await until(lambda: len(listening.world["prefill-0"].requests) == 2, what="a second attempt")
        prefill = await listening.world["prefill-0"].asked()
        listening.world["prefill-0"].say(prefill, 3, 13)
        leg = await listening.decode.asked()
        for index in range(4, 8):
            listening.decode.say(leg, index, 10 + index)
        listening.decode.say(leg, 8, 18, FinishReason.LENGTH)
    assert listening.heard == list(range(10, 19))
