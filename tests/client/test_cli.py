"""The `baton` command as a person uses it: what it prints, where, and its exit code."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fake_router
import grpc
import pytest
from fake_router import FakeRouter, Refusal, Wire, whole_text
from google.rpc import error_details_pb2

import baton
from baton.client import chat, errors
from baton.client.cli import build_parser, main
from baton.client.client import Client
from baton.client.console import bar, counted, duration, printable


@dataclass(frozen=True)
class Printed:
    code: int
    out: str
    err: str


Baton = Callable[..., Awaitable[Printed]]


@pytest.fixture
def run(wire: Wire, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Baton:
    """Runs the command in this process against the fake router."""

    async def call(*words: str, stdin: str = "") -> Printed:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = await asyncio.to_thread(main, [*words, "--target", wire.target])
        captured = capsys.readouterr()
        return Printed(code, captured.out, captured.err)

    return call


def unused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


# --- generate -------------------------------------------------------------------------------------------------------


async def test_generate_prints_the_text_and_then_where_the_time_went(run: Baton) -> None:
    printed = await run("generate", "hello", "--max-tokens", "4", "--seed", "3")
    assert printed.code == 0
    text, _, table = printed.out.partition("\n\n")
    assert text == whole_text(3, 4)
    for stage in ("router wait", "prefill queue", "prefill compute", "hand-off wait", "hand-off transfer", "decode"):
        assert stage in table
    assert "32.1%" in table
    assert "156.0" in table
    assert "prompt 12 tokens (4 cached, 11 transferred)" in table
    assert "prefill-0 -> decode-0 over nixl" in table
    assert printed.err == ""


async def test_generate_sends_what_was_asked(run: Baton, router: FakeRouter) -> None:
    await run("generate", "hi", "--temperature", "0", "--top-p", "0.5", "--top-k", "3", "--stop", "a", "--stop", "b")
    await run("generate", "--chat", "hi")
    await run("generate", "-", "--raw", stdin="from a pipe")
    first, second, third = router.requests
    assert first.text == "hi"
    assert first.sampling.HasField("temperature")
    assert first.sampling.top_p == 0.5
    assert first.sampling.top_k == 3
    assert list(first.sampling.stop) == ["a", "b"]
    assert [(message.role, message.content) for message in second.chat.messages] == [("user", "hi")]
    assert third.text == "from a pipe"


async def test_generate_can_print_one_json_object(run: Baton) -> None:
    printed = await run("generate", "hello", "--max-tokens", "4", "--seed", "3", "--json")
    result = json.loads(printed.out)
    assert result["text"] == whole_text(3, 4)
    assert result["finish_reason"] == "length"
    assert result["usage"]["transferred_tokens"] == 11
    assert result["timeline"]["total"] == pytest.approx(0.156)
    assert result["prefill_worker"] == "prefill-0"


async def test_generate_can_stream_json_one_line_a_message(run: Baton) -> None:
    printed = await run("generate", "hello", "--max-tokens", "4", "--seed", "3", "--json", "--stream")
    *deltas, result = map(json.loads, printed.out.splitlines())
    assert "".join(delta["text"] for delta in deltas) == result["text"] == whole_text(3, 4)


async def test_a_broken_stream_is_mentioned(run: Baton, router: FakeRouter, wire: Wire) -> None:
    router.happenings = [{2: wire.restart}]
    printed = await run("generate", "hello", "--max-tokens", "4", "--seed", "3")
    assert printed.out.startswith(whole_text(3, 4))
    assert "resumed 1 time" in printed.out


@pytest.mark.parametrize("words", [["generate", "hi"], ["status"], ["status", "--watch"], ["chat"], ["bench"]])
def test_without_a_router_one_line_says_so(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    address = unused_address()
    code = main([*words, "--target", address])
    captured = capsys.readouterr()
    assert captured.err == f"baton: no router at {address} (Connection refused)\n"
    assert captured.out.strip() == ""
    assert code == 1


async def test_each_broken_rule_is_one_line(run: Baton, router: FakeRouter) -> None:
    violations = [
        error_details_pb2.BadRequest.FieldViolation(field=field, description=f"{field} is wrong")
        for field in ("sampling.top_p", "prompt")
    ]
    detail = error_details_pb2.BadRequest(field_violations=violations)
    router.happenings = [{0: Refusal(grpc.StatusCode.INVALID_ARGUMENT, "two faults", (detail,))}]
    printed = await run("generate", "hi")
    assert printed.code == 1
    assert printed.err == ("baton: invalid request: sampling.top_p is wrong\nbaton: invalid request: prompt is wrong\n")


# --- chat -----------------------------------------------------------------------------------------------------------


async def test_a_conversation_carries_its_turns_until_it_is_cleared(run: Baton, router: FakeRouter) -> None:
    words = ("chat", "--seed", "3", "--max-tokens", "2", "--system", "be brief")
    printed = await run(*words, stdin="one\ntwo\n\n/clear\nthree\n/exit\nnever sent\n")
    answer = whole_text(3, 2)
    turns = [[(m.role, m.content) for m in request.chat.messages] for request in router.requests]
    system = ("system", "be brief")
    assert turns == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", answer), ("user", "two")],
        [system, ("user", "three")],
    ]
    assert printed.out.count(answer) == 3
    assert printed.code == 0


async def test_a_conversation_ends_with_its_input(run: Baton, router: FakeRouter) -> None:
    assert (await run("chat", stdin="one\n")).code == 0
    assert len(router.requests) == 1


async def test_a_turn_that_fails_is_forgotten_and_the_next_goes_on(run: Baton, router: FakeRouter) -> None:
    router.happenings = [{0: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "queues are full")}]
    printed = await run("chat", stdin="one\ntwo\n")
    assert "queues are full" in printed.err
    assert [message.content for message in router.requests[1].chat.messages] == ["two"]


async def test_ctrl_c_ends_the_answer_and_not_the_conversation(wire: Wire, router: FakeRouter) -> None:
    router.is_endless = True
    lines = iter(["one", "/exit"])
    notes: list[str] = []
    interrupted = False

    def show(text: str) -> None:
        nonlocal interrupted
        if text.startswith("<") and not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    face = chat.Face(
        ask=lambda: next(lines),
        show=show,
        note=notes.append,
        show_result=lambda result: pytest.fail("the answer was cut off"),
        complain=lambda error: pytest.fail(str(error)),
    )

    def talk() -> None:
        with Client(wire.target) as client:
            chat.converse(client, face, {})

    await asyncio.to_thread(talk)
    assert notes == ["stopped"]
    await router.cancelled.wait()


def test_ctrl_c_at_the_prompt_explains_how_to_leave() -> None:
    notes: list[str] = []

    def ask() -> str:
        if notes:
            raise EOFError
        raise KeyboardInterrupt

    def fail(error: errors.BatonError) -> None:
        raise error

    face = chat.Face(ask=ask, show=lambda text: None, note=notes.append, show_result=print, complain=fail)
    with Client("127.0.0.1:1") as client:
        chat.converse(client, face, {})
    assert notes == [chat.HELP]


# --- status ---------------------------------------------------------------------------------------------------------


async def test_status_shows_pools_and_workers_within_80_columns(run: Baton) -> None:
    printed = await run("status")
    assert "demo, router fedcba98, up 1 h 01 min" in printed.out
    assert "7 requests running, 5 queued, 1,000 in all, 0 retries" in printed.out
    assert "decode 1/2" in printed.out
    (line,) = [line for line in printed.out.splitlines() if "decode-0" in line]
    for value in ("ready", "1,234", "75%", "12.3", "01234567"):
        assert value in line
    assert max(map(len, printed.out.splitlines())) <= 80


async def test_a_worker_that_left_its_pools_role_is_shown_with_its_own(
    run: Baton, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = fake_router.a_status()
    status.pools[1].workers[0].role, status.pools[1].workers[1].role = "colocated", "decode"
    monkeypatch.setattr(fake_router, "a_status", lambda: status)
    printed = await run("status")
    assert "decode-0 (colocated)" in printed.out
    assert "decode-1 (" not in printed.out


async def test_role_asks_for_the_change_and_tells_how_long_it_took(run: Baton, router: FakeRouter) -> None:
    printed = await run("role", "decode-0", "prefill")
    assert (printed.code, printed.err) == (0, "")
    assert printed.out == "decode-0 is a prefill worker after 1.50 s, 1.25 s of them draining, 3 legs moved\n"
    assert not router.roles[0].HasField("timeout_s")
    printed = await run("role", "decode-0", "colocated", "--timeout", "0", "--force", "--json")
    assert json.loads(printed.out) == {
        "worker": "decode-0",
        "role": "colocated",
        "drain_s": 1.25,
        "total_s": 1.5,
        "moved": 3,
    }
    assert (router.roles[1].HasField("timeout_s"), router.roles[1].timeout_s, router.roles[1].force) == (True, 0, True)


async def test_a_change_of_role_that_is_refused_is_one_line(run: Baton) -> None:
    printed = await run("role", "prefill-9", "decode")
    assert (printed.code, printed.out, printed.err) == (1, "", "baton: no worker prefill-9\n")


async def test_status_goes_on_when_it_is_watched(run: Baton) -> None:
    assert (await run("status", "--watch", "--interval", "0.1")).out.count("decode-0") == 3


async def test_status_as_json_has_every_field_and_numbers_that_are_numbers(run: Baton) -> None:
    status = json.loads((await run("status", "--json")).out)
    assert status["router"]["requests_total"] == 1000
    assert status["router"]["retries_total"] == 0
    assert status["pools"][1]["workers"][0]["load"]["queued_tokens"] == 1234
    assert status["pools"][1]["workers"][1]["load"] is None


# --- bench ----------------------------------------------------------------------------------------------------------


async def test_bench_prints_a_report_and_writes_it(run: Baton, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    printed = await run(
        *("bench", "--workload", "fixed:10/4", "--num-requests", "6", "--concurrency", "2"),
        *("--slo-ttft-ms", "60000", "--json", str(file)),
    )
    assert printed.code == 0
    for words in ("6 of 6", "TTFT", "TPOT", "ITL", "E2E", "P99", "100.0% of requests with TTFT <= 60000 ms"):
        assert words in printed.out
    written = json.loads(file.read_text())
    assert written["settings"]["workload"] == "fixed:10/4"
    assert written["report"]["num_finished"] == 6
    assert [len(request["token_times_s"]) for request in written["requests"]] == [4] * 6


async def test_bench_counts_errors_by_code_and_fails_if_nothing_worked(run: Baton, router: FakeRouter) -> None:
    router.happenings = [{0: Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")}] * 2
    some = await run("bench", "--workload", "fixed:10/4", "--num-requests", "3", "--concurrency", "1")
    assert "RESOURCE_EXHAUSTED" in some.out
    assert "1 of 3" in some.out
    assert some.code == 0
    router.happenings = [{0: Refusal(grpc.StatusCode.INTERNAL, "bug")}] * 9
    none = await run("bench", "--workload", "fixed:10/4", "--num-requests", "2")
    assert none.code == 1
    assert "baton: bug" in none.err


async def test_a_workload_or_an_address_that_makes_no_sense_is_a_wrong_command_line(run: Baton) -> None:
    unknown = await run("bench", "--workload", "chats")
    assert unknown.code == 2
    assert "long-chat" in unknown.err
    assert (await run("bench", "--url", "localhost:8000")).code == 2


async def test_a_report_that_cannot_be_written_is_told_before_the_measurement(
    run: Baton, router: FakeRouter, tmp_path: Path
) -> None:
    printed = await run("bench", "--json", str(tmp_path / "no" / "such" / "place.json"))
    assert printed.code == 1
    assert "No such file" in printed.err
    assert router.requests == []


# --- serve and the rest ---------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Stands in for the router's process; holds the configurations that it was started with."""
    configs: list[SimpleNamespace] = []
    module = ModuleType("baton.router.__main__")
    module.serve = lambda config: configs.append(config) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "baton.router.__main__", module)
    return configs


