"""A traced request is one tree of spans over router and workers, and its stages are those that the client is told."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from typing import Any
from urllib.request import Request, urlopen

import grpc
import pytest
from asking import Answer, answer, request, until
from collector import Tree
from paper_model import PaperRunner, paper_output
from small_cluster import SmallCluster

from baton.proto import inference_pb2 as inference
from baton.proto.settings import ObservabilitySettings, SchedulerSettings
from baton.router.config import RouterSettings
from baton.telemetry.tracing import open_sink

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = [(index * 7) % 256 for index in range(300)]
HANDOFF_STAGES = {"handoff_wait": {}, "handoff_transfer": {}, "decode_admission": {}}
TIMELINE_FIELDS = set(inference.Timeline.DESCRIPTOR.fields_by_name)
STAGES = {"router_wait": {}, "prefill_queue": {}, "prefill_compute": {}, "decode": {}}


def traced(collector, **settings) -> ObservabilitySettings:
    return ObservabilitySettings(trace_endpoint=collector.endpoint, worker_metrics=False, **settings)


def metadata(sampled: bool = True, **more) -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-{int(sampled):02d}"), *more.items())


async def ask(cluster: SmallCluster, message: inference.GenerateRequest, headers=()) -> dict[int, Answer]:
    """The answers to one request by their index."""
    answers: dict[int, Answer] = {}
    async for part in cluster.inference.Generate(message, timeout=60, metadata=headers):
        entry = answers.setdefault(part.index, Answer())
        entry.tokens += part.token_ids
        if part.HasField("finish"):
            entry.finish = part.finish
    return answers


def stages_of(tree, span) -> dict[str, float]:
    return {child.name: child.seconds for child in tree.children(span) if not child.name.startswith("baton.")}


def assert_stages_are_the_clients(tree, span, timeline: inference.Timeline, within_s: float = 1e-6) -> None:
    """Each stage is as long as the client was told, they follow one another without a gap, and are the total."""
    stages = stages_of(tree, span)
    for name, seconds in stages.items():
        assert seconds == pytest.approx(getattr(timeline, name), abs=within_s), name
    assert sum(stages.values()) == pytest.approx(timeline.total, abs=within_s)
    assert span.seconds >= timeline.total - within_s
    told = {field.name for field, value in timeline.ListFields() if value and field.name != "total"}
    assert told <= set(stages)
    moment = span.start_ns
    children = [child for child in tree.children(span) if not child.name.startswith("baton.")]
    for child in sorted(children, key=lambda child: (child.start_ns, child.end_ns)):
        assert child.start_ns == moment
        moment = child.end_ns
    assert moment <= span.end_ns


async def test_the_tree_of_a_handed_over_request_is_whole_and_hangs_under_the_clients_span(paper_dir, collector):
    async with SmallCluster(
        paper_dir,
        lambda: PaperRunner(seconds_per_token=0.0001, step_s=0.002),
        scheduler=SchedulerSettings(max_num_batched_tokens=64),
        observability=traced(collector),
    ) as cluster:
        headers = metadata(tracestate="vendor=value, other=1")
        (result,) = (await ask(cluster, request(PROMPT, 20, request_id="the-request"), headers)).values()
        assert result.tokens == paper_output(PROMPT, 20)
        tree = await collector.tree(11)
        root = tree.root
        assert {span.trace_id for span in tree.spans} == {TRACE_ID}
        assert root.parent_id == PARENT_ID
        assert root.wire.trace_state == "vendor=value,other=1"
        assert tree.shape() == {
            "baton.decode": {"baton.handoff": {}},
            "baton.prefill": {},
            **STAGES,
            **HANDOFF_STAGES,
        }
        assert_stages_are_the_clients(tree, root, result.finish.timeline)
        assert root.name == "text_completion paper"
        assert root.service == "baton-router"
        assert (
            root.attributes
            | {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "baton",
                "gen_ai.request.model": "paper",
                "gen_ai.request.max_tokens": 20,
                "gen_ai.request.temperature": 0.0,
                "gen_ai.response.finish_reasons": ["length"],
                "gen_ai.usage.input_tokens": 300,
                "gen_ai.usage.output_tokens": 20,
                "baton.request_id": "the-request",
                "baton.face": "grpc",
                "baton.prefill_worker": "prefill-0",
                "baton.decode_worker": "decode-0",
                "baton.transferred_tokens": 300,
                "baton.connector": "local",
            }
            == root.attributes
        )
        assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] < root.seconds
        assert root.error is None

        prefill, decode = tree.child(root, "baton.prefill"), tree.child(root, "baton.decode")
        assert (prefill.service, decode.service) == ("baton-prefill", "baton-decode")
        assert prefill.attributes["baton.worker"] == "prefill-0"
        assert prefill.attributes["baton.incarnation"] == cluster.seats["prefill-0"].description.incarnation
        assert prefill.attributes["baton.outcome"] == "handed over"
        assert prefill.attributes["baton.output_tokens"] == 1
        assert decode.attributes["baton.output_tokens"] == 19
        assert decode.attributes["baton.outcome"] == "length"
        handoff = tree.child(decode, "baton.handoff")
        assert handoff.attributes["baton.bytes"] == 300 // 16 * 16 * 16 + 16 * 16
        assert handoff.attributes["baton.pulls"] >= 2
        assert handoff.attributes["baton.source"] == "prefill-0"
        assert decode.start_ns <= handoff.start_ns < handoff.end_ns <= decode.end_ns
        assert handoff.start_ns < prefill.end_ns, "the first chunk is read while the prompt is computed"


async def test_the_tree_of_a_request_on_one_worker_has_no_handoff(paper_dir, collector):
    async with SmallCluster(
        paper_dir, PaperRunner, prefill=0, decode=0, colocated=1, observability=traced(collector)
    ) as cluster:
        (result,) = (await ask(cluster, request(PROMPT, 5), metadata())).values()
        tree = await collector.tree(6)
        assert tree.shape() == {"baton.whole": {}, **STAGES}
        assert_stages_are_the_clients(tree, tree.root, result.finish.timeline)
        whole = tree.child(tree.root, "baton.whole")
        assert (whole.service, whole.attributes["baton.output_tokens"]) == ("baton-colocated", 5)


async def test_each_of_several_outputs_has_a_span_with_its_own_stages(paper_dir, collector):
    async with SmallCluster(
        paper_dir, PaperRunner, prefill=0, decode=0, colocated=1, observability=traced(collector)
    ) as cluster:
        results = await ask(cluster, request(PROMPT, 5, sampling_n=3, sampling_temperature=1.0), metadata())
        tree = await collector.tree(1 + 3 * (1 + 4 + 1))
        outputs = [span for span in tree.children(tree.root) if span.name == "baton.output"]
        assert sorted(span.attributes["baton.output.index"] for span in outputs) == [0, 1, 2]
        for span in outputs:
            assert_stages_are_the_clients(tree, span, results[span.attributes["baton.output.index"]].finish.timeline)
        assert tree.root.attributes["gen_ai.request.choice.count"] == 3
        assert tree.root.attributes["gen_ai.usage.output_tokens"] == 15


async def test_outputs_that_fork_from_one_hand_off_have_their_own_stages_too(paper_dir, collector):
    async with SmallCluster(paper_dir, PaperRunner, observability=traced(collector)) as cluster:
        results = await ask(cluster, request(PROMPT, 5, sampling_n=3, sampling_temperature=1.0), metadata())
        await cluster.at_rest()
    tree = Tree(collector.spans)
    outputs = [span for span in tree.children(tree.root) if span.name == "baton.output"]
    assert len(outputs) == 3
    for span in outputs:
        assert_stages_are_the_clients(tree, span, results[span.attributes["baton.output.index"]].finish.timeline)


async def test_a_request_over_http_has_the_same_tree(paper_dir, collector):
    async with SmallCluster(paper_dir, PaperRunner, observability=traced(collector)) as cluster:
        body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 10, "ignore_eos": True}
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": "over-http",
            "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01",
            "tracestate": "vendor=value",
        }
        url = f"http://{cluster.http_address}/v1/chat/completions"
        told = await asyncio.to_thread(post, url, body, headers)
        tree = await collector.tree(11)
        assert (tree.root.trace_id, tree.root.parent_id) == (TRACE_ID, PARENT_ID)
        assert tree.root.wire.trace_state == "vendor=value"
        assert tree.root.name == "chat paper"
        assert tree.root.attributes["baton.face"] == "http"
        assert tree.root.attributes["gen_ai.usage.output_tokens"] == told["usage"]["completion_tokens"] == 10
        assert tree.shape() == {"baton.decode": {"baton.handoff": {}}, "baton.prefill": {}, **STAGES, **HANDOFF_STAGES}
        timeline = inference.Timeline(
            **{name: value for name, value in told["metrics"].items() if name in TIMELINE_FIELDS}
        )
        # HTTP tells microseconds.
        assert_stages_are_the_clients(tree, tree.root, timeline, within_s=1e-5)
        assert not any(b"secret" in body for body in collector.bodies)


def post(url: str, body: dict[str, object], headers: dict[str, str]) -> dict[str, Any]:
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=30) as response:
        return json.load(response)


async def test_a_conversation_is_named_chat(paper_dir, collector):
    async with SmallCluster(paper_dir, PaperRunner, observability=traced(collector)) as cluster:
        chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="a secret")])
        await answer(cluster.inference, inference.GenerateRequest(chat=chat, sampling={"max_tokens": 3}))
        tree = await collector.tree(11)
        assert tree.root.name == "chat paper"
        assert tree.root.parent_id == ""
        assert not any(b"secret" in body for body in collector.bodies)


async def test_a_worker_that_is_lost_shows_as_a_failed_leg_and_as_time_of_retry(paper_dir, collector):
    async with SmallCluster(
        paper_dir, lambda: PaperRunner(step_s=0.01), decode=2, observability=traced(collector)
    ) as cluster:
        asked = asyncio.create_task(ask(cluster, request(PROMPT, 100), metadata()))
        busy = await until(
            lambda: [seat for seat in cluster.members() if "decode" in seat.worker_id and seat.link.num_legs]
        )
        await until(lambda: busy[0].worker.core.scheduler.load().running)
        await cluster.remove(busy[0].worker_id)
        (result,) = (await asked).values()
        assert result.tokens == paper_output(PROMPT, 100)
        assert result.finish.retries == 1
        tree = await collector.tree(14, TRACE_ID)
        assert tree.root.attributes["baton.retries"] == 1
        assert_stages_are_the_clients(tree, tree.root, result.finish.timeline)
        assert stages_of(tree, tree.root)["retry"] > 0
        legs = {leg.attributes["baton.worker"]: leg for leg in tree.children(tree.root) if leg.name == "baton.decode"}
        assert set(legs) == {"decode-0", "decode-1"}
        assert legs[busy[0].worker_id].attributes["baton.outcome"] in ("aborted", "stopped")


async def test_a_request_that_fails_says_so_in_its_span(paper_dir, collector):
    async with SmallCluster(
        paper_dir,
        PaperRunner,
        router_settings=RouterSettings(port=0, no_worker_grace_s=0.1),
        observability=traced(collector),
    ) as cluster:
        await cluster.remove("prefill-0")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await ask(cluster, request(PROMPT, 10), metadata())
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        tree = await collector.tree(2)
        assert tree.shape() == {"router_wait": {}}
        assert tree.root.error == failure.value.details()
        assert tree.root.attributes["error.type"] == "unavailable"


async def test_a_request_that_its_client_leaves_is_no_error(paper_dir, collector):
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.005), observability=traced(collector)) as cluster:
        call = cluster.inference.Generate(request(PROMPT, 1000), metadata=metadata())
        async for part in call:
            if part.first_token_index > 3:
                call.cancel()
                break
        await cluster.at_rest()
        tree = await collector.tree(11)
        assert tree.root.error is None
        assert tree.root.attributes["gen_ai.response.finish_reasons"] == ["aborted"]
        decode = tree.child(tree.root, "baton.decode")
        assert (decode.attributes["baton.outcome"], decode.error) == ("aborted", None)


@pytest.mark.parametrize(
    ("headers", "ratio"),
    [(metadata(sampled=False), 1.0), ((), 0.0), ((("traceparent", f"00-{TRACE_ID}-{PARENT_ID}"),), 0.0)],
    ids=["by the client", "by the ratio", "by the ratio, as the header is none"],
)
async def test_a_request_that_is_not_sampled_exports_nothing(paper_dir, collector, headers, ratio):
    async with SmallCluster(paper_dir, PaperRunner, observability=traced(collector, trace_ratio=ratio)) as cluster:
        await ask(cluster, request(PROMPT, 5), headers)
        await cluster.at_rest()
    # Closing has sent all that there was.
    assert collector.bodies == []


async def test_a_header_that_is_none_starts_a_trace_of_its_own(paper_dir, collector):
    async with SmallCluster(paper_dir, PaperRunner, observability=traced(collector)) as cluster:
        await ask(cluster, request(PROMPT, 5), (("traceparent", f"00-{TRACE_ID}-{'0' * 16}-01"),))
        tree = await collector.tree(11)
        assert tree.root.parent_id == ""
        assert tree.root.trace_id != TRACE_ID


async def test_a_cluster_that_closes_sends_its_last_spans(paper_dir, collector):
    async with SmallCluster(paper_dir, PaperRunner, observability=traced(collector)) as cluster:
        await ask(cluster, request(PROMPT, 5), metadata())
        await cluster.at_rest()
    assert len(collector.spans) == 11


async def test_without_a_collector_requests_go_on_and_closing_takes_no_longer_than_its_deadline(paper_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with SmallCluster(
            paper_dir, PaperRunner, observability=ObservabilitySettings(trace_endpoint=endpoint)
        ) as cluster:
            results = await asyncio.gather(*(ask(cluster, request(PROMPT, 20)) for _ in range(20)))
            assert all(result[0].tokens == paper_output(PROMPT, 20) for result in results)
            await cluster.at_rest()


def test_an_endpoint_that_is_no_url_is_refused():
    with pytest.raises(ValueError, match=r"observability\.trace_endpoint is 'collector:4318'"):
        open_sink(ObservabilitySettings(trace_endpoint="collector:4318"), "baton-router", "1")


def test_a_process_that_does_not_trace_loads_no_opentelemetry():
    code = (
        "import sys, baton.router.server, baton.decode_worker.duty, baton.prefill_worker.duty\n"
        "from baton.proto.settings import ObservabilitySettings\n"
        "from baton.telemetry.tracing import open_sink\n"
        "assert open_sink(ObservabilitySettings(), 'baton-router', '1') is None\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "[]"
