"""`baton doctor`: says what is wrong with a machine, a cluster file or a running cluster, and what to do.

Owns: which checks are made when, the questions to the router, how findings are shown.
Refuses to know: the bounds, which are the checks' own (`client.checks`), and how to mend anything: it changes nothing.

    file, if one is given:  read -> model, keys, packages
    the router's port:      closed, and it is this machine's -> what a start here would need: ports, memory, shm, GPUs
                            open -> token, TLS, health -> clock, versions -> every worker, every pair's lane
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors import SafetensorError, safe_open

from baton import __version__
from baton.client.checks import cluster as cluster_checks
from baton.client.checks import machine as machine_checks
from baton.client.checks.finding import Finding
from baton.client.checks.machine import Needs
from baton.client.checks.reach import bindable, is_local, reach, speaks_tls, split_address
from baton.client.client import DEFAULT_TARGET
from baton.engine.checkpoint import CheckpointError, local_model
from baton.engine.models.config import ModelConfig, UnsupportedModel, read_config
from baton.engine.split import split
from baton.proto import cluster_pb2 as cluster
from baton.proto import cluster_pb2_grpc
from baton.proto.credentials import ClientTls
from baton.router.config import ClusterConfig, ConfigError, PoolConfig, load
from baton.router.keys import KeysError, read_keys
from baton.telemetry import machine

_QUESTIONS = 3
_ANSWER_S = 5.0
_NIXL = ("nixl", "nixl_cu12", "nixl_cu13")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass
class Diagnosis:
    """What was looked at, in order, and what was found."""

    target: str
    checked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        return not any(finding.is_fault for finding in self.findings)

    def add(self, check: str, findings: Iterator[Finding]) -> bool:
        """Notes that a check was made; returns whether it found no fault."""
        if check not in self.checked:
            self.checked.append(check)
        found = list(findings)
        self.findings += found
        return not any(finding.is_fault for finding in found)

    def to_json(self) -> dict[str, Any]:
        findings = [asdict(finding) for finding in self.findings]
        return {"healthy": self.is_healthy, "target": self.target, "checked": self.checked, "findings": findings}


def diagnose(
    config_file: Path | None, target: str | None, token: str | None, timeout_s: float, tls: ClientTls | None = None
) -> Diagnosis:
    """Looks at everything that can be looked at. Raises ValueError for a target that is no address."""
    config, complaints = _read(config_file)
    address = target or (_address_of(config) if config is not None else DEFAULT_TARGET)
    split_address(address)
    diagnosis = Diagnosis(address)
    model = None
    if config_file is not None:
        diagnosis.add("file", iter(complaints))
    if config is not None:
        model = _check_file(diagnosis, config)
    silence = reach(address)
    if not silence:
        _check_running(diagnosis, address, token, timeout_s, tls)
    elif target is not None or config_file is None:
        remedy = (
            "start Baton there, or name the router's port by --target; with a cluster file a start's needs are checked"
        )
        diagnosis.add("ports", iter([Finding("ports", address, silence, remedy)]))
    if silence and config is not None:
        here = is_local(address)
        looked = "what a start on this machine needs was looked at" if here else "only the file was looked at"
        remedy = "name a running router by --target"
        diagnosis.add(
            "ports", iter([Finding("ports", address, f"no router answers: {looked}", remedy, is_fault=False)])
        )
        if here:
            _check_before_start(diagnosis, config, model)
    return diagnosis


def told(diagnosis: Diagnosis) -> str:
    """For a person."""
    lines = []
    for finding in sorted(diagnosis.findings, key=lambda it: not it.is_fault):
        lines.append(
            f"{'WRONG' if finding.is_fault else 'note '}  {finding.check}: {finding.subject}: {finding.problem}"
        )
        lines.append(f"       -> {finding.remedy}")
    faults = sum(finding.is_fault for finding in diagnosis.findings)
    verdict = f"{faults} {'fault' if faults == 1 else 'faults'}" if faults else "nothing is wrong"
    return "\n".join([*lines, f"{diagnosis.target}: looked at {', '.join(diagnosis.checked)}: {verdict}"]) + "\n"


# --- the file and this machine --------------------------------------------------------------------------------------


def _read(file: Path | None) -> tuple[ClusterConfig | None, list[Finding]]:
    if file is None:
        return None, []
    try:
        return load(file), []
    except ConfigError as error:
        return None, [Finding("file", str(file), f"{error.key} {error.problem}".strip(), "correct the file")]


def _address_of(config: ClusterConfig) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.router.host, config.router.host)
    return f"[{host}]:{config.router.port or 50051}" if ":" in host else f"{host}:{config.router.port or 50051}"


def _check_file(diagnosis: Diagnosis, config: ClusterConfig) -> Path | None:
    """What does not depend on whether Baton runs. Returns the model's directory, if it is here and sound."""
    directory, complaints = _model(config)
    diagnosis.add("model", iter(complaints))
    diagnosis.add("keys", _keys(config))
    diagnosis.add("packages", _packages(config))
    return directory


