"""A benchmark sends what was planned when it was planned, and reports by vLLM's definitions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from fake_router import FakeRouter, Wire
from hypothesis import given
from hypothesis import strategies as st

from baton.capacity import workload
from baton.client import bench, errors
from baton.client.servers import BadAddress, GrpcServer, OpenAIServer, ordinary_token_ids

MODEL = bench.ServedModel("m", 100, range(10, 20))


def sample(sent_s: float = 0.0, tokens: Sequence[float] = (1.0, 1.5, 2.5), error: str = "") -> bench.Sample:
    return bench.Sample(
        planned_s=sent_s,
        sent_s=sent_s,
        prompt_tokens=10,
        output_tokens=len(tokens),
        token_times_s=tuple(tokens),
        ended_s=tokens[-1] if tokens else sent_s,
        error=error,
    )


def job(time_s: float = 0.0, output_tokens: int = 1) -> bench.Job:
    return bench.Job(time_s, [1], output_tokens)


class Echo:
    """A server whose answers take as long as the test says; it counts how many are in progress."""

    def __init__(self, serve: Callable[[int], AsyncIterator[int]]) -> None:
        self._serve = serve
        self.active = 0
        self.most_active = 0

    async def model(self) -> bench.ServedModel:
        return MODEL

    async def stream(self, prompt: Sequence[int], output_tokens: int, seed: int) -> AsyncIterator[bench.Message]:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        total = 0
        try:
            async for count in self._serve(output_tokens):
                total += count
                yield bench.Message(total, has_tokens=count > 0)
        finally:
            self.active -= 1

    async def close(self) -> None:
        pass


async def one_by_one(output_tokens: int) -> AsyncIterator[int]:
    for _ in range(output_tokens):
        await asyncio.sleep(0.001)
        yield 1


async def never(output_tokens: int) -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()


def test_latencies_follow_their_definitions() -> None:
    measured = sample(sent_s=0.5)
    assert measured.ttft_s == 0.5
    assert measured.e2e_s == 2.0
    assert measured.tpot_s == pytest.approx(1.5 / 2)
    report = bench.summarize([job()], [measured], bench.Objectives())
    assert report.itl is not None
    assert report.itl.mean == pytest.approx(0.75)
    assert report.itl.max == 1.0


def test_a_single_token_has_no_time_per_token() -> None:
    report = bench.summarize([job()], [sample(tokens=[1.0])], bench.Objectives())
    assert report.tpot is None
    assert report.itl is None


def test_rates_are_over_the_time_from_first_send_to_last_end() -> None:
    samples = [sample(1.0, [2.0, 3.0]), sample(2.0, [4.0, 5.0])]
    report = bench.summarize([job(), job(1.0)], samples, bench.Objectives())
    assert report.duration_s == 4.0
    assert report.requests_per_s == 0.5
    assert report.output_tokens_per_s == 1.0
    assert report.prompt_tokens_per_s == 5.0
    assert report.offered_rate == 2.0


def test_goodput_counts_requests_that_met_every_objective_and_failures_met_none() -> None:
    samples = [
        sample(0.0, [0.1, 0.2, 1.0]),
        sample(0.0, [0.1, 0.5, 2.0]),
        sample(0.0, [0.9, 1.0, 1.1]),
        sample(0.0, [], error="UNAVAILABLE"),
    ]
    report = bench.summarize([job()] * 4, samples, bench.Objectives(ttft_ms=500, tpot_ms=600))
    assert report.attainment == 0.25
    assert report.goodput_per_s == pytest.approx(1 / 2.0)
    assert report.errors == {"UNAVAILABLE": 1}
    assert report.num_finished == 3


def test_without_objectives_there_is_no_goodput_and_nothing_to_attain() -> None:
    report = bench.summarize([job()], [sample()], bench.Objectives())
    assert (report.goodput_per_s, report.attainment) == (None, None)
    assert bench.summarize([job()], [], bench.Objectives(ttft_ms=1)).attainment is None
    assert bench.summarize([job()], [sample()], bench.Objectives(ttft_ms=1e6)).attainment == 1.0


def test_a_report_on_nothing_is_still_a_report() -> None:
    report = bench.summarize([], [], bench.Objectives(ttft_ms=1))
    assert report.requests_per_s == 0
    assert report.ttft is None
    json.dumps(report.to_json())


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_within_the_values(values: list[float]) -> None:
    found = bench.Distribution.of(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(values)


def test_requests_of_one_session_and_of_one_workload_begin_alike() -> None:
    plan = [
        workload.Arrival(0, 40, 5, session=1, shared_tokens=10),
        workload.Arrival(1, 60, 5, session=1, prefix_tokens=40, shared_tokens=10),
        workload.Arrival(2, 60, 5, session=2, shared_tokens=10),
    ]
    first, second, other = (job.prompt for job in bench.jobs(plan, MODEL, seed=1))
    assert second[: len(first)] == first
    assert other[:10] == first[:10]
    assert other[10:40] != first[10:]
    assert set(first) <= set(MODEL.token_ids)
    assert bench.jobs(plan, MODEL, seed=1) == bench.jobs(plan, MODEL, seed=1) != bench.jobs(plan, MODEL, seed=2)


@pytest.mark.parametrize(("prompt", "output"), [(500, 5), (5, 500), (500, 500), (96, 5), (1, 1)])
def test_requests_fit_the_model_and_those_that_were_cut_are_marked(prompt: int, output: int) -> None:
    (fitted,) = bench.jobs([workload.Arrival(0, prompt, output, session=0)], MODEL, seed=0)
    assert 1 <= len(fitted.prompt) <= prompt
    assert 1 <= fitted.output_tokens <= output
    assert len(fitted.prompt) + fitted.output_tokens <= MODEL.max_model_len
    assert fitted.is_clipped == ((len(fitted.prompt), fitted.output_tokens) != (prompt, output))


@pytest.mark.parametrize("vocab_size", [1, 2, 100, 49152, 151936])
def test_prompts_avoid_the_ends_of_the_vocabulary(vocab_size: int) -> None:
    ids = ordinary_token_ids(vocab_size)
    assert ids
    assert ids.start >= 0
    assert ids.stop <= vocab_size
    if vocab_size > 1000:
        assert ids.start > 256
        assert vocab_size - ids.stop > 1000


async def test_no_more_requests_are_in_progress_than_allowed() -> None:
    server = Echo(one_by_one)
    samples = await bench.run(server, [job(output_tokens=3)] * 20, concurrency=4)
    assert len(samples) == 20
    assert server.most_active == 4


async def test_requests_are_sent_at_their_times() -> None:
    samples = await bench.run(Echo(one_by_one), [job(0.0), job(0.05), job(0.1)])
    assert all(sample.sent_s >= sample.planned_s for sample in samples)


async def test_a_failure_is_counted_and_the_rest_goes_on() -> None:
    async def sometimes(output_tokens: int) -> AsyncIterator[int]:
        if output_tokens == 2:
            raise errors.Overloaded("full")
        yield output_tokens if output_tokens < 4 else 1

    seen: list[bench.Sample] = []
    work = [job(output_tokens=number) for number in (1, 2, 4)]
    samples = await bench.run(Echo(sometimes), work, progress=seen.append)
    assert seen == samples
    report = bench.summarize(work, samples, bench.Objectives())
    assert report.errors == {"RESOURCE_EXHAUSTED": 1}
    assert report.num_other_length == 1


async def test_an_answer_without_tokens_is_a_failure() -> None:
    async def silent(output_tokens: int) -> AsyncIterator[int]:
        for _ in range(0):
            yield 1

    (only,) = await bench.run(Echo(silent), [job()])
    assert only.error == "EMPTY"


async def test_stopping_keeps_what_has_been_measured_and_ends_the_rest() -> None:
    async def first_only(output_tokens: int) -> AsyncIterator[int]:
        source = one_by_one(output_tokens) if output_tokens == 1 else never(output_tokens)
        async for count in source:
            yield count

    done = asyncio.Event()
    server = Echo(first_only)
    work = [job(output_tokens=1), job(output_tokens=2)]
    task = asyncio.create_task(bench.run(server, work, progress=lambda sample: done.set()))
    await asyncio.wait_for(done.wait(), 5)
    task.cancel()
    assert len(await task) == 1
    assert server.active == 0


async def test_a_router_is_measured_over_grpc(wire: Wire, router: FakeRouter) -> None:
    server = GrpcServer(wire.target, None, timeout_s=10.0)
    model = await server.model()
    work = bench.jobs(workload.requests("fixed:20/6", 5), model, seed=0)
    samples = await bench.run(server, work)
    await server.close()
    assert [sample.output_tokens for sample in samples] == [6] * 5
    assert [len(sample.token_times_s) for sample in samples] == [6] * 5
    assert all(request.sampling.ignore_eos for request in router.requests)
    assert {len(request.token_ids.ids) for request in router.requests} == {20}


async def test_a_broken_stream_is_an_error_of_the_benchmark(wire: Wire, router: FakeRouter) -> None:
    router.happenings = [{2: wire.restart}]
    server = GrpcServer(wire.target, None, timeout_s=10.0)
    (only,) = await bench.run(server, [job(output_tokens=6)])
    await server.close()
    assert only.error == "UNAVAILABLE"


# --- OpenAI-style servers -------------------------------------------------------------------------------------------

MODELS = {"data": [{"id": "other", "max_model_len": 512}]}


class Http:
    """An HTTP server of one canned answer a path. `answers_each`: how many requests a connection gets, then it ends."""

    def __init__(self, completions: bytes, status: str = "200 OK", answers_each: int = 100) -> None:
        self._completions = completions
        self._status = status
        self._answers_each = answers_each
        self.questions: list[dict[str, object]] = []
        self.connections = 0
        self.models = MODELS
        self.url = ""

    async def __aenter__(self) -> Http:
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for _ in range(self._answers_each):
                await self._answer(reader, writer)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split()[0])
        body = await reader.readexactly(length)
        if head.startswith("GET /v1/models"):
            found = json.dumps(self.models).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(found), found))
        else:
            assert head.startswith("POST /v1/completions ")
            self.questions.append(json.loads(body))
            writer.write(f"HTTP/1.1 {self._status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for start in range(0, len(self._completions), 7):
                part = self._completions[start : start + 7]
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await writer.drain()


def events(*parts: object) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(part).encode() for part in parts)


CHUNK = {"choices": [{"text": "x"}]}


@pytest.mark.parametrize(
    ("completions", "num_messages", "num_tokens"),
    [
        (b": comment\n\n" + events(CHUNK, CHUNK, CHUNK) + b"data: [DONE]\n\n", 3, 3),
        (events(CHUNK | {"usage": {"completion_tokens": 2}}, CHUNK | {"usage": {"completion_tokens": 5}}), 2, 5),
        (events(CHUNK, CHUNK, {"choices": [], "usage": {"completion_tokens": 2}}), 2, 2),
        # The account at the end may say that a message had several tokens: it is no message of tokens itself.
        (events(CHUNK, CHUNK, {"choices": [], "usage": {"completion_tokens": 6}}), 2, 6),
        (events(CHUNK, CHUNK, {"choices": [], "usage": {"completion_tokens": 1}}), 2, 1),
        # Neither is an end without text, nor a beginning without tokens. A token without text is one.
        (events(CHUNK, {"choices": [{"text": "", "finish_reason": "length"}]}), 1, 1),
        (events(CHUNK, {"choices": [{"text": "", "finish_reason": None}]}), 2, 2),
        (events(CHUNK | {"usage": {"completion_tokens": 0}}, CHUNK | {"usage": {"completion_tokens": 1}}), 1, 1),
    ],
)
async def test_an_openai_style_server_is_measured(completions: bytes, num_messages: int, num_tokens: int) -> None:
    async with Http(completions) as http:
        server = OpenAIServer(http.url, None, timeout_s=10.0)
        model = await server.model()
        assert (model.name, model.max_model_len) == ("other", 512)
        (only,) = await bench.run(server, [bench.Job(0.0, [7, 8], 3)])
    assert not only.error
    assert len(only.token_times_s) == num_messages
    assert only.output_tokens == num_tokens
    assert http.questions[0]["prompt"] == [7, 8]
    assert http.questions[0]["max_tokens"] == 3
    assert http.questions[0]["model"] == "other"
    await server.close()


@pytest.mark.parametrize(
    ("completions", "status", "code"),
    [
        (b"slow down", "429 Too Many Requests", "HTTP_429"),
        (events(CHUNK, {"error": {"message": "boom"}}), "200 OK", "STREAM_ERROR"),
        (b"data: {broken\n\n", "200 OK", "UNAVAILABLE"),
    ],
)
async def test_failures_of_an_openai_style_server_have_codes(completions: bytes, status: str, code: str) -> None:
    async with Http(completions, status) as http:
        (only,) = await bench.run(OpenAIServer(http.url, None, timeout_s=10.0), [job()])
    assert only.error == code


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.ConnectionRefused, match="no server at http://127"):
        await OpenAIServer("http://127.0.0.1:1", None, timeout_s=10.0).model()


async def test_connections_are_kept_and_no_more_than_needed_are_made() -> None:
    async with Http(events(CHUNK) + b"data: [DONE]\n\n") as http:
        server = OpenAIServer(http.url, None, timeout_s=10.0)
        await server.model()
        samples = await bench.run(server, [job()] * 20, concurrency=2)
        await server.close()
    assert [sample.error for sample in samples] == [""] * 20
    assert http.connections <= 2
    assert len(http.questions) == 20


async def test_a_kept_connection_that_the_server_has_closed_costs_no_request() -> None:
    async with Http(events(CHUNK) + b"data: [DONE]\n\n", answers_each=2) as http:
        server = OpenAIServer(http.url, None, timeout_s=10.0)
        samples = await bench.run(server, [job()] * 9, concurrency=1)
        await server.close()
    assert [sample.error for sample in samples] == [""] * 9
    assert (http.connections, len(http.questions)) == (5, 9)


async def test_prompts_are_made_of_the_servers_own_vocabulary_where_it_tells() -> None:
    async with Http(b"") as http:
        http.models = {"data": [{"id": "small", "max_model_len": 512, "vocab_size": 300}]}
        model = await OpenAIServer(http.url, None, timeout_s=10.0).model()
        assert model.token_ids == ordinary_token_ids(300)
        for nothing in ({"data": []}, {}, [], {"data": [{"object": "model"}]}):
            http.models = nothing
            with pytest.raises(errors.NotFound):
                await OpenAIServer(http.url, None, timeout_s=10.0).model()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://[::1"])
def test_an_address_without_a_host_is_refused(url: str) -> None:
    with pytest.raises(BadAddress):
        OpenAIServer(url, None, timeout_s=1.0)
