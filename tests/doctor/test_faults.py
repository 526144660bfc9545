"""`baton doctor` names the fault in each of ten set-ups that are broken in one way, and finds none in a sound one."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from doctor.serving import examined, faults, serving
from doctor.wire import Wire
from doctor.worker_process import PATHS, add_far
from paper_model import PaperRunner

from baton.client import cli, doctor
from baton.proto.messages import Role
from baton.router.config import RouterSettings

KEY = "sesame-open-up"


def closed_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cluster_file(directory: Path, **section: Any) -> Path:
    """A cluster file with two small workers; `section` replaces parts of Baton's."""
    baton = {
        "model": "demo",
        "engine": {"kv_cache_gib": 0.01},
        "pools": {"prefill": {"role": "prefill", "size": 1}, "decode": {"role": "decode", "size": 1}},
        "router": {"port": closed_port(), "http_port": closed_port()},
    }
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump({"cluster_name": "t", "metadata": {"baton": {**baton, **section}}}))
    return file


def before_a_start(file: Path) -> doctor.Diagnosis:
    return doctor.diagnose(file, None, None, 5.0)


def only(diagnosis: doctor.Diagnosis) -> doctor.Finding:
    """The one fault that was found."""
    [finding] = [finding for finding in diagnosis.findings if finding.is_fault]
    assert not diagnosis.is_healthy
    return finding


# --- nothing is wrong -----------------------------------------------------------------------------------------------


async def test_a_sound_cluster_has_no_finding(paper_dir):
    async with serving(paper_dir, prefill=2, decode=2) as small:
        diagnosis = await examined(small)
        assert diagnosis.findings == []
        assert {"ports", "credentials", "health", "version", "clock", "workers", "lanes", "memory", "shm"} <= set(
            diagnosis.checked
        )
        await small.at_rest()


async def test_colocated_workers_have_no_lanes_and_no_finding(paper_dir):
    async with serving(paper_dir, prefill=0, decode=0, colocated=2) as small:
        assert (await examined(small)).findings == []


def test_a_sound_file_has_no_fault_and_the_machine_was_looked_at(tmp_path, tiny_model_dir):
    diagnosis = before_a_start(cluster_file(tmp_path, model=str(tiny_model_dir())))
    assert faults(diagnosis) == []
    assert diagnosis.checked == ["file", "model", "keys", "packages", "ports", "memory", "shm", "gpus"]


# --- the ten --------------------------------------------------------------------------------------------------------