def _model(config: ClusterConfig) -> tuple[Path | None, list[Finding]]:
    name = config.model
    try:
        directory = local_model(name)
        if directory is None:
            note = "is not on this machine yet: the first start has to fetch or convert it"
            return None, [Finding("model", name, note, "nothing, if the start can reach it", is_fault=False)]
        model = read_config(directory)
        for pool in config.pools:
            split(model, 0, pool.engine.tensor_parallel)
        for file in directory.glob("*.safetensors"):
            with safe_open(file, framework="numpy"):
                pass
    except CheckpointError as error:
        remedy = "set metadata.baton.model to a directory with config.json and *.safetensors, a Hugging Face id or demo"
        return None, [Finding("model", name, str(error), remedy)]
    except UnsupportedModel as error:
        return None, [Finding("model", name, str(error), "choose another model, or another engine.tensor_parallel")]
    except (OSError, SafetensorError) as error:
        return None, [Finding("model", name, f"its weights cannot be read: {error}", "copy them again, as this user")]
    return directory, []


def _keys(config: ClusterConfig) -> Iterator[Finding]:
    if config.router.api_keys_file:
        try:
            read_keys(Path(config.router.api_keys_file))
        except KeysError as error:
            remedy = "give metadata.baton.router.api_keys_file a readable file with one key a line"
            yield Finding("keys", config.router.api_keys_file, str(error), remedy)


def _packages(config: ClusterConfig) -> Iterator[Finding]:
    if config.transfer.connector == "nixl" and not any(importlib.util.find_spec(name) for name in _NIXL):
        problem = "is not installed, and kvtransfer.connector is nixl"
        yield Finding("packages", "nixl", problem, "pip install nixl, or set kvtransfer.connector to nccl")


def _check_before_start(diagnosis: Diagnosis, config: ClusterConfig, model: Path | None) -> None:
    for key in ("port", "http_port"):
        if port := getattr(config.router, key):
            diagnosis.add("ports", bindable(config.router.host, port, f"router.{key}"))
    here, needs = machine.look(), _needs(config, model)
    for name in ("memory", "shm", "gpus"):
        diagnosis.add(name, (it for it in machine_checks.room_to_start(here, needs) if it.check == name))


def _needs(config: ClusterConfig, directory: Path | None) -> Needs:
    """`baton serve` puts all of it on this machine."""
    on_cpu = [pool for pool in config.pools if pool.engine.device == "cpu"]
    model = read_config(directory) if directory is not None else None
    files = sum(file.stat().st_size for file in directory.glob("*.safetensors")) if directory is not None else 0
    return Needs(
        num_processes=sum(pool.size * pool.engine.tensor_parallel for pool in config.pools),
        kv_bytes=sum(_kv_bytes(pool, model) for pool in on_cpu),
        weight_bytes=sum(pool.size * files for pool in on_cpu),
        num_gpus=sum(pool.size * pool.engine.tensor_parallel * pool.num_gpus for pool in config.pools),
    )


def _kv_bytes(pool: PoolConfig, model: ModelConfig | None) -> int:
    engine = pool.engine
    if engine.num_blocks and model is not None:
        token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * _DTYPE_BYTES[engine.dtype]
        return pool.size * engine.num_blocks * engine.block_size * token_bytes
    return math.ceil(pool.size * engine.tensor_parallel * engine.kv_cache_gib * (1 << 30))


