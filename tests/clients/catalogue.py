"""The clients of docs/clients.md: the commands that stand there, and what each must have left behind.

Owns: the reading of the document, so that what it says is what is tested, and the checks of each client's own results.
Refuses to know: the server, beyond its addresses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.install import HERE, ROOT, VENVS
from clients.server import Server

DOCUMENT = ROOT / "docs" / "clients.md"
CLIENT_S = 600.0
# Any client that asks something outside fails at once.
NO_NETWORK = {
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "no_proxy": "127.0.0.1,localhost",
}


@dataclass(frozen=True, slots=True)
class Client:
    """`section`: the heading in the document. `check` gets the directory that the commands ran in and what they
    printed; it returns what they measured, in a few words, and raises AssertionError if that is not right."""

    name: str
    section: str
    check: Callable[[Path, str], str]
    venv: str = ""


def run(client: Client, server: Server, tokenizer: Path, directory: Path) -> str:
    """Runs what the document says about a client; returns what the client measured. Raises AssertionError."""
    directory.mkdir(parents=True)
    said = ""
    for language, block in blocks(client.section):
        said += _run_block(language, block, client, server, tokenizer, directory)
    return client.check(directory, said)


def blocks(section: str) -> list[tuple[str, str]]:
    """The commands in a section of the document: language and text of each fenced block."""
    text = DOCUMENT.read_text(encoding="utf-8")
    body = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert body, f"{DOCUMENT.name} has no section {section!r}"
    found = re.findall(r"^```(sh|python)\n(.*?)^```", body[1], re.MULTILINE | re.DOTALL)
    assert found, f"the section {section!r} of {DOCUMENT.name} has no commands"
    return found


def _run_block(language: str, block: str, client: Client, server: Server, tokenizer: Path, directory: Path) -> str:
    block = block.replace("127.0.0.1:8000", server.http).replace("127.0.0.1:50051", server.grpc)
    own = VENVS / client.venv if client.venv else Path(sys.prefix)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        **NO_NETWORK,
        "PATH": f"{own / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE),
        "TOKENIZER": str(tokenizer),
    }
    command = ["bash", "-eu", "-o", "pipefail", "-c", block] if language == "sh" else [sys.executable, "-c", block]
    output = directory / "output.txt"
    with output.open("a") as file:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=CLIENT_S,
            check=False,
        )
    said = output.read_text(errors="replace")
    assert done.returncode == 0, f"exit code {done.returncode}; its last words:\n{said[-3000:]}"
    return said


# --- what each must have left ---------------------------------------------------------------------------------------


def _openai(_directory: Path, said: str) -> str:
    assert "Paris" in said, said
    return said.strip().splitlines()[0]


def _curl(_directory: Path, said: str) -> str:
    assert '"status"' in said, said
    assert said.rstrip().endswith("data: [DONE]"), said
    return f"{said.count('data: {')} events, then [DONE]"


def _grpcurl(_directory: Path, said: str) -> str:
    for service in ("baton.v1.Inference", "baton.v1.Cluster", "grpc.health.v1.Health"):
        assert f"\n{service}\n" in f"\n{said}", said
    assert '"status": "SERVING"' in said, said
    # Field names of JSON are lowerCamelCase, but reflection of Python's servers leaves them out.
    assert re.search(r'"max_?[mM]odel_?[lL]en": \d', said), said
    assert re.search(r'"completion_?[tT]okens": 8\b', said), said
    assert re.search(r'"decode_?[wW]orker": "decode-0"', said), said
    return "services by reflection; Generate: 8 tokens by prefill-0 -> decode-0"


def _vllm(directory: Path, _said: str) -> str:
    return "; ".join(
        _vllm_result(json.loads((directory / f"{name}.json").read_text()), requests)
        for name, requests in (("completions", 8), ("chat", 4))
    )


def _vllm_result(result: dict[str, Any], requests: int) -> str:
    assert result["completed"] == requests, result
    assert result["failed"] == 0, result
    assert not any(result["errors"]), result["errors"]
    assert result["output_lens"] == [8] * requests, result["output_lens"]
    assert all(ttft > 0 for ttft in result["ttfts"]), result["ttfts"]
    assert all(len(gaps) == 7 for gaps in result["itls"]), result["itls"]
    return f"{requests} requests, TTFT {result['mean_ttft_ms']:.0f} ms, TPOT {result['mean_tpot_ms']:.0f} ms"


def _guidellm(directory: Path, _said: str) -> str:
    said = []
    for name, requests in (("completions", 8), ("chat", 4)):
        (benchmark,) = json.loads((directory / f"{name}.json").read_text())["benchmarks"]
        done = benchmark["requests"]
        assert len(done["successful"]) == requests, done
        assert not done["errored"], done["errored"]
        assert [request["output_tokens"] for request in done["successful"]] == [8] * requests
        first = [request["time_to_first_token_ms"] for request in done["successful"]]
        assert all(ttft and ttft > 0 for ttft in first), first
        said.append(f"{requests} requests, TTFT {sum(first) / len(first):.0f} ms")
    return "; ".join(said)


def _aiperf(directory: Path, _said: str) -> str:
    results = directory / "aiperf"
    result = json.loads((results / "profile_export_aiperf.json").read_text())
    lines = map(json.loads, (results / "profile_export.jsonl").read_text().splitlines())
    records = [line for line in lines if line["metadata"]["benchmark_phase"] == "profiling"]
    assert len(records) == 8, records
    assert not any(record.get("error") for record in records), records
    assert result["request_count"]["avg"] == 8, result["request_count"]
    assert not (result.get("error_request_count") or {}).get("avg"), result["error_request_count"]
    assert result["output_sequence_length"]["avg"] == 8, result["output_sequence_length"]
    ttft, itl = result["time_to_first_token"]["avg"], result["inter_token_latency"]["avg"]
    assert ttft > 0, result["time_to_first_token"]
    cached = result["usage_prompt_cache_read_tokens"]["avg"]
    assert "vllm:generation_tokens" in (results / "server_metrics_export.json").read_text(), (
        "server metrics are missing"
    )
    return (
        f"8 requests, TTFT {ttft:.0f} ms, ITL {itl:.0f} ms, {cached:.0f} prompt tokens cached, server metrics scraped"
    )


def _schemathesis(_directory: Path, said: str) -> str:
    ended = re.findall(r"^.*generated.*$", said, re.MULTILINE)
    assert ended, said[-2000:]
    return ended[-1].strip()


CLIENTS = (
    Client("openai", "openai SDK", _openai),
    Client("curl", "curl", _curl),
    Client("grpcurl", "grpcurl", _grpcurl, venv="grpcurl"),
    Client("vllm", "vllm bench serve", _vllm, venv="vllm"),
    Client("guidellm", "guidellm", _guidellm, venv="guidellm"),
    Client("aiperf", "aiperf", _aiperf, venv="aiperf"),
    Client("schemathesis", "schemathesis", _schemathesis, venv="schemathesis"),
)
