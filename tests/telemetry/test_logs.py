"""Log lines can be read by machines, name the request that they are about, and never hold what a client wrote."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
from asking import answer, request
from paper_model import PaperRunner
from small_cluster import SmallCluster

from baton.proto import inference_pb2 as inference
from baton.proto.settings import ObservabilitySettings
from baton.telemetry import log_file
from baton.telemetry.log_file import FILES_KEPT, LogFile
from baton.telemetry.logs import configure, fields, identify

SECRET = "sesame-7Qx"


@pytest.fixture
def logged():
    """A function that configures the log as a process does; its stream. Everything is as before afterwards."""
    root, baton = logging.getLogger(), logging.getLogger("baton")
    before = root.handlers[:], root.level, baton.level

    def start(process="router", host="", **settings) -> io.StringIO:
        stream = io.StringIO()
        configure(ObservabilitySettings(**settings), process, stream, host)
        return stream

    yield start
    for handler in root.handlers:
        with contextlib.suppress(OSError):
            handler.close()
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


# --- whose lines they are, and in which file -------------------------------------------------------------------------


def test_each_line_names_process_host_and_the_incarnation_of_that_moment(logged):
    stream = logged("decode-1", "10.0.0.12", log_format="json")
    speak = logging.getLogger("baton.test").info
    speak("starting")
    identify("5f1c8e02a7b3d941")
    speak("serving")
    identify("0b0b0b0b0b0b0b0b")
    speak("in another role")
    assert [(line["process"], line["host"], line.get("incarnation"), line["message"]) for line in lines(stream)] == [
        ("decode-1", "10.0.0.12", None, "starting"),
        ("decode-1", "10.0.0.12", "5f1c8e02a7b3d941", "serving"),
        ("decode-1", "10.0.0.12", "0b0b0b0b0b0b0b0b", "in another role"),
    ]


def test_a_text_line_names_them_in_one_word(logged):
    stream = logged("decode-1", "10.0.0.12")
    logging.getLogger("baton.test").info("starting")
    identify("5f1c8e02a7b3d941")
    logging.getLogger("baton.test").info("100%% %s", "there")
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" INFO decode-1@10.0.0.12 baton.test: starting")
    assert second.endswith(" INFO decode-1@10.0.0.12#5f1c8e02 baton.test: 100% there")


def test_a_file_has_all_that_a_life_said_under_a_name_that_says_whose(logged, tmp_path):
    folder = tmp_path / "made" / "by the process"
    stream = logged("decode-1", "fd00::7", log_dir=str(folder))
    speak = logging.getLogger("baton.test").info
    speak("starting")
    (starting,) = folder.iterdir()
    assert starting.name.startswith("decode-1@fd00-7.pid-")
    identify("first")
    speak("serving")
    identify("second")
    speak("in another role")
    told = {file.name: [line.split(": ")[1] for line in file.read_text().splitlines()] for file in folder.iterdir()}
    assert told == {
        "decode-1@fd00-7.first.log": ["starting", "serving"],
        "decode-1@fd00-7.second.log": ["in another role"],
    }
    assert len(stream.getvalue().splitlines()) == 3


def test_a_further_rank_has_a_file_of_its_own(logged, tmp_path):
    logged("decode-1/1", "h", log_dir=str(tmp_path))
    assert [file.name.partition(".")[0] for file in tmp_path.iterdir()] == ["decode-1-1@h"]


def test_a_file_is_turned_over_and_few_are_kept(logged, tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "FILE_BYTES", 2000)
    logged("decode-1", "h", log_dir=str(tmp_path))
    identify("life")
    for number in range(200):
        logging.getLogger("baton.test").info("line %d", number)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["decode-1@h.life.log", *(f"decode-1@h.life.log.{number}" for number in (1, 2, 3))]
    assert max(file.stat().st_size for file in tmp_path.iterdir()) <= 2000
    assert (tmp_path / files[0]).read_text().splitlines()[-1].endswith("line 199")


def test_a_worker_that_never_comes_to_serve_leaves_a_bounded_number_of_files(logged, tmp_path):
    (tmp_path / "decode-10@h.other.log").write_text("of another worker")
    for number in range(2 * FILES_KEPT):
        file = tmp_path / f"decode-1@h.pid-{number}.log"
        file.write_text("died")
        os.utime(file, (number, number))
    logged("decode-1", "h", log_dir=str(tmp_path))
    left = [file.name for file in tmp_path.iterdir() if file.name.startswith("decode-1@h.")]
    assert len(left) <= FILES_KEPT
    assert f"decode-1@h.pid-{2 * FILES_KEPT - 1}.log" in left
    assert "decode-1@h.pid-0.log" not in left
    assert (tmp_path / "decode-10@h.other.log").exists()


def test_a_process_without_a_place_for_its_file_goes_on_and_says_so(logged, tmp_path):
    (tmp_path / "taken").write_text("a file")
    stream = logged("decode-1", "h", log_dir=str(tmp_path / "taken"))
    logging.getLogger("baton.test").info("serving")
    first, second = stream.getvalue().splitlines()
    assert "WARNING" in first
    assert "log_dir" in first
    assert str(tmp_path / "taken") in first
    assert second.endswith("serving")


def test_a_full_disk_is_told_once_and_stderr_goes_on(logged, tmp_path, capsys):
    stream = logged("decode-1", "h", log_dir=str(tmp_path))
    file = next(handler for handler in logging.getLogger().handlers if isinstance(handler, LogFile))
    file.stream = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - the handler closes it
    for number in range(3):
        logging.getLogger("baton.test").info("line %d", number)
    assert [line[-6:] for line in stream.getvalue().splitlines()] == ["line 0", "line 1", "line 2"]
    assert capsys.readouterr().err.count("cannot be written") == 1