# --- a running cluster ----------------------------------------------------------------------------------------------


def _check_running(
    diagnosis: Diagnosis, address: str, token: str | None, timeout_s: float, tls: ClientTls | None
) -> None:
    diagnosis.add("ports", iter(()))
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with (
        grpc.insecure_channel(address)
        if tls is None
        else grpc.secure_channel(address, tls.channel_credentials(), options=tls.options)
    ) as channel:
        stub: Any = cluster_pb2_grpc.ClusterStub(channel)
        try:
            status: cluster.ClusterStatus = stub.GetStatus(
                cluster.GetStatusRequest(), timeout=_ANSWER_S, metadata=metadata
            )
            diagnosis.add("credentials", iter(()))
            diagnosis.add("health", _health(channel, address))
            _check_router(diagnosis, stub, metadata, address)
            diagnosis.add("ports", _http_port(status, address))
            found = stub.Examine(
                cluster.ExamineClusterRequest(timeout_s=timeout_s), timeout=timeout_s + _ANSWER_S, metadata=metadata
            )
        except grpc.RpcError as error:
            diagnosis.add("router", iter([_refused(error, address, token)]))
            return
    findings = list(cluster_checks.check(found))
    for name in cluster_checks.NAMES:
        diagnosis.add(name, (finding for finding in findings if finding.check == name))


def _check_router(diagnosis: Diagnosis, stub: Any, metadata: tuple[tuple[str, str], ...], address: str) -> None:
    """Its clock and its version, as seen from here."""
    best_s, ahead_s, version = math.inf, 0.0, ""
    for _ in range(_QUESTIONS):
        asked_s, asked_unix_s = time.monotonic(), time.time()
        request = cluster.ExamineClusterRequest(router_only=True)
        answer = stub.Examine(request, timeout=_ANSWER_S, metadata=metadata)
        round_trip_s = time.monotonic() - asked_s
        if round_trip_s < best_s:
            best_s, ahead_s = round_trip_s, answer.machine.unix_s - (asked_unix_s + round_trip_s / 2)
            version = answer.version
    subject = f"the router at {address}"
    diagnosis.add("version", cluster_checks.version(subject, version, __version__, "this command"))
    diagnosis.add("clock", cluster_checks.clock(subject, ahead_s, best_s, "this machine"))


def _health(channel: grpc.Channel, address: str) -> Iterator[Finding]:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        remedy = (
            "wait: it serves when a request of its own has gone through. If that never comes, see the other findings"
        )
        yield Finding("health", address, "the router does not serve: it is starting, or draining", remedy)


def _http_port(status: cluster.ClusterStatus, address: str) -> Iterator[Finding]:
    if not status.router.http_address:
        return
    host, port = split_address(status.router.http_address)
    if host in ("0.0.0.0", "::", "127.0.0.1", "::1"):
        host = split_address(address)[0]
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if silence := reach(shown):
        yield Finding("ports", shown, f"the router's HTTP port: {silence}", "open it for clients in the firewall")


def _refused(error: grpc.RpcError, address: str, token: str | None) -> Finding:
    """What a router that does not answer as it should is telling."""
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        problem = "does not take the token that was given" if token else "wants a bearer token, and none was given"
        remedy = "pass --token with a key of the router's api_keys_file"
        return Finding("credentials", address, f"{problem} ({details})", remedy)
    if code is grpc.StatusCode.UNAVAILABLE and speaks_tls(address):
        return Finding(
            "credentials", address, "speaks TLS, and was asked in plain text", "connect with its certificate"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        problem, remedy = f"is no router of this version ({details})", "look what listens there, and its version"
        return Finding("version", address, problem, remedy)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        problem = "takes connections and does not answer: the link is half-open, or the router hangs"
        return Finding("ports", address, problem, "look at firewalls in both directions, then at the router's log")
    return Finding("ports", address, f"does not answer as a router: {code.name}: {details}", "look what listens there")
