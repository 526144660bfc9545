"""The repository's cluster.yaml on the hosts of a bed: brought up, asked and taken down as a person does it.

Owns: what is changed in cluster.yaml (addresses, the model, sizes), the launcher's commands, and what clients have to
show. Refuses to know: what a test asks of the cluster, and how a host comes to be (`hosts.bed`).
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hosts.bed import Bed

from baton.client.client import AsyncClient, Client
from baton.client.errors import BatonError
from baton.client.resume import Patience
from baton.engine.checkpoint import cache_directory
from baton.proto import cluster_pb2 as cluster
from baton.proto.credentials import ClientTls

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "ctl"
CLIENT = "client"
HEAD = "h0"
PORT = 50051
UP_S, DOWN_S, READY_S = 600.0, 300.0, 600.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Which hosts there are for which pool, how many of them are used at once, and what differs from cluster.yaml.

    `sections`: of metadata.baton, as {"engine": {"dtype": "float32"}}.
    """

    prefill: Sequence[str]
    decode: Sequence[str]
    num_prefill: int
    num_decode: int
    model: Path
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    idle_timeout_minutes: float = 60

    def hosts(self) -> list[str]:
        return [HEAD, *self.prefill, *self.decode]


@contextmanager
def bed_of(shape: Shape) -> Iterator[Bed]:
    """The hosts of a shape, one that launches and one that asks; the caller speaks from the network of the latter."""
    # Models and kernels that this machine has made already need not be made again on every host.
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    variables = {"PYTHONPATH": str(ROOT / "src"), "BATON_CACHE": str(cache)}
    with (
        Bed([LAUNCHER, CLIENT, *shape.hosts()], shared=[shape.model, ROOT, cache], variables=variables) as bed,
        bed.network_of(CLIENT),
    ):
        yield bed


