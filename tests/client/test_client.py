"""Both clients, against a fake router over a wire that can be cut: outputs, continuation, errors, cancellation."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import grpc
import pytest
from doctor.wire import Wire as SlowWire
from fake_router import FakeRouter, Refusal, Wire, text_of, whole_text, whole_tokens
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from baton.client import errors
from baton.client.client import AsyncClient, Client
from baton.client.request import RequestOptions
from baton.client.result import Result
from baton.client.resume import Patience
from baton.proto import cluster_pb2 as cluster
from baton.proto.messages import FinishReason

Ask = Callable[..., Awaitable[Result]]
UNAVAILABLE = Refusal(grpc.StatusCode.UNAVAILABLE, "no worker yet")


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, wire: Wire, patience: Patience) -> Ask:
    """Asks by one of the two clients, and waits for the result."""

    async def by_sync(
        prompt: str = "hello",
        *,
        timeout_s: float | None = None,
        target: str | None = None,
        patience: Patience = patience,
        **options: object,
    ) -> Result:
        def call() -> Result:
            with Client(target or wire.target, patience=patience) as client:
                return client.generate(prompt, timeout_s=timeout_s, **options).result()  # type: ignore[arg-type]

        return await asyncio.to_thread(call)

    async def by_async(
        prompt: str = "hello",
        *,
        timeout_s: float | None = None,
        target: str | None = None,
        patience: Patience = patience,
        **options: object,
    ) -> Result:
        async with AsyncClient(target or wire.target, patience=patience) as client:
            return await client.generate(prompt, timeout_s=timeout_s, **options).result()  # type: ignore[arg-type]

    return by_sync if request.param == "sync" else by_async


def assert_whole(result: Result, seed: int, number: int, n: int = 1) -> None:
    """Each output is the very one that an unbroken stream would have given."""
    assert [output.index for output in result.outputs] == list(range(n))
    for output in result.outputs:
        assert output.token_ids == whole_tokens(seed + output.index, number)
        assert output.text == whole_text(seed + output.index, number)
        assert output.finish.reason is FinishReason.LENGTH


async def test_a_router_at_the_end_of_a_long_wire_is_reached_at_the_first_attempt(router: FakeRouter) -> None:
    def call(target: str) -> None:
        with Client(target) as client:
            client.status()

    async with SlowWire(f"127.0.0.1:{router.port}", delay_s=0.3) as wire:
        await asyncio.to_thread(call, wire.address)


async def test_a_result_has_the_text_the_tokens_and_how_it_ended(ask: Ask) -> None:
    result = await ask(max_tokens=5, seed=3)
    assert_whole(result, seed=3, number=5)
    assert result.finish.usage.prompt_tokens == 12
    assert result.finish.connector == "nixl"
    assert result.timeline.total == pytest.approx(0.156)
    assert 0 < result.ttft_s <= result.total_s
    assert result.num_resumes == 0


async def test_outputs_come_as_they_are_made(wire: Wire, router: FakeRouter) -> None:
    router.is_endless = True
    async with AsyncClient(wire.target) as client, client.generate("hello", max_tokens=3, seed=1) as generation:
        first = await anext(generation)
    assert first.text == text_of(whole_tokens(1, 1)[0])
    assert first.finish is None


async def test_everything_that_is_said_reaches_the_router(ask: Ask, router: FakeRouter) -> None:
    await ask(
        "prompt",
        request_id="mine",
        priority=-1,
        ttft_ms=250.0,
        session_id="s",
        cache_salt="c",
        temperature=0.0,
        max_tokens=2,
        stop=["x"],
        logit_bias={5: -1.0},
    )
    (message,) = router.requests
    assert message.text == "prompt"
    assert (message.request_id, message.priority, message.session_id, message.cache_salt) == ("mine", -1, "s", "c")
    assert message.slo.ttft_ms == 250
    assert not message.slo.HasField("tpot_ms")
    assert message.sampling.HasField("temperature")
    assert list(message.sampling.stop) == ["x"]
    assert dict(message.sampling.logit_bias) == {5: -1.0}


async def test_prompts_may_be_text_token_ids_or_messages_but_only_one(wire: Wire, router: FakeRouter) -> None:
    async with AsyncClient(wire.target) as client:
        await client.generate(token_ids=[1, 2]).result()
        await client.generate(messages=[{"role": "user", "content": "hi"}]).result()
        await client.generate("").result()
        with pytest.raises(TypeError, match="exactly one"):
            client.generate("text", token_ids=[1])
        with pytest.raises(TypeError, match="exactly one"):
            client.generate()
    assert [message.WhichOneof("prompt") for message in router.requests] == ["token_ids", "chat", "text"]


async def test_a_token_is_sent_as_a_bearer(wire: Wire, router: FakeRouter) -> None:
    async with AsyncClient(wire.target, token="secret") as client:
        await client.generate("hello").result()
    assert router.metadata[0]["authorization"] == "Bearer secret"


# --- continuation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_after", [0, 1, 5, 7])
async def test_a_cut_stream_goes_on_without_gap_or_repeat(
    ask: Ask, router: FakeRouter, wire: Wire, cut_after: int
) -> None:
    router.happenings = [{cut_after: wire.restart}]
    result = await ask(max_tokens=8, seed=3)
    assert_whole(result, seed=3, number=8)
    assert result.num_resumes == 1
    first, second = router.requests
    assert second.request_id == first.request_id != ""
    assert tuple(second.resume_token_ids) == result.token_ids[: len(second.resume_token_ids)]


async def test_a_request_without_a_seed_gets_one_that_its_continuation_shares(
    ask: Ask, router: FakeRouter, wire: Wire
) -> None:
    router.happenings = [{3: wire.restart}]
    result = await ask(max_tokens=8)
    first, second = router.requests
    assert first.sampling.HasField("seed")
    assert_whole(result, seed=second.sampling.seed, number=8)


async def test_a_stream_may_be_cut_again_and_again(ask: Ask, router: FakeRouter, wire: Wire) -> None:
    router.happenings = [{2: wire.restart}, {1: wire.restart}, {0: wire.restart}, {3: wire.restart}]
    result = await ask(max_tokens=12, seed=9)
    assert_whole(result, seed=9, number=12)
    assert len(router.requests) == 5


@pytest.mark.parametrize("cut_after", [0, 2, 13])
async def test_each_of_several_outputs_is_continued_by_its_own_seed(
    ask: Ask, router: FakeRouter, wire: Wire, cut_after: int
) -> None:
    router.happenings = [{cut_after: wire.restart}]
    assert_whole(await ask(max_tokens=5, seed=3, n=3), seed=3, number=5, n=3)


async def test_a_router_that_says_goodbye_in_the_middle_is_asked_again(ask: Ask, router: FakeRouter) -> None:
    overloaded = Refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "full",
        (error_details_pb2.RetryInfo(retry_delay=Duration(nanos=10_000_000)),),
    )
    still_there = Refusal(grpc.StatusCode.ALREADY_EXISTS, "in progress")
    router.happenings = [{4: UNAVAILABLE}, {0: UNAVAILABLE}, {0: overloaded}, {0: still_there}]
    assert_whole(await ask(max_tokens=8, seed=3), seed=3, number=8)


async def test_a_queued_request_survives_a_router_that_comes_back_without_workers(
    ask: Ask, router: FakeRouter, wire: Wire
) -> None:
    router.happenings = [{0: wire.restart}, {0: UNAVAILABLE}]
    assert_whole(await ask(max_tokens=4, seed=3), seed=3, number=4)


async def test_a_stream_that_ends_before_the_output_is_continued(ask: Ask, router: FakeRouter) -> None:
    router.ends_early = {0: 3}
    assert_whole(await ask(max_tokens=8, seed=3), seed=3, number=8)


async def test_waiting_for_a_router_ends_when_patience_does(ask: Ask, router: FakeRouter, wire: Wire) -> None:
    router.happenings = [{2: lambda: die(wire)}]
    with pytest.raises(errors.Unavailable):
        await ask(max_tokens=8, patience=Patience(give_up_s=0.2, first_delay_s=0.01, longest_delay_s=0.05))


async def test_waiting_for_a_router_ends_at_the_deadline(ask: Ask, router: FakeRouter, wire: Wire) -> None:
    router.happenings = [{2: lambda: die(wire)}]
    started = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded):
        await ask(max_tokens=8, timeout_s=0.5)
    assert time.monotonic() - started < 3


async def die(wire: Wire) -> None:
    await wire.cut()
    await asyncio.Event().wait()


async def test_tokens_that_do_not_follow_on_are_an_error(ask: Ask, router: FakeRouter) -> None:
    router.skip_tokens = 1
    with pytest.raises(errors.ServerError, match="goes on at token 1, 0 were received"):
        await ask()


# --- errors ---------------------------------------------------------------------------------------------------------


async def test_no_worker_is_told_at_once(ask: Ask, router: FakeRouter) -> None:
    router.happenings = [{0: UNAVAILABLE}]
    with pytest.raises(errors.Unavailable, match="no worker yet"):
        await ask()
    assert len(router.requests) == 1


async def test_a_router_that_was_never_there_is_told_at_once_with_its_address(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(errors.ConnectionRefused, match=f"no router at {target}"):
        await ask(target=target)


async def test_violations_name_their_fields(ask: Ask, router: FakeRouter) -> None:
    detail = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="is 2"),
            error_details_pb2.BadRequest.FieldViolation(field="prompt", description="is missing"),
        ]
    )
    router.happenings = [{0: Refusal(grpc.StatusCode.INVALID_ARGUMENT, "two faults", (detail,))}]
    with pytest.raises(errors.InvalidRequest, match="two faults") as caught:
        await ask()
    assert caught.value.violations == (
        errors.Violation("sampling.top_p", "is 2"),
        errors.Violation("prompt", "is missing"),
    )


async def test_an_overloaded_router_says_when_to_come_back(ask: Ask, router: FakeRouter) -> None:
    detail = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))
    router.happenings = [{0: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (detail,))}]
    with pytest.raises(errors.Overloaded) as caught:
        await ask()
    assert caught.value.retry_after_s == 1.5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.UNAUTHENTICATED, errors.AccessDenied),
        (grpc.StatusCode.PERMISSION_DENIED, errors.AccessDenied),
        (grpc.StatusCode.ALREADY_EXISTS, errors.AlreadyExists),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.INTERNAL, errors.ServerError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
    ],
)
async def test_each_status_is_its_own_error(
    ask: Ask, router: FakeRouter, code: grpc.StatusCode, kind: type[errors.BatonError]
) -> None:
    router.happenings = [{0: Refusal(code, "words")}]
    with pytest.raises(kind, match="words") as caught:
        await ask()
    assert type(caught.value) is kind
    assert caught.value.code == code.name


async def test_a_failure_in_the_middle_is_not_tried_again(ask: Ask, router: FakeRouter) -> None:
    router.happenings = [{2: Refusal(grpc.StatusCode.INTERNAL, "bug")}]
    with pytest.raises(errors.ServerError, match="bug"):
        await ask()
    assert len(router.requests) == 1


# --- cancellation ---------------------------------------------------------------------------------------------------


async def test_closing_a_generation_cancels_the_request(wire: Wire, router: FakeRouter) -> None:
    router.is_endless = True
    async with AsyncClient(wire.target) as client:
        generation = client.generate("hello")
        await anext(generation)
        await generation.close()
        await router.cancelled.wait()
        with pytest.raises(errors.Cancelled):
            await generation.result()


async def test_closing_a_sync_generation_cancels_the_request(wire: Wire, router: FakeRouter) -> None:
    router.is_endless = True

    def call() -> None:
        with Client(wire.target) as client, client.generate("hello") as generation:
            next(generation)

    await asyncio.to_thread(call)
    await router.cancelled.wait()


async def test_cancelling_the_task_cancels_the_request(wire: Wire, router: FakeRouter) -> None:
    router.is_endless = True
    async with AsyncClient(wire.target) as client:
        task = asyncio.create_task(client.generate("hello").result())
        await router.called.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await router.cancelled.wait()


# --- the cluster ----------------------------------------------------------------------------------------------------


async def test_the_async_client_speaks_to_the_cluster(wire: Wire, router: FakeRouter) -> None:
    async with AsyncClient(wire.target) as client:
        assert (await client.model()).name == "demo"
        assert (await client.status()).model == "demo"
        assert len([status async for status in client.watch_status(0.1)]) == 3
        assert await client.abort("known")
        assert not await client.abort("unknown")
        assert await client.drain("decode-0") == 2
        assert await client.scale("decode", 3) == 3
        with pytest.raises(errors.NotFound, match="no worker prefill-9"):
            await client.set_role("prefill-9", "decode")
        assert (await client.set_role("decode-0", "prefill", timeout_s=0.0)).moved == 3
    assert router.roles == [cluster.SetRoleRequest(worker_id="decode-0", role="prefill", timeout_s=0.0)]
    assert router.drained == ["decode-0"]


async def test_the_sync_client_speaks_to_the_cluster(wire: Wire) -> None:
    def call() -> None:
        with Client(wire.target) as client:
            assert client.model().name == "demo"
            assert client.status().model == "demo"
            assert len(list(client.watch_status(0.1))) == 3
            assert client.abort("known")
            assert client.drain("decode-0") == 2
            assert client.scale("decode", 3) == 3
            with pytest.raises(errors.NotFound):
                client.set_role("prefill-9", "decode")
            assert client.set_role("decode-0", "prefill").total_s == 1.5

    await asyncio.to_thread(call)


def test_a_request_that_cannot_be_written_is_an_error_of_the_caller() -> None:
    options: RequestOptions = {"max_tokens": 2**40}
    with Client("127.0.0.1:1") as client, pytest.raises(errors.InvalidRequest, match="max_tokens"):
        client.generate("hello", **options)
