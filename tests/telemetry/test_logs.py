"""Log lines can be read by machines, name the request that they are about, and never hold what a client wrote."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
from asking import answer, request
from paper_model import PaperRunner
from small_cluster import SmallCluster

from baton.proto import inference_pb2 as inference
from baton.proto.settings import ObservabilitySettings
from baton.telemetry.logs import configure, fields

SECRET = "sesame-7Qx"


@pytest.fixture
def logged():
    """A function that configures the log as a process does; its stream. Everything is as before afterwards."""
    root, baton = logging.getLogger(), logging.getLogger("baton")
    before = root.handlers[:], root.level, baton.level

    def start(**settings) -> io.StringIO:
        stream = io.StringIO()
        configure(ObservabilitySettings(**settings), "router", stream)
        return stream

    yield start
    root.handlers[:], root.level, level = before
    baton.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_holds_the_message_the_fields_and_the_traceback(logged):
    stream = logged(log_format="json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("baton.test").exception("it %s", "failed", extra=fields(request_id="r-1", ttft_s=0.5))
    (line,) = lines(stream)
    assert {name: line[name] for name in ("level", "process", "logger", "message", "request_id", "ttft_s")} == {
        "level": "error",
        "process": "router",
        "logger": "baton.test",
        "message": "it failed",
        "request_id": "r-1",
        "ttft_s": 0.5,
    }
    assert str(line["exc"]).endswith("ValueError: two\nlines")
    assert str(line["ts"]).endswith("+00:00")


def test_a_text_line_shows_fields_as_pairs_and_stays_one_line(logged):
    stream = logged()
    logging.getLogger("baton.test").info(
        "hello", extra=fields(workers=["a", "b"], client='x" y\nz', ttft_s=0.123456789)
    )
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r'INFO router baton.test: hello workers=a,b client="x\" y\nz" ttft_s=0.123457')


@pytest.mark.parametrize(("level", "heard"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_is_the_configured_one_and_libraries_keep_their_details_to_themselves(logged, level, heard):
    stream = logged(log_level=level, log_format="json")
    for name in ("baton.test", "library"):
        for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(number, "message")
    assert len([line for line in lines(stream) if line["logger"] == "baton.test"]) == heard
    assert len([line for line in lines(stream) if line["logger"] == "library"]) == min(heard, 3)


async def test_each_request_has_one_line_with_its_account(paper_dir, logged):
    stream = logged(log_format="json")
    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        await answer(cluster.inference, request(range(100), 7, request_id="first"))
        await answer(cluster.inference, request(range(100), 7, request_id="second"))
        await cluster.at_rest()
    first, second = (line for line in lines(stream) if line["message"] == "request ended")
    assert (
        first
        | {
            "level": "info",
            "request_id": "first",
            "face": "grpc",
            "outcome": "length",
            "prompt_tokens": 100,
            "completion_tokens": 7,
            "cached_tokens": 0,
            "workers": ["prefill-0", "decode-0"],
            "retries": 0,
        }
        == first
    )
    assert 0 < first["ttft_s"] < first["duration_s"]
    assert (second["request_id"], second["cached_tokens"]) == ("second", 96)


async def test_what_a_client_wrote_is_in_no_line_of_any_level(paper_dir, logged):
    """Prompts of each kind, stop strings, and bad values, which the client itself is told, and nobody else."""
    stream = logged(log_format="json", log_level="debug")
    logging.getLogger().setLevel(logging.DEBUG)
    text = inference.GenerateRequest(text=f"the word is {SECRET}", sampling={"max_tokens": 5, "stop": [SECRET]})
    chat = inference.GenerateRequest(
        chat=inference.Chat(messages=[inference.ChatMessage(role="user", content=SECRET)]), sampling={"max_tokens": 5}
    )
    refused = [
        inference.GenerateRequest(text=SECRET, sampling={"stop": [SECRET * 1000]}),
        inference.GenerateRequest(text=SECRET, request_id=f"no name: {SECRET}"),
        inference.GenerateRequest(chat=inference.Chat(messages=[inference.ChatMessage(role=SECRET, content="x")])),
        inference.GenerateRequest(text=SECRET * 1000, sampling={"max_tokens": 5}),
    ]
    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        await answer(cluster.inference, text)
        await answer(cluster.inference, chat)
        num_refused = 0
        for message in refused:
            try:
                await answer(cluster.inference, message)
            except grpc.aio.AioRpcError as error:
                num_refused += error.code() is grpc.StatusCode.INVALID_ARGUMENT
        header = (("tracestate", f"{SECRET}=no member"), ("authorization", f"Bearer {SECRET}"))
        async for _ in cluster.inference.Generate(text, metadata=header):
            pass
        await cluster.at_rest()
    assert num_refused >= 3
    log = stream.getvalue()
    assert log.count('"request ended"') >= 3
    assert log.count('"request refused"') == num_refused
    assert SECRET not in log
    assert " ".join(str(byte) for byte in SECRET.encode()) not in log.replace(",", "")


async def test_what_came_over_http_is_in_no_line_either(paper_dir, logged):
    stream = logged(log_format="json", log_level="debug")
    bodies = [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 3, "stop": [SECRET]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 10**9}),
        ("/v1/completions", {"prompt": SECRET, "temperature": SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET}]}),
        ("/tokenize", {"prompt": SECRET}),
    ]
    async with SmallCluster(paper_dir, PaperRunner) as cluster:
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        codes = []
        for path, body in [*((path, json.dumps(body)) for path, body in bodies), ("/v1/completions", "{" + SECRET)]:
            url = f"http://{cluster.http_address}{path}"
            codes.append(await asyncio.to_thread(post, url, body, headers))
        await cluster.at_rest()
    assert codes == [200, 200, 400, 400, 400, 200, 400]
    log = stream.getvalue()
    assert log.count('"request ended"') == 2
    assert SECRET not in log


def post(url: str, body: str, headers: dict[str, str]) -> int:
    """The status of an answer, which is read to its end."""
    try:
        with urlopen(Request(url, body.encode(), headers), timeout=30) as response:
            response.read()
            return response.status
    except HTTPError as error:
        error.read()
        return error.code


async def test_prompts_and_outputs_are_logged_where_the_configuration_says_so(paper_dir, logged):
    settings = ObservabilitySettings(log_prompts=True, log_format="json")
    stream = logged(log_format="json")
    async with SmallCluster(paper_dir, PaperRunner, observability=settings) as cluster:
        text = inference.GenerateRequest(text="hello", sampling={"max_tokens": 5, "ignore_eos": True})
        result = await answer(cluster.inference, text)
        await cluster.at_rest()
    (line,) = (line for line in lines(stream) if line["message"] == "request ended")
    assert line["prompt"] == "hello"
    assert line["outputs"] == [cluster.router.tokenizer.decode(result.tokens, skip_special_tokens=False)]
