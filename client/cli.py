"""The `baton` command.

Owns: its subcommands and options, what goes to standard output and what to standard error, and the exit code: 0 for
success, 1 for a failure that was reported in one line, 2 for a wrong command line or configuration, 130 for Ctrl-C.
Refuses to know: how anything is done or drawn; it puts the parts together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import baton
from baton.capacity import workload
from baton.capacity.trace import Trace, TraceError
from baton.client import access, bench, chat, console
from baton.client.client import DEFAULT_TARGET, Client
from baton.client.errors import BatonError, InvalidRequest, Overloaded
from baton.client.request import RequestOptions
from baton.client.result import Result
from baton.client.resume import Output
from baton.client.servers import BadAddress, GrpcServer, OpenAIServer
from baton.proto import cluster_pb2 as cluster
from baton.proto.credentials import CredentialsError
from baton.proto.plain import plain

_PLAIN_WIDTH = 120
_BENCH_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if words[:1] == ["capacity"]:
            # It has a parser of its own, and imports what takes time and only it needs.
            from baton.client import capacity

            return capacity.main(words[1:])
        options = build_parser().parse_args(words)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except BatonError as error:
        _complain(error)
        return 1
    except CredentialsError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more when it flushes at exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process ends
        return 1
    except OSError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton",
        allow_abbrev=False,
        description="Serve large language models with prefill and decode on separate workers.",
    )
    parser.add_argument("--version", action="version", version=f"baton {baton.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_status(commands)
    _add_logs(commands)
    _add_role(commands)
    _add_drain(commands)
    _add_stop(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_certs(commands)
    commands.add_parser("capacity", help="how many prefill and how many decode workers a traffic needs")
    return parser


# --- options --------------------------------------------------------------------------------------------------------


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", allow_abbrev=False, help="start workers and a router on this machine, until Ctrl-C"
    )
    parser.add_argument("config", nargs="?", type=Path, help="a cluster file; without one, one worker of each kind")
    parser.add_argument("--model", help="a directory, a Hugging Face id, or demo")
    parser.add_argument("--prefill", type=_count, metavar="N", help="number of prefill workers")
    parser.add_argument("--decode", type=_count, metavar="N", help="number of decode workers")
    parser.add_argument("--routers", type=_positive_count, metavar="N", help="router processes behind one port")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--port", type=_port, help="of the gRPC address (default 50051; 0 takes a free one)")
    parser.add_argument("--http-port", type=_port, help="of the HTTP address (default 8000; 0 takes a free one)")
    parser.add_argument(
        "--require-auth", action="store_true", help="start only if nobody can call, or read along, unasked"
    )
    parser.set_defaults(command=_serve)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", allow_abbrev=False, help="continue a text, then show where the time went")
    parser.add_argument("prompt", help="the text; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="ask it as a question, by the model's chat template")
    form.add_argument("--raw", action="store_true", help="continue the text as it stands (the default)")
    parser.add_argument("--stream", action="store_true", help="show text as it comes (the default), one JSON a line")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    _add_sampling(parser)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="SCHEMA", help="write JSON that fits a schema: itself, or its file")
    grammar.add_argument("--regex", metavar="R", help="write text that matches an expression as a whole")
    _add_connection(parser)
    parser.set_defaults(command=_generate)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser("chat", allow_abbrev=False, help=f"hold a conversation ({chat.HELP})")
    parser.add_argument("--system", metavar="TEXT", help="how the assistant should behave")
    _add_sampling(parser)
    _add_connection(parser)
    parser.set_defaults(command=_chat)


def _add_status(commands: Any) -> None:
    parser = commands.add_parser("status", allow_abbrev=False, help="show pools, workers, queues and KV usage")
    parser.add_argument("--watch", action="store_true", help="go on showing it until Ctrl-C")
    parser.add_argument("--interval", type=_positive, default=1.0, metavar="S", help="seconds between two looks")
    parser.add_argument("--json", action="store_true", help="print it as JSON, one line a look")
    _add_connection(parser)
    parser.set_defaults(command=_status)


def _add_logs(commands: Any) -> None:
    parser = commands.add_parser("logs", allow_abbrev=False, help="show what the router or a worker has logged of late")
    parser.add_argument(
        "worker", nargs="?", default="router", help="its name, as baton status shows it (default: router)"
    )
    parser.add_argument("--lines", type=_positive_count, default=100, metavar="N", help="the last N (default 100)")
    parser.add_argument(
        "--previous",
        action="store_true",
        help="of the process that had this name on that machine before, from its file",
    )
    parser.add_argument("--json", action="store_true", help="print them, and where they are from, as JSON")
    _add_connection(parser)
    parser.set_defaults(command=_logs)


def _add_role(commands: Any) -> None:
    parser = commands.add_parser("role", allow_abbrev=False, help="make a running worker one of another kind")
    parser.add_argument("worker", help="its name, as baton status shows it")
    parser.add_argument("role", choices=("prefill", "decode", "colocated"))
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help="for its running requests, which go on elsewhere after that (default: router.drain_timeout_s)",
    )
    parser.add_argument("--force", action="store_true", help="also if nothing could be served afterwards")
    parser.add_argument("--json", action="store_true", help="print the times as JSON")
    _add_connection(parser)
    parser.set_defaults(command=_role)


def _add_drain(commands: Any) -> None:
    parser = commands.add_parser(
        "drain", allow_abbrev=False, help="have a worker, or all workers of a host, finish and leave"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("worker", nargs="?", help="its name, as baton status shows it; its pool is smaller then")
    which.add_argument("--host", help="an address or a name in Ray; the workers there get successors on other hosts")
    parser.add_argument(
        "--timeout", type=_positive, default=30.0, metavar="S", help="for running requests, which then go on elsewhere"
    )
    parser.add_argument("--force", action="store_true", help="also if nothing could be served afterwards")
    parser.add_argument("--json", action="store_true", help="print what has happened as JSON")
    _add_connection(parser)
    parser.set_defaults(command=_drain)


def _add_stop(commands: Any) -> None:
    parser = commands.add_parser(
        "stop", allow_abbrev=False, help="drain and end the cluster in the Ray of this machine, for ray down"
    )
    parser.add_argument("--timeout", type=_seconds, default=30.0, metavar="S", help="for running requests (default 30)")
    parser.set_defaults(command=_stop)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="look for what is wrong with this machine, a cluster file or a running cluster",
    )
    parser.add_argument("config", nargs="?", type=Path, help="a cluster file: what a start with it would need")
    parser.add_argument("--target", metavar="HOST:PORT", help="of the router (default: the file's, or 127.0.0.1:50051)")
    access.add_options(parser)
    parser.add_argument("--timeout", type=_positive, default=15.0, metavar="S", help="for asking a running cluster")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(command=_doctor)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", allow_abbrev=False, help="send a workload to a running server and measure")
    _add_connection(parser, "--grpc")
    parser.add_argument("--url", help="an OpenAI-style server to measure instead, http://host:port")
    names = ", ".join(workload.NAMES)
    parser.add_argument("--workload", default="chat", metavar="NAME", help=f"{names}, random:IN/OUT or fixed:IN/OUT")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay a Mooncake .jsonl or Azure .csv file instead"
    )
    parser.add_argument(
        "--rate", type=_rate, metavar="R", help="requests a second (default: a trace's own, else all at once)"
    )
    parser.add_argument("--num-requests", type=_positive_count, default=100, metavar="N")
    parser.add_argument("--concurrency", type=_positive_count, metavar="N", help="at most N requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale-lengths", type=_positive, default=1.0, metavar="F", help="multiply all lengths by F")
    parser.add_argument("--slo-ttft-ms", type=_positive, metavar="MS", help="count requests that meet this as good")
    parser.add_argument("--slo-tpot-ms", type=_positive, metavar="MS")
    parser.add_argument("--timeout", type=_positive, default=_BENCH_TIMEOUT_S, metavar="S", help="for one request")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report and every request to a file")
    parser.set_defaults(command=_bench)


def _add_certs(commands: Any) -> None:
    parser = commands.add_parser(
        "certs", allow_abbrev=False, help="make an authority and the certificates of a cluster that has none"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the files go; none is overwritten")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or an address by which clients reach the router; repeatable (localhost is in it always)",
    )
    parser.add_argument("--client", action="append", default=[], metavar="NAME", help="a certificate for a client, too")
    parser.add_argument(
        "--days", type=_positive_count, default=365, metavar="N", help="until they expire (default 365)"
    )
    parser.set_defaults(command=_certs)


def _add_connection(parser: argparse.ArgumentParser, *more_names: str) -> None:
    names = ("--target", "--address", *more_names)
    parser.add_argument(*names, dest="target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="of the router")
    access.add_options(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=_count, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the most likely token")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")


def _sampling(options: argparse.Namespace) -> RequestOptions:
    """The sampling options that were given."""
    chosen = RequestOptions()
    if options.max_tokens is not None:
        chosen["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        chosen["temperature"] = options.temperature
    if options.top_p is not None:
        chosen["top_p"] = options.top_p
    if options.top_k is not None:
        chosen["top_k"] = options.top_k
    if options.seed is not None:
        chosen["seed"] = options.seed
    return chosen


def _schema(text: str) -> str:
    """A schema is an object; what does not begin like one is the name of its file."""
    return text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")


def _count(text: str) -> int:
    return _whole_number(text, 0, 2**31 - 1)


def _positive_count(text: str) -> int:
    return _whole_number(text, 1, 2**31 - 1)


def _port(text: str) -> int:
    return _whole_number(text, 0, 2**16 - 1)


def _whole_number(text: str, low: int, high: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a whole number from {low} to {high}")
    return number


def _positive(text: str) -> float:
    number = _rate(text)
    if math.isinf(number):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a finite number above 0")
    return number


def _seconds(text: str) -> float:
    return 0.0 if text == "0" else _positive(text)


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a number above 0")
    return number


# --- commands -------------------------------------------------------------------------------------------------------


def _serve(options: argparse.Namespace) -> int:
    # Ray and torch take seconds to import, and only this command needs them.
    from baton.router import config
    from baton.router.__main__ import serve

    try:
        cluster_config = config.load(options.config) if options.config is not None else config.defaults()
        cluster_config = cluster_config.resized(prefill=options.prefill, decode=options.decode)
        if options.model is not None:
            cluster_config = cluster_config.with_model(options.model)
        if options.device is not None:
            cluster_config = cluster_config.with_device(options.device)
        if options.routers is not None:
            cluster_config = cluster_config.with_replicas(options.routers)
        if options.port is not None or options.http_port is not None:
            port = cluster_config.router.port if options.port is None else options.port
            cluster_config = cluster_config.with_port(port, options.http_port)
        if options.require_auth:
            cluster_config = cluster_config.requiring_auth()
    except (config.ConfigError, OSError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    return serve(cluster_config)


def _stop(options: argparse.Namespace) -> int:
    from baton.router.__main__ import stop

    return stop(options.timeout)


def _certs(options: argparse.Namespace) -> int:
    # Cryptography takes a while to import, and only this command needs it.
    from baton.client.certs import CertsError, make_certificates

    try:
        made = make_certificates(options.directory, options.host, options.client, options.days)
    except CertsError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    _show(made)
    return 0


def _generate(options: argparse.Namespace) -> int:
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    chosen = _sampling(options)
    if options.stop:
        chosen["stop"] = options.stop
    if options.json_schema is not None:
        chosen["json_schema"] = _schema(options.json_schema)
    if options.regex is not None:
        chosen["regex"] = options.regex
    with _client(options) as client:
        generation = (
            client.generate(messages=[{"role": "user", "content": text}], **chosen)
            if options.chat
            else client.generate(text, **chosen)
        )
        with generation:
            for output in generation:
                if not options.json:
                    _show(output.text)
                elif options.stream:
                    _show(json.dumps(_delta(output)) + "\n")
            result = generation.result()
    if options.json:
        _show(json.dumps(_result(result), indent=None if options.stream else 2) + "\n")
    else:
        _show("\n\n")
        _console().print(console.timeline(result))
    return 0


def _chat(options: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and history
    out = _console()
    with _client(options) as client:
        model = client.model()
        if sys.stdin.isatty():
            out.print(f"{model.name}: {chat.HELP}", style="dim", markup=False)
        face = chat.Face(
            ask=lambda: input("> " if sys.stdin.isatty() else ""),
            show=_show,
            note=lambda text: out.print(text, style="dim", markup=False),
            show_result=lambda result: out.print(
                f"{console.counted(len(result.token_ids), 'token')}, {console.pace(result)}", style="dim", markup=False
            ),
            complain=_complain,
        )
        chat.converse(client, face, _sampling(options), options.system)
    return 0


def _status(options: argparse.Namespace) -> int:
    out = _console()
    with _client(options) as client:
        if not options.watch:
            _show_status(client.status(), options, out)
            return 0
        with contextlib.closing(client.watch_status(options.interval)) as statuses:
            if options.json or not out.is_terminal:
                for status in statuses:
                    _show_status(status, options, out)
                    if not options.json:
                        out.print()
            else:
                with Live(console=out, auto_refresh=False, screen=False) as live:
                    for status in statuses:
                        live.update(console.Status(status), refresh=True)
    return 0


def _show_status(status: cluster.ClusterStatus, options: argparse.Namespace, out: Console) -> None:
    if options.json:
        _show(json.dumps(plain(status), separators=(",", ":")) + "\n")
    else:
        out.print(console.Status(status))


def _logs(options: argparse.Namespace) -> int:
    with _client(options) as client:
        tail = client.logs(options.worker, options.lines, previous=options.previous)
    if options.json:
        _show(json.dumps(plain(tail)) + "\n")
        return 0
    kept = f", {tail.file}" if tail.file else ""
    print(f"baton: {tail.process} on {tail.host}, incarnation {tail.incarnation}{kept}", file=sys.stderr)
    _show("".join(f"{line}\n" for line in tail.lines))
    return 0


def _role(options: argparse.Namespace) -> int:
    with _client(options) as client:
        done = client.set_role(options.worker, options.role, timeout_s=options.timeout, force=options.force)
    if options.json:
        times = {"worker": options.worker, "role": options.role, "drain_s": done.drain_s, "total_s": done.total_s}
        _show(json.dumps({**times, "moved": done.moved}) + "\n")
        return 0
    moved = f", {console.counted(done.moved, 'leg')} moved" if done.moved else ""
    _show(
        f"{options.worker} is a {options.role} worker after {done.total_s:.2f} s, {done.drain_s:.2f} s of them "
        f"draining{moved}\n"
    )
    return 0


def _drain(options: argparse.Namespace) -> int:
    with _client(options) as client:
        done = client.leave(
            options.worker or "", host=options.host or "", timeout_s=options.timeout, force=options.force
        )
    if options.json:
        _show(json.dumps({"left": list(done.left), "moved": done.moved}) + "\n")
        return 0
    moved = f", {console.counted(done.moved, 'leg')} moved" if done.moved else ""
    _show(f"{', '.join(done.left) or 'no worker'} has left{moved}\n")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from baton.client import doctor

    try:
        token, tls = access.token_of(options), access.tls_of(options)
        diagnosis = doctor.diagnose(options.config, options.target, token, options.timeout, tls)
    except ValueError as error:
        print(f"baton: --target {error}", file=sys.stderr)
        return 2
    _show(json.dumps(diagnosis.to_json(), indent=2) + "\n" if options.json else doctor.told(diagnosis))
    return 0 if diagnosis.is_healthy else 1


def _bench(options: argparse.Namespace) -> int:
    if options.json is not None:
        options.json.open("a").close()  # a place that cannot be written to is better known before the measurement
    try:
        return asyncio.run(_measure(options, _planned(options)))
    except (workload.UnknownWorkload, TraceError, BadAddress) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2


def _planned(options: argparse.Namespace) -> Sequence[workload.Arrival]:
    """The requests to send; `options` then say what was chosen."""
    if options.trace is None:
        options.rate = math.inf if options.rate is None else options.rate
        return workload.requests(
            options.workload, options.num_requests, options.rate, options.seed, options.scale_lengths
        )
    trace = Trace.open(options.trace)
    options.workload, options.rate = str(options.trace), options.rate or trace.rate
    options.num_requests = min(options.num_requests, trace.num_requests)
    replayed = trace.arrivals(options.rate, options.scale_lengths, options.scale_lengths)
    return list(islice(replayed, options.num_requests))


async def _measure(options: argparse.Namespace, plan: Sequence[workload.Arrival]) -> int:
    objectives = bench.Objectives(options.slo_ttft_ms, options.slo_tpot_ms)
    server: bench.Server
    token, tls = access.token_of(options), access.tls_of(options)
    if options.url is not None:
        server = OpenAIServer(options.url, token, options.timeout, tls)
    else:
        access.warn_of_plain_text(token, tls, options.target)
        server = GrpcServer(options.target, token, options.timeout, tls)
    out = _console()
    try:
        model = await server.model()
        work = bench.jobs(plan, model, options.seed)
        out.print(_headline(options, model), markup=False)
        with _progress(out) as progress:
            task = progress.add_task("", total=len(work), failed="")
            failed = 0

            def advance(sample: bench.Sample) -> None:
                nonlocal failed
                failed += bool(sample.error)
                progress.update(task, advance=1, failed=f"{failed} failed" if failed else "")

            samples = await bench.run(
                server, work, concurrency=options.concurrency, seed=options.seed, progress=advance
            )
    finally:
        await server.close()
    report = bench.summarize(work, samples, objectives)
    out.print()
    out.print(console.report(report))
    for message in sorted({sample.message for sample in samples if sample.error})[:3]:
        print(f"baton: {message}", file=sys.stderr)
    if options.json is not None:
        _write_report(options, model, report, samples)
        out.print(f"\nwritten to {options.json}", style="dim", markup=False)
    return 0 if report.num_finished else 1


def _headline(options: argparse.Namespace, model: bench.ServedModel) -> str:
    rate = "all at once" if math.isinf(options.rate) else f"{options.rate:g} a second"
    parts = [f"{model.name}: {console.counted(options.num_requests, 'request')} of {options.workload}", rate]
    if options.concurrency is not None:
        parts.append(f"at most {options.concurrency} at a time")
    if options.scale_lengths != 1:
        parts.append(f"lengths times {options.scale_lengths:g}")
    return ", ".join([*parts, f"seed {options.seed}"])


def _write_report(
    options: argparse.Namespace, model: bench.ServedModel, report: bench.Report, samples: Sequence[bench.Sample]
) -> None:
    settings = {
        "server": options.url or options.target,
        "model": model.name,
        "workload": options.workload,
        "rate": None if math.isinf(options.rate) else options.rate,
        "num_requests": options.num_requests,
        "concurrency": options.concurrency,
        "seed": options.seed,
        "scale_lengths": options.scale_lengths,
    }
    content = {"settings": settings, "report": report.to_json(), "requests": [asdict(sample) for sample in samples]}
    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# --- output ---------------------------------------------------------------------------------------------------------


def _client(options: argparse.Namespace) -> Client:
    token, tls = access.token_of(options), access.tls_of(options)
    access.warn_of_plain_text(token, tls, options.target)
    return Client(options.target, token=token, tls=tls)


def _console() -> Console:
    """Of standard output; wide and plain where that is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def _progress(out: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}", style="red"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )


