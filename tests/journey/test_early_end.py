"""Requests that end before their hand-off does: by an Abort at once, or by a first token that is the last."""

from __future__ import annotations

import asyncio

import pytest
from asking import answer, request, until
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.proto import inference_pb2 as inference
from baton.router.gateway import Gateway
from baton.router.observe import Call, Face


@pytest.mark.parametrize("turns", range(6))
async def test_an_abort_ends_the_stream_however_early_or_late_it_comes(paper_dir, turns):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        for number in range(20):
            name = f"victim-{number}"
            num_tokens = 1 + number % 5
            asked = asyncio.create_task(
                answer(small.inference, request([number + 1] * 40, num_tokens, request_id=name), timeout=5.0)
            )
            for _ in range(turns):
                await asyncio.sleep(0.0005 * (number % 4))
            await small.inference.Abort(inference.AbortRequest(request_id=name))
            result = await asked
            whole = paper_output([number + 1] * 40, num_tokens)
            assert result.tokens == whole[: len(result.tokens)]
            aborted = result.finish.reason == inference.FINISH_REASON_ABORTED
            assert aborted or result.tokens == whole
        await until(lambda: small.router.num_running == 0, what="the end of all requests")
        await small.at_rest()


async def test_an_abort_before_the_request_has_begun_to_run_ends_it(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        gateway, begin = Gateway(small.router), small.router.begin

        def abort_at_once() -> None:
            begin()
            # As Abort does, before the loop has turned to the request's task.
            assert gateway.abort("victim")

        small.router.begin = abort_at_once
        message = request([7] * 40, 50, request_id="victim")
        async with asyncio.timeout(5.0):
            generation = await gateway.open(message, Call(Face.GRPC))
            parts = [part async for part in generation.messages()]
        assert [part.finish.reason for part in parts] == [inference.FINISH_REASON_ABORTED]
        await until(lambda: small.router.num_running == 0, what="the end of the request")


async def test_a_first_token_that_is_the_last_is_no_failed_handoff(paper_dir):
    prompt = list(range(80))
    token = paper_output(prompt, 1)[0]
    # Slow enough for decode to subscribe while the prompt is being read.
    async with SmallCluster(paper_dir, lambda: PaperRunner(seconds_per_token=0.002)) as small:
        link = small.seats["prefill-0"].link
        deliver = link._deliver
        # What prefill tells the router arrives after all that it tells decode.
        link._deliver = lambda event, ended: asyncio.get_running_loop().call_later(0.2, deliver, event, ended)
        message = request(prompt, 50, sampling_stop_token_ids=[token], sampling_ignore_eos=False)
        result = await answer(small.inference, message, timeout=5.0)
        assert result.tokens == [token]
        assert result.finish.reason == inference.FINISH_REASON_STOP
        assert result.finish.retries == 0
        await small.at_rest()
