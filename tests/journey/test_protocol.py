"""What any gRPC client may rely on: health, reflection, deadlines, status codes and their details."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from asking import answer, request, until
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from paper_model import VOCAB_SIZE, PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.proto import cluster_pb2 as cluster
from baton.proto import inference_pb2 as inference
from baton.router.config import RouterSettings
from baton.scheduler.sequence import State

PROMPT = [index % 251 for index in range(200)]
GENERATE = "/baton.v1.Inference/Generate"
SERVICES = ("", "baton.v1.Inference", "baton.v1.Cluster")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def slow() -> PaperRunner:
    """Slow enough that a request of some hundred tokens is always found in progress."""
    return PaperRunner(step_s=0.01)


@asynccontextmanager
async def at_rest_in_the_end(directory, make_runner=PaperRunner, **router):
    """A cluster that serves one more request, and then holds nothing, whatever was done to it."""
    settings = RouterSettings(port=0, **router)
    async with SmallCluster(directory, make_runner, router_settings=settings) as small:
        yield small
        if not small.router.draining and small.seats:
            assert (await answer(small.inference, request([1, 2, 3], 5))).tokens == paper_output([1, 2, 3], 5)
        await small.at_rest(timeout_s=2.0)
        assert small.router.num_running == 0
        assert small.router.dispatcher.num_requests == 0


@dataclass
class Refused:
    """How a call ended: its status, and the details that came with it, by their type's name."""

    code: grpc.StatusCode
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.details["BadRequest"].field_violations]


async def to_the_end(stream) -> None:
    async for _ in stream:
        pass