def test_serve_takes_its_settings_from_the_file_and_then_from_the_command_line(
    served: list[SimpleNamespace], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "metadata: {baton: {model: demo, pools: {prefill: {role: prefill, size: 3}, decode: {role: decode}}}}"
    )
    options = ["--decode", "2", "--port", "0", "--http-port", "0", "--model", "other", "--routers", "3"]
    assert main(["serve", str(file), *options]) == 0
    (config,) = served
    assert config.router.replicas == 3
    assert config.model == "other"
    assert {pool.name: pool.size for pool in config.pools} == {"prefill": 3, "decode": 2}
    assert config.router.port == 0


def test_serve_without_a_file_is_one_worker_of_each_kind(served: list[SimpleNamespace]) -> None:
    assert main(["serve"]) == 0
    assert {pool.name: pool.size for pool in served[0].pools} == {"prefill": 1, "decode": 1}


def test_a_configuration_that_is_wrong_or_missing_is_told_in_one_line(
    served: list[SimpleNamespace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("metadata: {baton: {modle: demo}}")
    assert main(["serve", str(file)]) == 2
    assert main(["serve", str(tmp_path / "absent.yaml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "modle" in lines[0]
    assert "absent.yaml" in lines[1]
    assert served == []


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"baton {baton.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["dance"],
        ["generate"],
        ["generate", "x", "--chat", "--raw"],
        ["bench", "--rate", "0"],
        ["serve", "--port", "70000"],
    ],
)
def test_a_wrong_command_line_is_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage: baton" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["bench", "--num-requests", "0"], "argument --num-requests: is '0', must be a whole number from 1 to"),
        (["bench", "--num-requests", "ten"], "argument --num-requests: is 'ten', must be a whole number from 1 to"),
        (["bench", "--concurrency", "0"], "argument --concurrency: is '0', must be a whole number from 1 to"),
        (["bench", "--rate", "nan"], "argument --rate: is 'nan', must be a number above 0"),
        (["bench", "--scale-lengths", "inf"], "argument --scale-lengths: is 'inf', must be a finite number above 0"),
        (["serve", "--port", "70000"], "argument --port: is '70000', must be a whole number from 0 to 65535"),
        (["serve", "--prefill", "-1"], "argument --prefill: is '-1', must be a whole number from 0 to"),
    ],
)
def test_a_wrong_number_is_told_with_its_option_and_its_bounds(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_command_starts_without_ray_and_torch() -> None:
    code = "import sys, baton.client.cli; print({'ray', 'torch', 'transformers'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_rates_may_be_infinite() -> None:
    assert build_parser().parse_args(["bench", "--rate", "inf"]).rate == float("inf")


def test_a_models_output_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\r\tc\n\x9bd") == "a[31mb\tc\nd"


def test_bars_fill_from_nothing_to_all() -> None:
    assert [bar(share, 2) for share in (-1, 0, 0.25, 0.5, 1, 2)] == ["  ", "  ", "▌ ", "█ ", "██", "██"]


def test_numbers_read_as_words() -> None:
    assert [counted(0, "token"), counted(1, "token"), counted(1234, "retry", "retries")] == [
        "0 tokens",
        "1 token",
        "1,234 retries",
    ]
    assert [duration(seconds) for seconds in (5.9, 65, 3700)] == ["5 s", "1 min 05 s", "1 h 01 min"]


@pytest.mark.parametrize(
    ("words", "name"),
    [(("generate", "hi", "--seed", "9" * 30), "seed"), (("generate", "\udcff\udcfe"), "prompt")],
)
async def test_what_no_message_can_carry_is_one_line_that_names_it(
    run: Baton, words: tuple[str, ...], name: str
) -> None:
    printed = await run(*words)
    assert printed.code != 0
    assert printed.out == ""
    assert name in printed.err
    assert "Traceback" not in printed.err


def test_an_abbreviated_flag_is_not_guessed() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--prefil", "1"])