def test_a_closed_port_is_named(capsys):
    port = closed_port()
    assert cli.main(["doctor", "--target", f"127.0.0.1:{port}", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["healthy"]
    [finding] = told["findings"]
    assert (finding["check"], finding["subject"]) == ("ports", f"127.0.0.1:{port}")
    assert "is closed: nothing listens there" in finding["problem"]


async def test_a_worker_of_another_version_is_named_with_both_versions_and_no_pair_uses_it(paper_dir):
    runners = iter([PaperRunner(), PaperRunner(version="0.0.9"), PaperRunner()])
    async with serving(paper_dir, lambda: next(runners), prefill=2, decode=1) as small:
        diagnosis = await examined(small)
        assert faults(diagnosis) == [("version", "prefill-1"), ("lanes", "prefill-1 to decode-0")]
        version, lane = diagnosis.findings
        assert "runs Baton 0.0.9, the router runs 0.1.0" in version.problem
        assert "version is '0.0.9' on prefill-1 and '0.1.0' on decode-0" in lane.problem


def apart(unshared: str, prepare: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a namespace of its own, in which something is done first."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return subprocess.run(
        ["unshare", *user, unshared, "sh", "-c", prepare + ' && exec "$@"', "sh", sys.executable, *command],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_full_shared_memory_is_named_with_what_is_free_and_what_is_needed(tmp_path, tiny_model_dir):
    file = cluster_file(tmp_path, model=str(tiny_model_dir()))
    fill = "mount -t tmpfs -o size=64m shm /dev/shm && head -c 60M /dev/zero > /dev/shm/stale"
    done = apart("--mount", fill, "-m", "baton.client.cli", "doctor", str(file), "--json")
    assert done.returncode == 1, done.stderr
    [finding] = [finding for finding in json.loads(done.stdout)["findings"] if finding["is_fault"]]
    assert finding["check"] == "shm"
    assert "/dev/shm has 4.0 MiB free of 64.0 MiB, a start needs 144.0 MiB" in finding["problem"]


async def test_a_clock_that_is_off_is_named_with_how_much(paper_dir):
    async with serving(paper_dir) as small:
        await add_far(small, Role.PREFILL, "prefill-1", clock_ahead_s=7.0)
        finding = only(await examined(small))
        assert (finding.check, finding.subject) == ("clock", "prefill-1")
        assert "its clock is 7.0 s ahead of that of the router, at most 1.0 s is allowed" in finding.problem


def test_a_slow_link_is_named_with_its_rate_and_the_expected_one(paper_dir):
    shape = "ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate 80mbit burst 16kb latency 100ms"
    done = apart("--net", shape, str(Path(__file__).with_name("slow_link.py")), str(paper_dir))
    assert done.returncode == 0, done.stderr
    expecting, content = json.loads(done.stdout.splitlines()[-1])
    [finding] = [finding for finding in expecting["findings"] if finding["is_fault"]]
    assert (finding["check"], finding["subject"]) == ("lanes", "prefill-0 to decode-0")
    rate = float(finding["problem"].split("KV comes at ")[1].split(" GB/s by nccl, gloo, 1 GB/s are expected")[0])
    assert 0.002 < rate < 0.012  # 80 Mbit/s are 0.01 GB/s
    assert content["healthy"], content["findings"]


async def test_a_link_with_long_round_trips_is_named_with_their_time(paper_dir):
    async with serving(paper_dir, prefill=1, decode=1) as small:
        seat = small.seats["prefill-0"]
        await small.add(Role.DECODE, "decode-1")  # one that has met nobody yet
        async with Wire(seat.description.address, delay_s=0.06) as wire:
            seat.link.description = replace(seat.link.description, address=wire.address)
            finding = only(await examined(small))
            assert (finding.check, finding.subject) == ("lanes", "prefill-0 to decode-1")
            assert re.search(r"a round trip takes \d{3}\.\d ms, at most 50\.0 ms is good", finding.problem)


async def test_a_missing_and_a_wrong_token_are_told_apart_and_the_right_one_is_let_in(paper_dir, tmp_path):
    (tmp_path / "keys").write_text(f"ops: {KEY}\n")
    settings = RouterSettings(port=0, api_keys_file=str(tmp_path / "keys"))
    async with serving(paper_dir, router_settings=settings) as small:
        missing, wrong = only(await examined(small)), only(await examined(small, token="guessed-it"))
        assert (missing.check, wrong.check) == ("credentials", "credentials")
        assert "wants a bearer token, and none was given" in missing.problem
        assert "does not take the token that was given" in wrong.problem
        assert "guessed-it" not in repr(wrong)
        assert (await examined(small, token=KEY)).findings == []


def test_a_wrong_model_path_is_named(tmp_path):
    finding = only(before_a_start(cluster_file(tmp_path, model=str(tmp_path / "nowhere"))))
    assert (finding.check, finding.subject) == ("model", str(tmp_path / "nowhere"))
    assert "no such directory" in finding.problem


def test_weights_that_were_copied_in_part_are_named(tmp_path, tiny_model_dir):
    copy = tmp_path / "model"
    shutil.copytree(tiny_model_dir(), copy)
    weights = copy / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    finding = only(before_a_start(cluster_file(tmp_path, model=str(copy))))
    assert finding.check == "model"
    assert "its weights cannot be read" in finding.problem


def test_too_little_memory_is_named_with_what_is_needed_and_what_is_there(tmp_path, tiny_model_dir):
    file = cluster_file(tmp_path, model=str(tiny_model_dir()), engine={"kv_cache_gib": 100_000})
    finding = only(before_a_start(file))
    assert finding.check == "memory"
    assert "the KV pools of 2 processes take 200000.0 GiB" in finding.problem
    assert "are available" in finding.problem


async def test_a_dead_worker_is_named(paper_dir):
    async with serving(paper_dir, prefill=1, decode=1) as small:
        far = await add_far(small, Role.DECODE, "decode-1")
        assert (await examined(small)).findings == []
        far.process.kill()
        await far.link.lost
        finding = only(await examined(small))
        assert (finding.check, finding.subject) == ("workers", "decode-1")
        assert "is lost and does not answer" in finding.problem


async def test_a_half_open_link_between_two_workers_is_named_though_both_answer_the_router(paper_dir):
    async with serving(paper_dir, prefill=2, decode=1) as small:
        seat = small.seats["prefill-1"]
        await small.add(Role.DECODE, "decode-1")  # one that has met nobody yet
        async with Wire(seat.description.address, swallows=True) as wire:
            seat.link.description = replace(seat.link.description, address=wire.address)
            finding = only(await examined(small))
            assert (finding.check, finding.subject) == ("lanes", "prefill-1 to decode-1")
            assert "both answer the router, but not one another: silent for 3.0 s" in finding.problem
            assert "half-open" in finding.remedy


# --- and some more --------------------------------------------------------------------------------------------------


def test_a_taken_port_is_named_with_who_has_it(tmp_path, tiny_model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        router = {"port": closed_port(), "http_port": port}
        finding = only(before_a_start(cluster_file(tmp_path, model=str(tiny_model_dir()), router=router)))
        assert (finding.check, finding.subject) == ("ports", f"127.0.0.1:{port}")
        assert f"(pid {os.getpid()})" in finding.problem


def test_a_file_that_cannot_be_used_is_named_with_the_key(tmp_path):
    diagnosis = before_a_start(cluster_file(tmp_path, router={"prot": 1}))
    assert "metadata.baton.router.prot" in only(diagnosis).problem
    assert only(diagnosis).check == "file"


def test_gpus_that_are_wanted_and_absent_are_named(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.setattr("baton.telemetry.machine.num_gpus", lambda: 0)
    file = cluster_file(tmp_path, model=str(tiny_model_dir()), engine={"device": "cuda"})
    finding = only(before_a_start(file))
    assert finding.check == "gpus"
    assert "the pools take 2 GPUs" in finding.problem


async def test_a_router_that_does_not_serve_yet_is_named(paper_dir):
    async with serving(paper_dir) as small:
        await small.server.drain(1.0)
        assert ("health", small.address) in faults(await examined(small))


def test_a_router_that_speaks_tls_is_told_from_one_that_is_down():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([self_signed()]))
    server.start()
    try:
        finding = only(doctor.diagnose(None, f"127.0.0.1:{port}", None, 5.0))
    finally:
        server.stop(None)
    assert finding.check == "credentials"
    assert "speaks TLS, and was asked in plain text" in finding.problem


def self_signed() -> tuple[bytes, bytes]:
    """A key and a certificate by it, for a minute."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(minutes=1)
        )
    ).sign(key, hashes.SHA256())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, certificate.public_bytes(Encoding.PEM)


def test_a_target_that_is_no_address_is_refused_by_name(capsys):
    assert cli.main(["doctor", "--target", "nonsense"]) == 2
    assert "'nonsense' is not HOST:PORT" in capsys.readouterr().err


def test_findings_read_as_sentences_with_what_to_do(capsys):
    port = closed_port()
    assert cli.main(["doctor", "--target", f"127.0.0.1:{port}"]) == 1
    told = capsys.readouterr().out
    assert told.startswith(f"WRONG  ports: 127.0.0.1:{port}: port {port} of 127.0.0.1 is closed")
    assert "\n       -> start Baton there" in told
    assert told.endswith("looked at ports: 1 fault\n")
