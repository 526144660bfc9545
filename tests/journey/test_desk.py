"""What a worker takes from routers and peers, and that no part of it dies unheard."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from asking import answer, request, until
from paper_model import VOCAB_SIZE, PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.engine import desk
from baton.kvtransfer.incoming import Incoming
from baton.kvtransfer.lease import LeaseTable
from baton.proto import worker_pb2 as wire
from baton.proto import worker_pb2_grpc
from baton.proto.messages import (
    FailureKind,
    HandoffSource,
    Leg,
    LegFailure,
    Request,
    Sampling,
    TokenBatch,
    TokenLogprob,
    WorkerReport,
)
from baton.proto.settings import SchedulerSettings, TransferSettings
from baton.scheduler.plan import Logprobs

PROMPT = tuple(range(40))
SAMPLING = Sampling(temperature=0.0, max_tokens=8)


def leg(sequence_id: str, kind: Leg, prompt=PROMPT, **fields) -> Request:
    return Request(sequence_id, tuple(prompt), len(prompt), fields.pop("sampling", SAMPLING), kind, **fields)


def colocated(paper_dir, **fields) -> SmallCluster:
    return SmallCluster(paper_dir, **{"make_runner": PaperRunner, "prefill": 0, "decode": 0, "colocated": 1, **fields})


async def run(seat, asked: Request) -> list:
    """All events of a leg, until it has ended."""
    events: list[TokenBatch | LegFailure] = []
    seat.link.submit(asked, events.append)

    def ended() -> bool:
        return bool(events) and (isinstance(events[-1], LegFailure) or events[-1].finish_reason is not None)

    await until(ended, what=f"the end of {asked.sequence_id}")
    return events


@pytest.mark.parametrize(
    ("worker", "asked"),
    [
        ("prefill-0", leg("x", Leg.PREFILL, (1, VOCAB_SIZE))),
        ("prefill-0", leg("x", Leg.PREFILL, (-1, 1))),
        ("prefill-0", leg("x", Leg.PREFILL, ())),
        ("prefill-0", leg("x", Leg.PREFILL, sampling=replace(SAMPLING, prompt_logprobs=VOCAB_SIZE + 1))),
        ("prefill-0", leg("x", Leg.PREFILL, sampling=replace(SAMPLING, max_tokens=0))),
        ("decode-0", leg("x", Leg.PREFILL)),
        ("decode-0", leg("x", Leg.DECODE)),
        ("decode-0", leg("x", Leg.DECODE, (1, 1 << 30), source=HandoffSource("p", "i", "a", "s"))),
    ],
)
async def test_a_leg_that_would_break_a_step_is_refused_and_the_worker_goes_on(paper_dir, worker, asked):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        (refusal,) = await run(small.seats[worker], asked)
        assert refusal.kind is FailureKind.REFUSED
        assert (await answer(small.inference, request(PROMPT, 8))).tokens == paper_output(PROMPT, 8)
        await small.at_rest()


async def test_a_second_leg_of_the_same_name_is_refused_and_the_first_keeps_its_router(paper_dir):
    async with colocated(paper_dir, make_runner=lambda: PaperRunner(step_s=0.005)) as small:
        seat = small.seats["colocated-0"]
        tokens, refusals = [], []
        seat.link.submit(leg("x", Leg.WHOLE), tokens.append)
        async with grpc.aio.insecure_channel(seat.description.address) as channel:
            stream = worker_pb2_grpc.WorkerStub(channel).Connect()
            await stream.write(wire.RouterMessage(hello=wire.RouterHello(router_incarnation="other")))
            await until(lambda: tokens)
            await stream.write(wire.RouterMessage(submit=leg("x", Leg.WHOLE).to_wire(1)))
            while not refusals:
                refusals = WorkerReport.from_wire(await stream.read()).failures
            assert refusals[0].kind is FailureKind.REFUSED
            await until(lambda: len(tokens) == 8, what="the rest of the first leg")
            stream.cancel()
        await small.at_rest()


async def test_what_no_router_sends_ends_its_stream_and_not_the_worker(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        address = small.seats["prefill-0"].description.address
        async with grpc.aio.insecure_channel(address) as channel:
            stream = worker_pb2_grpc.WorkerStub(channel).Connect()
            await stream.write(wire.RouterMessage(hello=wire.RouterHello(router_incarnation="odd")))
            await stream.write(wire.RouterMessage(submit=wire.Submit(number=1, sequence_id="x")))
            async with asyncio.timeout(5):
                while await stream.read() is not grpc.aio.EOF:
                    pass
            assert await stream.code() is grpc.StatusCode.OK
        assert (await answer(small.inference, request(PROMPT, 8))).tokens == paper_output(PROMPT, 8)


async def test_a_router_that_does_not_read_is_hung_up_on_and_its_legs_end(paper_dir, monkeypatch):
    monkeypatch.setattr(desk, "MAX_BACKLOG", 100)
    async with colocated(paper_dir, make_runner=lambda: PaperRunner(step_s=0.002)) as small:
        seat = small.seats["colocated-0"]
        async with grpc.aio.insecure_channel(seat.description.address) as channel:
            stream = worker_pb2_grpc.WorkerStub(channel).Connect()
            await stream.write(wire.RouterMessage(hello=wire.RouterHello(router_incarnation="deaf")))
            sampling = replace(SAMPLING, max_tokens=3000)
            await stream.write(wire.RouterMessage(submit=leg("x", Leg.WHOLE, sampling=sampling).to_wire(1)))
            worker_desk = seat.worker.core.desk
            deaf = await until(lambda: next((k for k in worker_desk._links if k.incarnation == "deaf"), None))
            filler = LegFailure("nobody", FailureKind.INTERNAL, "x" * 4096)
            while deaf.open:
                deaf.post(WorkerReport(failures=(filler,)))
                await asyncio.sleep(0)
            assert deaf.outbox.qsize() <= 100
            await until(lambda: deaf not in worker_desk._links, what="the end of its stream")
        await small.at_rest()
        assert (await answer(small.inference, request(PROMPT, 8))).tokens == paper_output(PROMPT, 8)


async def test_the_end_of_a_routers_stream_ends_all_that_it_had_on_the_worker(paper_dir):
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.002)) as small:
        calls = [small.inference.Generate(request([*PROMPT, index], 400)) for index in range(20)]
        reading = [asyncio.create_task(call.read()) for call in calls]
        await until(lambda: small.seats["decode-0"].worker.core.scheduler.load().running > 10)
        for seat in small.members():
            seat.link._task.cancel()
        await until(lambda: not any(seat.worker.core.scheduler._sequences for seat in small.members()))
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await small.at_rest()  # a block that a read still writes is free when the read has ended, not before


async def test_time_in_the_mailbox_during_a_long_step_counts_as_queue(paper_dir):
    async with colocated(paper_dir, make_runner=lambda: PaperRunner(step_s=0.2)) as small:
        seat = small.seats["colocated-0"]
        first = asyncio.create_task(run(seat, leg("a", Leg.WHOLE, sampling=replace(SAMPLING, max_tokens=1))))
        await until(lambda: seat.worker.core.scheduler.load().running)
        second = await run(seat, leg("b", Leg.WHOLE, sampling=replace(SAMPLING, max_tokens=1)))
        assert second[0].summary.times.prefill_queue > 0.1
        await first


class ScoringRunner(PaperRunner):
    """Scores every prompt token that anybody wants scored: its log-probability is minus its position."""

    def run(self, step):
        result = super().run(step)
        scores = {}
        for index, (sequence, start, num_tokens, _) in enumerate(step.chunks):
            end = min(start + num_tokens + 1, sequence.num_prompt_tokens)
            if sequence.sampling.prompt_logprobs is not None and start + 1 < end:
                entries = (TokenLogprob(sequence.token_ids[place], -float(place), 1) for place in range(start + 1, end))
                scores[index] = Logprobs(prompt=tuple(entries))
        return replace(result, logprobs=scores)


async def test_prompt_logprobs_of_a_sequence_that_is_preempted_in_its_prompt_come_once_each(paper_dir):
    scheduler = SchedulerSettings(max_num_batched_tokens=4)
    async with colocated(
        paper_dir, make_runner=lambda: ScoringRunner(num_blocks=11, step_s=0.005), scheduler=scheduler
    ) as small:
        seat = small.seats["colocated-0"]
        growing = leg("a", Leg.WHOLE, range(15), sampling=replace(SAMPLING, max_tokens=60))
        first = asyncio.create_task(run(seat, growing))
        await asyncio.sleep(0)
        scored = leg("b", Leg.WHOLE, range(120), sampling=replace(SAMPLING, max_tokens=2, prompt_logprobs=0))
        events = await run(seat, scored)
        await first
        assert events[-1].summary.preemptions > 0
        assert [entry.logprob for entry in events[0].prompt_logprobs] == [-float(place) for place in range(1, 120)]
        await small.at_rest()


async def test_a_sequence_that_its_landing_finishes_says_so(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        prefill, decode = small.seats["prefill-0"], small.seats["decode-0"]
        description = prefill.description
        tokens: list = []
        prefill.link.submit(leg("p", Leg.PREFILL), tokens.append)
        await until(lambda: tokens)
        source = HandoffSource("prefill-0", description.incarnation, description.address, "p")
        only_one = replace(SAMPLING, max_tokens=1)
        (end,) = await run(decode, leg("d", Leg.DECODE, sampling=only_one, source=source))
        assert (end.first_index, end.token_ids) == (0, tokens[0].token_ids)
        assert not decode.worker.core._legs
        await small.at_rest()
        prefill.link.forget("p")


# --- no part of a worker dies unheard ---------------------------------------------------------------------------------


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("a bug")


async def expect_failure(small: SmallCluster, kind: type[Exception] = RuntimeError) -> None:
    await until(lambda: small.failures, what="the failure")
    assert isinstance(small.failures[0], kind)
    small.failures.clear()


def quick(paper_dir, **fields) -> SmallCluster:
    transfer = TransferSettings(connector="local", heartbeat_s=0.02)
    return SmallCluster(paper_dir, **{"make_runner": PaperRunner, "transfer": transfer, **fields})


async def ask(small: SmallCluster) -> None:
    """A request that need not go through."""
    try:
        await answer(small.inference, request(PROMPT, 4), timeout=0.5)
    except grpc.aio.AioRpcError:
        pass


async def test_a_connector_that_cannot_say_what_became_of_reads_fails_the_worker(paper_dir):
    async with quick(paper_dir) as small:
        small.seats["decode-0"].worker.core.duty.side._connector.poll = broken
        await ask(small)
        await expect_failure(small)


async def test_a_bug_in_what_the_step_loop_posts_to_the_receiver_fails_the_worker(paper_dir):
    async with quick(paper_dir) as small:
        small.seats["decode-0"].worker.core.duty.side._connector.pull = broken
        await ask(small)
        await expect_failure(small)


async def test_a_bug_in_what_a_peer_is_heard_with_fails_the_worker(paper_dir, monkeypatch):
    async with quick(paper_dir) as small:
        monkeypatch.setattr(Incoming, "notice", broken)
        await ask(small)
        await expect_failure(small)


async def test_a_bug_in_the_receivers_tick_fails_the_worker(paper_dir):
    async with quick(paper_dir) as small:
        small.seats["decode-0"].worker.core.duty.side._clock = broken
        await expect_failure(small)


async def test_a_bug_in_the_lenders_tick_fails_the_worker(paper_dir):
    async with quick(paper_dir) as small:
        small.seats["prefill-0"].worker.core.duty.side.tick = broken
        await expect_failure(small)


async def test_a_bug_in_what_a_watcher_is_heard_with_fails_the_worker(paper_dir, monkeypatch):
    async with quick(paper_dir) as small:
        monkeypatch.setattr(LeaseTable, "valid", broken)
        await ask(small)
        await expect_failure(small)


async def test_a_step_that_never_ends_fails_the_worker(paper_dir, monkeypatch):
    monkeypatch.setattr(desk, "MAX_TURN_S", 0.15)
    async with colocated(paper_dir, make_runner=lambda: PaperRunner(step_s=0.5)) as small:
        await ask(small)
        await expect_failure(small, desk.StepLoopStalled)


async def test_a_bug_in_what_a_worker_is_heard_with_loses_the_link_loudly(paper_dir, caplog):
    async with quick(paper_dir) as small:
        link = small.seats["prefill-0"].link
        link._reported = broken
        events: list = []
        link.submit(leg("x", Leg.PREFILL), events.append)
        await until(link.lost.done)
        await until(lambda: any(isinstance(event, LegFailure) for event in events))
        assert events[-1].kind is FailureKind.WORKER_LOST
        assert "the link to prefill-0" in caplog.text


async def test_all_who_wait_for_a_worker_to_rest_are_told(paper_dir):
    async with colocated(paper_dir, make_runner=lambda: PaperRunner(step_s=0.005)) as small:
        link = small.seats["colocated-0"].link
        link.submit(leg("x", Leg.WHOLE), lambda event: None)
        waiting = [asyncio.create_task(link.rest(5.0)) for _ in range(3)]
        assert await asyncio.gather(*waiting) == [True] * 3