async def refused(call) -> Refused:
    """The error of a call, unary or streaming."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (to_the_end(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    result = Refused(caught.value.code(), caught.value.details() or "")
    status = rpc_status.from_call(caught.value)  # raises if code or message differ from the call's own
    if status is not None:
        for packed in status.details:
            name = packed.TypeName().rpartition(".")[2]
            message = getattr(error_details_pb2, name)()
            assert packed.Unpack(message)
            result.details[name] = message
    return result


async def health(small: SmallCluster) -> list[int]:
    """What health says of each service that it knows."""
    stub = health_pb2_grpc.HealthStub(small.channel)
    answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in SERVICES]
    return [response.status for response in answers]


class TestHealth:
    async def test_it_says_serving_only_after_a_request_has_gone_through(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            assert await health(small) == [NOT_SERVING] * 3
            await small.router.prove_ready()
            await small.server.mark_ready()
            assert await health(small) == [SERVING] * 3

    async def test_it_says_not_serving_while_running_requests_are_drained_and_does_not_go_back(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, slow) as small:
            await small.server.mark_ready()
            running = asyncio.create_task(answer(small.inference, request(PROMPT, 60)))
            await until(lambda: small.router.num_running)
            draining = asyncio.create_task(small.server.drain(30.0))
            await until(lambda: small.router.draining)
            assert await health(small) == [NOT_SERVING] * 3
            assert not draining.done()
            await small.server.mark_ready()
            assert await health(small) == [NOT_SERVING] * 3
            assert (await running).tokens == paper_output(PROMPT, 60)
            assert await draining

    async def test_a_watcher_hears_of_every_change(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            watch = health_pb2_grpc.HealthStub(small.channel).Watch(health_pb2.HealthCheckRequest())
            heard = [(await watch.read()).status]
            await small.server.mark_ready()
            heard.append((await watch.read()).status)
            await small.server.drain(1.0)
            heard.append((await watch.read()).status)
            assert heard == [NOT_SERVING, SERVING, NOT_SERVING]
            watch.cancel()

    async def test_a_service_that_is_not_there_is_not_found(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            stub = health_pb2_grpc.HealthStub(small.channel)
            result = await refused(stub.Check(health_pb2.HealthCheckRequest(service="baton.v1.Nothing")))
            assert result.code is grpc.StatusCode.NOT_FOUND


async def test_a_client_that_knows_only_reflection_generates(paper_dir):
    def generate(address: str) -> list[int]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert {"baton.v1.Inference", "baton.v1.Cluster", "grpc.health.v1.Health"} <= set(database.get_services())
            service = descriptor_pool.DescriptorPool(database).FindServiceByName("baton.v1.Inference")
            method = service.methods_by_name["Generate"]
            assert method.server_streaming
            ask = message_factory.GetMessageClass(method.input_type)
            assert ask is not inference.GenerateRequest
            call = channel.unary_stream(
                GENERATE, ask.SerializeToString, message_factory.GetMessageClass(method.output_type).FromString
            )
            message = ask(sampling={"max_tokens": 7, "temperature": 0.0, "ignore_eos": True})
            message.token_ids.ids.extend(PROMPT)
            return [token_id for part in call(message, timeout=20) for token_id in part.token_ids]

    async with at_rest_in_the_end(paper_dir) as small:
        assert await asyncio.to_thread(generate, small.address) == paper_output(PROMPT, 7)


class TestDeadline:
    async def test_the_clients_deadline_ends_both_legs(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, slow) as small:
            call = small.inference.Generate(request(PROMPT, 2000), timeout=0.5)
            result = await refused(call)
            assert result.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await small.at_rest(timeout_s=1.0)

    async def test_the_routers_own_bound_ends_both_legs_of_a_client_that_sets_none(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, slow, request_timeout_s=0.4) as small:
            result = await refused(small.inference.Generate(request(PROMPT, 2000)))
            assert result.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "deadline" in result.message
            await small.at_rest(timeout_s=1.0)

    async def test_it_may_pass_while_the_request_is_queued(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, request_timeout_s=0.2) as small:
            await small.remove("decode-0")
            result = await refused(small.inference.Generate(request(PROMPT, 10)))
            assert result.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "in the queue" in result.message
            await small.add(small.seats["prefill-0"].role.DECODE, "decode-0")

    async def test_a_clients_deadline_that_passes_in_the_queue_empties_its_place(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            await small.remove("decode-0")
            result = await refused(small.inference.Generate(request(PROMPT, 10), timeout=0.2))
            assert result.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: small.router.dispatcher.num_requests == 0, timeout_s=1.0)
            await small.add(small.seats["prefill-0"].role.DECODE, "decode-0")

    async def test_one_that_has_passed_already_is_exceeded_and_starts_nothing(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            result = await refused(small.inference.Generate(request(PROMPT, 10), timeout=0.0))
            assert result.code is grpc.StatusCode.DEADLINE_EXCEEDED


def asking(**fields) -> inference.GenerateRequest:
    """A request that is right but for the given fields; `prompt` None leaves it without one."""
    prompt = fields.pop("prompt", PROMPT)
    message = request(prompt or [], fields.pop("max_tokens", 5), **fields)
    if prompt is None:
        message.ClearField("token_ids")
    return message


BAD_REQUESTS = {
    "no prompt": (asking(prompt=None), ["prompt"]),
    "no token id": (asking(prompt=[]), ["token_ids.ids"]),
    "empty text": (inference.GenerateRequest(text=""), ["text"]),
    "no chat message": (inference.GenerateRequest(chat=inference.Chat()), ["chat.messages"]),
    "unknown role": (
        inference.GenerateRequest(chat=inference.Chat(messages=[inference.ChatMessage(role="poet", content="a")])),
        ["chat.messages[0].role"],
    ),
    "token id above the vocabulary": (asking(prompt=[1, VOCAB_SIZE]), ["token_ids.ids[1]"]),
    "token id below 0": (asking(prompt=[-1]), ["token_ids.ids[0]"]),
    "temperature NaN": (asking(sampling_temperature=math.nan), ["sampling.temperature"]),
    "temperature infinite": (asking(sampling_temperature=math.inf), ["sampling.temperature"]),
    "temperature below 0": (asking(sampling_temperature=-0.1), ["sampling.temperature"]),
    "top_p 0": (asking(sampling_top_p=0.0), ["sampling.top_p"]),
    "top_p NaN": (asking(sampling_top_p=math.nan), ["sampling.top_p"]),
    "top_k -2": (asking(sampling_top_k=-2), ["sampling.top_k"]),
    "min_p 2": (asking(sampling_min_p=2.0), ["sampling.min_p"]),
    "repetition_penalty 0": (asking(sampling_repetition_penalty=0.0), ["sampling.repetition_penalty"]),
    "max_tokens 0": (asking(max_tokens=0), ["sampling.max_tokens"]),
    "prompt and max_tokens over the length": (asking(max_tokens=1000), ["sampling.max_tokens"]),
    "prompt over the pool": (asking(prompt=[1] * 512), ["prompt"]),
    "min_tokens over max_tokens": (asking(sampling_min_tokens=6), ["sampling.min_tokens"]),
    "n 0": (asking(sampling_n=0), ["sampling.n"]),
    "n 17": (asking(sampling_n=17), ["sampling.n"]),
    "logprobs 21": (asking(sampling_logprobs=21), ["sampling.logprobs"]),
    "empty stop string": (asking(sampling_stop=[""]), ["sampling.stop[0]"]),
    "unknown stop token": (asking(sampling_stop_token_ids=[VOCAB_SIZE]), ["sampling.stop_token_ids[0]"]),
    "logit_bias of an unknown token": (
        asking(sampling_logit_bias={VOCAB_SIZE: 1.0}),
        [f"sampling.logit_bias[{VOCAB_SIZE}]"],
    ),
    "logit_bias 101": (asking(sampling_logit_bias={7: 101.0}), ["sampling.logit_bias[7]"]),
    "logit_bias NaN": (asking(sampling_logit_bias={7: math.nan}), ["sampling.logit_bias[7]"]),
    "request_id with a space": (asking(request_id="a b"), ["request_id"]),
    "SLO of 0": (asking(slo=inference.Slo(ttft_ms=0.0)), ["slo.ttft_ms"]),
    "resumed after its end": (asking(resume_token_ids=[1] * 6), ["resume_token_ids"]),
    "four faults": (
        asking(prompt=[-1], sampling_top_p=2.0, sampling_n=0, sampling_temperature=-1.0),
        ["token_ids.ids[0]", "sampling.temperature", "sampling.top_p", "sampling.n"],
    ),
}


async def test_every_fault_of_a_bad_request_is_named(paper_dir):
    """One cluster for all: a bad request starts nothing."""
    async with at_rest_in_the_end(paper_dir, lambda: PaperRunner(num_blocks=32)) as small:
        for name, (message, fields) in BAD_REQUESTS.items():
            result = await refused(small.inference.Generate(message, timeout=10))
            assert result.code is grpc.StatusCode.INVALID_ARGUMENT, name
            assert result.fields == fields, name
            for violation in result.details["BadRequest"].field_violations:
                assert violation.description.startswith(violation.field), name
                assert violation.description in result.message, name
        assert small.router.num_requests == 0


class TestStatusCodes:
    async def test_an_unknown_adapter_is_not_found(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            result = await refused(small.inference.Generate(asking(adapter="lora-7")))
            assert result.code is grpc.StatusCode.NOT_FOUND
            assert "lora-7" in result.message

    async def test_a_full_queue_says_when_to_come_back(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, max_queued_requests=1) as small:
            await small.remove("decode-0")
            first = asyncio.create_task(answer(small.inference, request(PROMPT, 5)))
            await until(lambda: small.router.dispatcher.num_requests == 1)
            result = await refused(small.inference.Generate(request(PROMPT, 5)))
            assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert 0 < result.details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() <= 60
            await small.add(small.seats["prefill-0"].role.DECODE, "decode-0")
            assert (await first).tokens == paper_output(PROMPT, 5)

    async def test_an_id_in_progress_already_exists_and_its_owner_goes_on(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, slow) as small:
            first = asyncio.create_task(answer(small.inference, request(PROMPT, 40, request_id="mine")))
            await until(lambda: small.router.num_running)
            result = await refused(small.inference.Generate(request(PROMPT, 5, request_id="mine")))
            assert result.code is grpc.StatusCode.ALREADY_EXISTS
            assert "mine" in result.message
            assert (await first).tokens == paper_output(PROMPT, 40)
            again = await answer(small.inference, request(PROMPT, 5, request_id="mine"))
            assert again.tokens == paper_output(PROMPT, 5)

    async def test_a_draining_router_is_unavailable(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            assert await small.server.drain(1.0)
            result = await refused(small.inference.Generate(request(PROMPT, 5)))
            assert result.code is grpc.StatusCode.UNAVAILABLE
            assert "draining" in result.message

    async def test_without_a_worker_for_longer_than_the_grace_it_is_unavailable(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, no_worker_grace_s=0.2) as small:
            await small.remove("decode-0")
            began = asyncio.get_running_loop().time()
            result = await refused(small.inference.Generate(request(PROMPT, 5)))
            assert result.code is grpc.StatusCode.UNAVAILABLE
            assert "no prefill and decode workers" in result.message
            assert 0.1 < asyncio.get_running_loop().time() - began < 2.0
            await small.add(small.seats["prefill-0"].role.DECODE, "decode-0")

    async def test_aborting_an_unknown_id_finds_nothing(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            assert not (await small.inference.Abort(inference.AbortRequest(request_id="nobody"))).found
            assert not (await small.inference.Abort(inference.AbortRequest())).found


class TestBytes:
    @pytest.mark.parametrize(
        "garbage",
        [b"\xff" * 100, b"\x0a\x7f", b"\x0a\x02\xc3\x28"],
        ids=["no tag", "a string that is cut off", "a string that is no UTF-8"],
    )
    async def test_those_that_are_no_message_end_the_call_and_not_the_server(self, paper_dir, garbage):
        async with at_rest_in_the_end(paper_dir, slow) as small:
            other = asyncio.create_task(answer(small.inference, request(PROMPT, 20)))
            await until(lambda: small.router.num_running)
            for method in ("Inference/Generate", "Inference/Abort", "Cluster/Drain"):
                result = await refused(small.channel.unary_stream(f"/baton.v1.{method}")(garbage, timeout=5))
                assert result.code is grpc.StatusCode.INTERNAL
                assert "parsing" in result.message
            assert (await other).tokens == paper_output(PROMPT, 20)

    async def test_a_message_over_the_limit_is_refused_before_it_is_read(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, max_message_mib=1) as small:
            result = await refused(small.inference.Generate(inference.GenerateRequest(text="a" * (2 << 20))))
            assert result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in result.message
            assert small.router.num_requests == 0

    async def test_an_unknown_method_is_unimplemented(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            result = await refused(small.channel.unary_unary("/baton.v1.Inference/Nothing")(b""))
            assert result.code is grpc.StatusCode.UNIMPLEMENTED


class TestCluster:
    async def test_status_shows_every_worker_with_its_load(self, paper_dir):
        async with at_rest_in_the_end(paper_dir, slow) as small:
            running = asyncio.create_task(answer(small.inference, request(PROMPT, 60)))

            async def decoding() -> cluster.ClusterStatus | None:
                status = await small.status()
                decode = next(pool for pool in status.pools if pool.role == "decode")
                return status if decode.workers[0].load.running else None

            status = await until(decoding)
            assert status.router.running == 1
            assert status.router.requests_total == 1
            assert status.router.rss_bytes > 1 << 20
            assert status.router.uptime_s > 0
            assert {pool.name: pool.size for pool in status.pools} == {"prefill": 1, "decode": 1}
            for pool in status.pools:
                for worker in pool.workers:
                    assert worker.incarnation == small.seats[worker.worker_id].description.incarnation
                    assert worker.state == "ready"
                    assert worker.pid
                    assert worker.rss_bytes > 1 << 20
                    assert worker.load.total_blocks == 256
                    assert worker.load_age_s < 5
            await running

    async def test_a_watcher_gets_one_status_after_the_other(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            call = small.cluster.WatchStatus(cluster.WatchStatusRequest(interval_s=0.1))
            uptimes = [(await call.read()).router.uptime_s for _ in range(3)]
            assert uptimes == sorted(set(uptimes))
            call.cancel()

    @pytest.mark.parametrize("interval_s", [-1.0, math.nan, math.inf])
    async def test_an_interval_that_is_no_time_is_refused(self, paper_dir, interval_s):
        async with at_rest_in_the_end(paper_dir) as small:
            result = await refused(small.cluster.WatchStatus(cluster.WatchStatusRequest(interval_s=interval_s)))
            assert result.code is grpc.StatusCode.INVALID_ARGUMENT
            assert result.fields == ["interval_s"]

    async def test_draining_an_unknown_worker_finds_none(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            result = await refused(small.cluster.Drain(cluster.DrainRequest(worker_id="decode-9")))
            assert result.code is grpc.StatusCode.NOT_FOUND
            assert "decode-9" in result.message

    @pytest.mark.parametrize("timeout_s", [-1.0, math.nan, math.inf])
    async def test_a_drain_for_a_time_that_is_none_changes_nothing(self, paper_dir, timeout_s):
        async with at_rest_in_the_end(paper_dir) as small:
            message = cluster.DrainRequest(worker_id="decode-0", timeout_s=timeout_s)
            result = await refused(small.cluster.Drain(message))
            assert result.code is grpc.StatusCode.INVALID_ARGUMENT
            assert result.fields == ["timeout_s"]

    async def test_a_drained_worker_gets_nothing_new(self, paper_dir):
        settings = RouterSettings(port=0)
        async with SmallCluster(paper_dir, slow, decode=2, router_settings=settings) as small:
            running = [asyncio.create_task(answer(small.inference, request(PROMPT[i:], 30))) for i in range(6)]
            seat = small.seats["decode-0"]
            await until(lambda: any(s.state is State.RUNNING for s in seat.worker.core.scheduler._sequences.values()))
            response = await small.cluster.Drain(cluster.DrainRequest(worker_id="decode-0", timeout_s=20))
            assert response.moved == 0
            later = [await answer(small.inference, request(PROMPT[i:], 3)) for i in range(4)]
            assert {result.finish.decode_worker for result in later} == {"decode-1"}
            for index, result in enumerate(await asyncio.gather(*running)):
                assert result.tokens == paper_output(PROMPT[index:], 30)
            await small.at_rest()

    @pytest.mark.parametrize("size", [-1, 1025])
    async def test_a_pool_cannot_have_any_size(self, paper_dir, size):
        async with at_rest_in_the_end(paper_dir) as small:
            result = await refused(small.cluster.Scale(cluster.ScaleRequest(pool="decode", size=size)))
            assert result.code is grpc.StatusCode.INVALID_ARGUMENT
            assert result.fields == ["size"]

    async def test_a_size_for_which_there_is_no_room_is_told(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            result = await refused(small.cluster.Scale(cluster.ScaleRequest(pool="decode", size=9)))
            assert result.code is grpc.StatusCode.FAILED_PRECONDITION
            assert "no machine had room" in result.message

    async def test_scaling_an_unknown_pool_finds_none(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            result = await refused(small.cluster.Scale(cluster.ScaleRequest(pool="spare", size=1)))
            assert result.code is grpc.StatusCode.NOT_FOUND
            assert "spare" in result.message

    async def test_the_model_is_described(self, paper_dir):
        async with at_rest_in_the_end(paper_dir) as small:
            model = await small.inference.GetModel(inference.GetModelRequest())
            assert model.vocab_size == VOCAB_SIZE
            assert model.max_model_len == 4096
            assert model.block_size == 16
            assert {pool.name for pool in model.pools} == {"prefill", "decode"}
