"""Readers that do not read cost the router little, cost others nothing, and get everything when they read again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil
import pytest
from asking import until
from hypothesis import given, settings
from hypothesis import strategies as st
from null_workers import Shape, null_cluster, output, seed_for

from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc, inference_pb2_grpc
from baton.proto import inference_pb2 as inference
from baton.proto.messages import TokenLogprob
from baton.router.outbox import MAX_MERGED_TOKENS, MAX_WAITING, Outbox

SLOW, OTHERS = 64, 16
SLOW_TOKENS, OTHERS_TOKENS = 2048, 128
# A message of one token takes about 450 bytes, so unread ones would take 0.9 MiB a reader.
READER_KIB = 256
TEXT_IDS = tuple((7 * index * index + index) % 256 for index in range(5000))
# Of a stream, as much as this may be on its way to a client that does not read it.
WINDOW = 4096


def tokens_of(message: inference.GenerateResponse) -> tuple[list[int], str]:
    return list(message.token_ids), message.text


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.booleans()), max_size=300),
    takes=st.lists(st.integers(0, 40), max_size=20),
)
def test_what_is_taken_is_what_was_put_however_late_the_reader(steps, takes):
    async def run() -> None:
        outbox = Outbox("request")
        put: dict[int, list] = {index: [[], "", [], 0] for index in range(3)}
        taken: dict[int, list] = {index: [[], "", [], 0] for index in range(3)}

        async def take() -> bool:
            message = await outbox.take()
            if message is None:
                return False
            mine = taken[message.index]
            assert message.request_id == "request"
            assert message.first_token_index == len(mine[0])
            assert mine[3] == 0, "a message came after the last one"
            mine[0] += message.token_ids
            mine[1] += message.text
            mine[2] += [TokenLogprob.from_wire(entry) for entry in message.logprobs]
            mine[3] += message.HasField("finish")
            return True

        pauses = iter(takes)
        for number, (index, num_tokens, reads) in enumerate(steps):
            ids = [number + offset for offset in range(num_tokens)]
            logprobs = [TokenLogprob(token_id, -0.5, 1, (token_id,), (-0.5,)) for token_id in ids]
            outbox.put(index, len(put[index][0]), ids, f"{number} ", logprobs)
            put[index][0] += ids
            put[index][1] += f"{number} "
            put[index][2] += logprobs
            if reads:
                for _ in range(min(next(pauses, 0), len(outbox))):
                    await take()
        for index in range(3):
            outbox.put(index, len(put[index][0]), (), "", finish=inference.Finish())
            put[index][3] = 1
        outbox.close()
        while await take():
            pass
        assert taken == put

    asyncio.run(run())


def test_messages_for_a_late_reader_are_few():
    async def run() -> None:
        outbox = Outbox("request")
        for index in range(10_000):
            outbox.put(0, index, (index,), "x")
        assert len(outbox) <= MAX_WAITING + 10_000 // MAX_MERGED_TOKENS + 1

    asyncio.run(run())


async def test_a_reader_who_keeps_up_gets_a_message_for_each_step():
    outbox = Outbox("request")
    for index in range(1000):
        outbox.put(0, index, (index,), "x")
        assert tokens_of(await outbox.take()) == ([index], "x")


async def test_what_passes_a_reader_by_comes_in_order_with_what_it_takes():
    """`direct` refuses now and then, as a connection does whose client does not read."""
    outbox, seen, refusing = Outbox("request"), [], False

    def direct(index: int, token_ids: Sequence[int], text: str) -> bool:
        if not refusing:
            seen.extend(token_ids)
        return not refusing

    async def read() -> None:
        while (message := await outbox.take()) is not None:
            # What comes while this one is in hand may not overtake it.
            await asyncio.sleep(0)
            seen.extend(message.token_ids)

    outbox.pass_by(direct)
    reading = asyncio.create_task(read())
    for index in range(1000):
        refusing = index % 7 in (2, 3)
        outbox.put(0, index, (index,), "x", goes_on=True)
        if index % 5 == 0:
            await asyncio.sleep(0)
    outbox.put(0, 1000, (), "", finish=inference.Finish())
    outbox.close()
    await reading
    assert seen == list(range(1000))


def generate(stub: inference_pb2_grpc.InferenceStub, start: int, num_tokens: int):
    return stub.Generate(
        inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=TEXT_IDS[:16]),
            sampling=inference.SamplingParams(
                max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=seed_for(start)
            ),
        )
    )


async def heard(call, start: int, num_tokens: int) -> int:
    """Reads a stream to its end; the number of its messages. It must have every token once and in order."""
    tokens, said, number, finish = [], "", 0, None
    async for message in call:
        assert finish is None
        assert message.first_token_index == len(tokens)
        tokens += message.token_ids
        said += message.text
        number += 1
        finish = message.finish if message.HasField("finish") else None
    assert tokens == output(TEXT_IDS, seed_for(start), num_tokens)
    assert finish is not None
    assert finish.usage.completion_tokens == num_tokens
    return number


@pytest.fixture
def nulls(paper_dir: Path):
    with null_cluster(paper_dir, TEXT_IDS, Shape(decode=2, step_s=0.005)) as nulls:
        yield nulls


async def test_readers_that_do_not_read_are_bounded_and_do_not_slow_others(nulls):
    options = (("grpc.http2.lookahead_bytes", WINDOW), ("grpc.http2.bdp_probe", 0))
    router = psutil.Process(nulls.router_pid)
    async with (
        grpc.aio.insecure_channel(nulls.addresses.grpc, options=options) as slow_channel,
        grpc.aio.insecure_channel(nulls.addresses.grpc) as channel,
        asyncio.timeout(200),
    ):
        slow, stub = inference_pb2_grpc.InferenceStub(slow_channel), inference_pb2_grpc.InferenceStub(channel)
        clusters = cluster_pb2_grpc.ClusterStub(channel)
        await asyncio.gather(*(heard(generate(stub, start, 64), start, 64) for start in range(SLOW)))
        before = router.memory_info().rss
        calls = [generate(slow, start, SLOW_TOKENS) for start in range(SLOW)]
        await asyncio.gather(*(call.initial_metadata() for call in calls))
        others = await asyncio.gather(
            *(heard(generate(stub, start, OTHERS_TOKENS), start, OTHERS_TOKENS) for start in range(OTHERS))
        )
        assert all(others)

        async def is_said() -> bool:
            return (await clusters.GetStatus(cluster.GetStatusRequest())).router.running == 0

        await until(is_said, 150.0, "the end of all that slow readers are told")
        assert (router.memory_info().rss - before) / SLOW < READER_KIB << 10
        numbers = [await heard(call, start, SLOW_TOKENS) for start, call in enumerate(calls)]
        assert max(numbers) < SLOW_TOKENS / 2
