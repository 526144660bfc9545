"""A request that is cancelled at any moment leaves no block behind on either side."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from asking import answer, request, until
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.kvtransfer.connector import Pull, PullEvent
from baton.proto import inference_pb2 as inference
from baton.proto.settings import SchedulerSettings
from baton.router.config import RouterSettings
from baton.scheduler.sequence import State


class SlowConnector:
    """A connector whose events are told late: it stands where the real one does, and everything passes through it."""

    def __init__(self, real, delay_s: float) -> None:
        self._real = real
        self._delay_s = delay_s
        self._held: list[tuple[float, PullEvent]] = []
        self.started = 0

    def pull(self, pull: Pull) -> None:
        self.started += 1
        self._real.pull(pull)

    def poll(self) -> list[PullEvent]:
        now = time.monotonic()
        self._held += [(now + self._delay_s, event) for event in self._real.poll()]
        due = [event for at, event in self._held if at <= now]
        self._held = [(at, event) for at, event in self._held if at > now]
        return due

    def __getattr__(self, name: str):
        return getattr(self._real, name)


def slow_down(seat, delay_s: float) -> SlowConnector:
    receiver = seat.worker.core.duty.side
    receiver._connector = SlowConnector(receiver._connector, delay_s)
    return receiver._connector


def states(seat) -> list[State]:
    return [sequence.state for sequence in list(seat.worker.core.scheduler._sequences.values())]


def computed(seat) -> int:
    return max((entry.num_computed_tokens for entry in list(seat.worker.core.scheduler._sequences.values())), default=0)


PROMPT = [index % 251 for index in range(640)]
CHUNK = 64
SOON_S = 5.0
"""Work and KV of a request are given back within a few steps. A machine that does much else may take longer."""


def cluster(paper_dir, **fields) -> SmallCluster:
    fields = {
        "scheduler": SchedulerSettings(max_num_batched_tokens=CHUNK),
        "make_runner": lambda: PaperRunner(num_blocks=128, seconds_per_token=0.0005, step_s=0.002),
        **fields,
    }
    return SmallCluster(paper_dir, **fields)


async def cancel_when(small: SmallCluster, condition, how: str, prompt=PROMPT, max_tokens: int = 200) -> None:
    """Starts a request, ends it at the moment in the given way, and finds everything at rest within a second."""
    message = request(prompt, max_tokens, request_id="victim")
    timeout = 60.0
    call = small.inference.Generate(message, timeout=timeout)

    async def read() -> inference.Finish | None:
        finish = None
        async for part in call:
            if part.HasField("finish"):
                finish = part.finish
        return finish

    reading = asyncio.create_task(read())
    await until(condition, what="the moment to cancel")
    if how == "disconnect":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        found = await small.inference.Abort(inference.AbortRequest(request_id="victim"))
        assert found.found
        finish = await reading
        assert finish is not None
        assert finish.reason == inference.FINISH_REASON_ABORTED
    await small.at_rest(timeout_s=SOON_S)


@pytest.mark.parametrize("how", ["disconnect", "abort"])
class TestCancelled:
    async def test_while_it_is_queued_in_the_router(self, paper_dir, how):
        async with cluster(paper_dir, router_settings=RouterSettings(port=0, credit_steps=1.0)) as small:
            other = asyncio.create_task(answer(small.inference, request(PROMPT[::-1], 1)))
            await until(lambda: states(small.seats["prefill-0"]))
            message = request(PROMPT, 50, request_id="victim")
            call = small.inference.Generate(message, timeout=60)
            await until(lambda: small.router.dispatcher.num_requests == 1)
            if how == "disconnect":
                call.cancel()
            else:
                assert (await small.inference.Abort(inference.AbortRequest(request_id="victim"))).found
            await until(lambda: small.router.dispatcher.num_requests == 0, timeout_s=SOON_S)
            await other
            await small.at_rest(timeout_s=SOON_S)

    async def test_while_it_waits_in_the_prefill_worker(self, paper_dir, how):
        async with cluster(paper_dir, router_settings=RouterSettings(port=0, credit_steps=100.0)) as small:
            other = asyncio.create_task(answer(small.inference, request(PROMPT[::-1], 2)))
            seat = small.seats["prefill-0"]
            await until(lambda: State.RUNNING in states(seat))
            call = small.inference.Generate(request(PROMPT, 50, request_id="victim"), timeout=60)
            await until(lambda: State.WAITING in states(seat))
            if how == "disconnect":
                call.cancel()
            else:
                assert (await small.inference.Abort(inference.AbortRequest(request_id="victim"))).found
            await until(lambda: len(states(seat)) <= 1, timeout_s=SOON_S)
            await other
            await small.at_rest(timeout_s=SOON_S)

    async def test_in_its_first_chunk(self, paper_dir, how):
        async with cluster(paper_dir) as small:
            await cancel_when(small, lambda: computed(small.seats["prefill-0"]) > 0, how)

    async def test_in_a_middle_chunk(self, paper_dir, how):
        async with cluster(paper_dir) as small:
            await cancel_when(small, lambda: computed(small.seats["prefill-0"]) >= 5 * CHUNK, how)

    async def test_while_its_kv_is_lent_and_nobody_has_room_for_it(self, paper_dir, how):
        async with cluster(
            paper_dir,
            scheduler=SchedulerSettings(max_num_batched_tokens=CHUNK, max_num_seqs=64),
            make_runner=lambda: PaperRunner(num_blocks=64, seconds_per_token=0.0001, step_s=0.01),
        ) as small:
            decode, prefill = small.seats["decode-0"], small.seats["prefill-0"]
            long = asyncio.create_task(answer(small.inference, request(PROMPT[:600], 300)))
            await until(lambda: State.RUNNING in states(decode))
            # The router would not send it while decode is full: the worker's own rule is what is tested here.
            small.promise_room()
            call = small.inference.Generate(request(PROMPT[40:], 50, request_id="victim"), timeout=60)
            await until(lambda: State.EXPORTED in states(prefill) and State.WAITING in states(decode))
            if how == "disconnect":
                call.cancel()
            else:
                assert (await small.inference.Abort(inference.AbortRequest(request_id="victim"))).found
            await until(lambda: not states(prefill) and len(states(decode)) == 1, timeout_s=SOON_S)
            assert (await long).tokens == paper_output(PROMPT[:600], 300)
            await small.at_rest(timeout_s=SOON_S)

    async def test_while_its_kv_is_being_pulled(self, paper_dir, how):
        async with cluster(paper_dir) as small:
            connector = slow_down(small.seats["decode-0"], 0.3)
            await cancel_when(small, lambda: connector.started > 0, how)

    async def test_while_its_last_chunk_is_being_pulled(self, paper_dir, how):
        async with cluster(paper_dir) as small:
            slow_down(small.seats["decode-0"], 0.3)
            await cancel_when(small, lambda: State.EXPORTED in states(small.seats["prefill-0"]), how)

    async def test_while_it_is_decoded(self, paper_dir, how):
        async with cluster(paper_dir) as small:
            await cancel_when(small, lambda: State.RUNNING in states(small.seats["decode-0"]), how)


async def test_a_deadline_ends_both_legs(paper_dir):
    async with cluster(paper_dir) as small:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await answer(small.inference, request(PROMPT, 400), timeout=0.5)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await small.at_rest(timeout_s=SOON_S)


async def test_a_stop_string_ends_the_decode_leg(paper_dir):
    async with cluster(paper_dir) as small:
        whole = await answer(small.inference, request(PROMPT, 60))
        stop = whole.text[20:22]
        cut = await answer(small.inference, request(PROMPT, 60, sampling_stop=[stop]))
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish.reason == inference.FINISH_REASON_STOP
        assert cut.finish.stop == stop
        await small.at_rest(timeout_s=SOON_S)


async def test_a_storm_of_cancels_leaves_nothing(paper_dir):
    async with cluster(paper_dir, prefill=2, decode=2) as small:

        async def one(index: int) -> None:
            call = small.inference.Generate(request(PROMPT[: 30 + 9 * index], 60), timeout=60)
            reading = asyncio.create_task(drain(call))
            await asyncio.sleep(0.011 * index % 0.7)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        await asyncio.gather(*(one(index) for index in range(60)))
        await small.at_rest(timeout_s=SOON_S)
        assert (await answer(small.inference, request(PROMPT, 10))).tokens == paper_output(PROMPT, 10)


async def drain(call) -> None:
    async for _ in call:
        pass