def _show(text: str) -> None:
    sys.stdout.write(console.printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _complain(error: BatonError) -> None:
    """One line; for a request that breaks several rules, one line a rule."""
    lines = [error.message]
    if isinstance(error, InvalidRequest) and error.violations:
        lines = [f"invalid request: {violation.description}" for violation in error.violations]
    elif isinstance(error, Overloaded) and error.retry_after_s is not None:
        lines = [f"{error.message} (try again in {error.retry_after_s:.1f} s)"]
    for line in lines:
        print(f"baton: {line}", file=sys.stderr)


def _delta(output: Output) -> dict[str, Any]:
    return {"index": output.index, "text": output.text, "token_ids": output.token_ids}


def _result(result: Result) -> dict[str, Any]:
    finish = result.finish
    return {
        "request_id": result.request_id,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": finish.reason.name.lower(),
        "stop": finish.stop or None,
        "usage": asdict(finish.usage),
        "timeline": asdict(finish.timeline),
        "prefill_worker": finish.prefill_worker,
        "decode_worker": finish.decode_worker,
        "connector": finish.connector,
        "retries": finish.retries,
        "client": {"ttft_s": result.ttft_s, "total_s": result.total_s, "resumes": result.num_resumes},
    }


if __name__ == "__main__":
    sys.exit(main())