class RayHosts:
    """A cluster made by `ray up` on a bed with hosts `ctl`, `client` and those of the shape."""

    def __init__(self, bed: Bed, shape: Shape) -> None:
        self.bed = bed
        self.shape = shape
        self.target = f"{bed.address(HEAD)}:{PORT}"
        self._file = bed.home(LAUNCHER) / "cluster.yaml"
        self._token = secrets.token_hex(16)
        self._certificates = bed.home(LAUNCHER) / "certificates"

    # --- what clients of the cluster have to show: all of it stands here ---------------------------------------------

    def _secure(self, settings: dict[str, Any]) -> None:
        """Makes certificates and a key, and writes into the launcher's file how they come to the hosts."""
        local, there = self._certificates, "~/.baton/certificates"
        self.bed.run(LAUNCHER, "baton", "certs", str(local), "--host", self.bed.address(HEAD))
        self.token_file.write_text(self._token + "\n")
        for name in ("router.pem", "router-key.pem", "api-keys", "cluster"):
            settings["file_mounts"][f"{there}/{name}"] = str(local / name)
        ours = settings["metadata"]["baton"]
        ours["router"]["api_keys_file"] = f"{there}/api-keys"
        files = {"ca_file": "ca.pem", "cert_file": "node.pem", "key_file": "node-key.pem"}
        ours["security"] = {
            "require_auth": True,
            "tls": {"cert_file": f"{there}/router.pem", "key_file": f"{there}/router-key.pem"},
            "cluster_tls": {key: f"{there}/cluster/{name}" for key, name in files.items()},
        }

    @property
    def token_file(self) -> Path:
        return self._certificates / "api-keys"

    @property
    def tls(self) -> ClientTls:
        return ClientTls(ca_file=str(self._certificates / "ca.pem"))

    def client(self) -> AsyncClient:
        return AsyncClient(self.target, token=self._token, tls=self.tls, patience=Patience(give_up_s=300.0))

    def operator(self, timeout_s: float | None = 10.0) -> Client:
        return Client(self.target, token=self._token, tls=self.tls, timeout_s=timeout_s)

    def options(self) -> list[str]:
        """Those of the command line."""
        return ["--address", self.target, "--token-file", str(self.token_file), "--tls-ca", self.tls.ca_file]

    # --- the launcher's commands ------------------------------------------------------------------------------------

    def up(self) -> None:
        """`ray up`, then waits until every worker is ready. Leaves nothing running if it fails."""
        self._file.write_text(yaml.safe_dump(self._settings(), sort_keys=False))
        self.bed.run(LAUNCHER, "ray", "get-auth-token", "--generate")
        self.ray("up", "--yes", timeout_s=UP_S)
        self.await_ready(READY_S)

    def restart_head(self) -> None:
        """What an operator does when the head's machine is back."""
        self.ray("up", "--yes", "--restart-only", timeout_s=UP_S)

    def down(self) -> None:
        self.ray("down", "--yes", timeout_s=DOWN_S)

    def ray(self, command: str, *options: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return self.bed.run(LAUNCHER, "ray", command, *options, str(self._file), timeout_s=timeout_s)

    def _settings(self) -> dict[str, Any]:
        """cluster.yaml with what a person would write into it for these hosts."""
        settings: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
        shape, bed = self.shape, self.bed
        settings["provider"]["head_ip"] = bed.address(HEAD)
        settings["auth"]["ssh_private_key"] = str(bed.key)
        settings["idle_timeout_minutes"] = shape.idle_timeout_minutes
        settings["max_workers"] = len(shape.prefill) + len(shape.decode)
        ours = settings["metadata"]["baton"]
        ours["model"] = str(shape.model)
        for pool, hosts, size in (
            ("prefill", shape.prefill, shape.num_prefill),
            ("decode", shape.decode, shape.num_decode),
        ):
            settings["provider"]["hosts"][pool] = [bed.address(name) for name in hosts]
            settings["available_node_types"][pool] |= {"min_workers": size, "max_workers": len(hosts)}
            ours["pools"][pool]["size"] = size
        ours["router"] |= {"host": "0.0.0.0", "port": PORT}
        self._secure(settings)
        for name, section in shape.sections.items():
            ours[name] = ours.get(name, {}) | section
        return settings

    def keep_logs(self, directory: Path) -> None:
        """Copies what Baton and Ray have logged on each host; for a person, when something went wrong."""
        for name in self.bed.names:
            kept, home = directory / name, self.bed.home(name)
            kept.mkdir(parents=True, exist_ok=True)
            for log in home.glob("*.log"):
                shutil.copy(log, kept)
            for logs in home.with_name("tmp").glob("ray/session_2*/logs"):
                shutil.copytree(logs, kept / logs.parent.name, dirs_exist_ok=True, ignore_dangling_symlinks=True)

    def raylet(self, host: str) -> int | None:
        """The process by which a host is a node of Ray's; its id on the machine."""
        processes = self.bed.processes(host)
        return next((pid for pid, line in processes.items() if line.split()[0].endswith("/raylet")), None)

    def joined_at(self, host: str) -> float:
        """When a host that lives became a node of Ray's, in seconds since 1970."""
        words = "env RAY_AUTH_MODE=token ray list nodes --detail --format json --filter state=ALIVE"
        listed = self.bed.run(HEAD, *words.split())
        (node,) = (node for node in json.loads(listed.stdout) if node["node_ip"] == self.bed.address(host))
        return datetime.fromisoformat(node["start_time_ms"]).timestamp()  # in the time of this place

    # --- what it does -----------------------------------------------------------------------------------------------

    def status(self) -> cluster.ClusterStatus:
        """Asked by this process; raises BatonError if no router answers."""
        with self.operator() as operator:
            return operator.status()

    def status_from(self, host: str) -> dict[str, Any]:
        """Asked by the command line, on a host."""
        found: dict[str, Any] = json.loads(self.bed.run(host, "baton", "status", "--json", *self.options()).stdout)
        return found

    def await_ready(self, timeout_s: float) -> cluster.ClusterStatus:
        """Waits until every pool has its size in workers that are ready; fails with what it last saw."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status = self.status()
                seen = str([f"{worker.worker_id} {worker.state}" for worker in workers(status)])
                if is_whole(status, self.shape):
                    return status
            except BatonError as error:
                seen = str(error)
            assert time.monotonic() < deadline, f"not ready within {timeout_s:.0f} s: {seen}; {self._last_words()}"
            time.sleep(0.2)

    def _last_words(self) -> str:
        log = self.bed.home(HEAD) / "baton.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else "the head has started nothing"


def workers(status: cluster.ClusterStatus) -> list[cluster.WorkerStatus]:
    return [worker for pool in status.pools for worker in pool.workers]


def is_whole(status: cluster.ClusterStatus, shape: Shape) -> bool:
    """Whether every worker that there should be is ready."""
    found = workers(status)
    return len(found) == shape.num_prefill + shape.num_decode and all(worker.state == "ready" for worker in found)


def at_rest(status: cluster.ClusterStatus) -> bool:
    """Whether no worker holds a block, or anything else, for anybody."""
    return not any(
        worker.in_flight
        or worker.load.running
        or worker.load.waiting
        or worker.load.receiving
        or worker.load.exported
        or worker.load.held_blocks
        or worker.load.lent_blocks
        or worker.load.quarantined_blocks
        for worker in workers(status)
    )
