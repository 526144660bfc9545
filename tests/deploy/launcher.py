"""What can be wrong with a cluster-launcher file, found without a cloud: by Ray's own validator, then what it misses.

Owns: the rules. Each is a function that yields complaints; `problems` has them all.
Refuses to know: which files there are.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from click import ClickException
from deploy.pools import Machines, StrictLoader, image_is_pinned, open_without_keys, pools_fit, unpinned
from ray.autoscaler._private.util import prepare_config, validate_config

from baton.router.config import ClusterConfig, ConfigError, from_mapping

ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = "~/ray_bootstrap_config.yaml"
LOCKS = ("requirements.lock", "requirements-nodeps.lock")
MADE_LATER = ("dist",)
HEALTH = tuple(
    f"RAY_health_check_{name}" for name in ("initial_delay_ms", "period_ms", "timeout_ms", "failure_threshold")
)
SHARED_PORTS = (
    "--node-manager-port",
    "--object-manager-port",
    "--min-worker-port",
    "--max-worker-port",
    "--metrics-export-port",
)

# The keys of a node_config that are used here, or that comments speak of; the machine's type first.
NODE_KEYS = {
    "aws": ("InstanceType", "ImageId", "BlockDeviceMappings", "Placement", "NetworkInterfaces", "IamInstanceProfile"),
    "gcp": ("machineType", "disks", "networkInterfaces", "scheduling", "guestAccelerators", "serviceAccounts"),
}
MACHINES = {"m7i.2xlarge": (8, 0), "p5.48xlarge": (192, 8), "n2-standard-8": (8, 0), "a3-highgpu-8g": (208, 8)}
"""Virtual CPUs and GPUs."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """One shell command: the variables set in front of it, its words, and their options."""

    environment: dict[str, str]
    words: list[str]

    @classmethod
    def of(cls, text: str) -> Command:
        words, environment = shlex.split(text), {}
        while words and re.fullmatch(r"\w+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        return cls(environment, words)

    def option(self, name: str) -> str:
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")), "")


def problems(text: str) -> list[str]:
    """All complaints about a file's text; the first kind that has any, as the later ones build on it."""
    try:
        data = yaml.load(text, StrictLoader)
    except yaml.YAMLError as error:
        return [str(error)]
    found = list(_ray_takes_it(data))
    if found:
        return found
    try:
        config = from_mapping(data)
    except ConfigError as error:
        return [str(error)]
    return [
        *_commands_fit_together(data, config),
        *_ports_are_apart(data, config),
        *pools_fit(config, machines(data)),
        *_head_has_the_router(data),
        *_machine_types_are_known(data),
        *_installs_are_pinned(data),
        *_mounts_exist(data, config),
        *open_without_keys(config),
    ]


def machines(data: Config) -> list[Machines]:
    """The machines of workers. Those of `local` are all alike, and what they offer stands in their start command."""
    if data["provider"]["type"] == "local":
        start = _start(data, "worker_start_ray_commands")
        offered = {"CPU": float(start.option("--num-cpus") or 0), "GPU": float(start.option("--num-gpus") or 0)}
        return [Machines("worker_ips", offered, len(data["provider"]["worker_ips"]))]
    head, every = data["head_node_type"], data["available_node_types"]
    return [
        Machines(name, kind["resources"], min(kind["max_workers"], data["max_workers"]))
        for name, kind in every.items()
        if name != head
    ]


def _ray_takes_it(data: Config) -> Iterator[str]:
    """As `ray up` begins: the provider's defaults are filled in, then the whole is checked."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            validate_config(prepare_config(copy.deepcopy(data)))
    except SystemExit:
        yield f"Ray: {said.getvalue().strip()}"
    except jsonschema.ValidationError as error:
        yield f"Ray: {error.message}"
    # What Ray raises for a file that it cannot take, NotImplementedError for a provider that it does not know.
    except (ClickException, ValueError, KeyError, TypeError, NotImplementedError) as error:
        yield f"Ray: {error}"


def _start(data: Config, key: str) -> Command:
    """The `ray start` among the commands."""
    found = [Command.of(text) for text in data[key] if "ray start" in text]
    assert len(found) == 1, f"{key} has {len(found)} times `ray start`"
    return found[0]


def _commands_fit_together(data: Config, config: ClusterConfig) -> Iterator[str]:
    head = _start(data, "head_start_ray_commands")
    worker = _start(data, "worker_start_ray_commands")
    if head.option("--autoscaling-config") != BOOTSTRAP:
        yield f"the head's `ray start` has no --autoscaling-config={BOOTSTRAP}: no worker would ever be started"
    if worker.option("--address") != f"$RAY_HEAD_IP:{head.option('--port')}":
        yield f"workers join {worker.option('--address')!r}, the head listens on {head.option('--port')!r}"
    for name in SHARED_PORTS:
        if not head.option(name) or head.option(name) != worker.option(name):
            yield f"{name} is {head.option(name)!r} on the head and {worker.option(name)!r} on workers"
    for name in HEALTH:
        if name not in head.environment:
            yield f"the head's `ray start` does not set {name}"
    serve = Command.of(data["head_start_ray_commands"][-1])
    if "baton serve" not in " ".join(serve.words) or BOOTSTRAP not in serve.words:
        yield f"the head's last command does not serve what is in {BOOTSTRAP}"
    if serve.environment.get("RAY_ADDRESS") != "auto":
        yield "`baton serve` would start a Ray of its own: RAY_ADDRESS=auto is missing"
    for who, command in (("the head", head), ("a worker", worker), ("`baton serve`", serve)):
        if command.environment.get("RAY_AUTH_MODE") != "token":
            yield f"{who} does not set RAY_AUTH_MODE=token"
    for who, command in (("the head", head), ("a worker", worker)):
        if command.environment.get("RAY_worker_niceness") != "0":
            yield f"{who} does not set RAY_worker_niceness=0"
    if data["provider"]["type"] == "local" and head.environment.get("RAY_enable_autoscaler_v2") != "0":
        yield "with `local`, the last worker never comes up unless the head sets RAY_enable_autoscaler_v2=0"


def _ports_are_apart(data: Config, config: ClusterConfig) -> Iterator[str]:
    head = _start(data, "head_start_ray_commands")
    ports = {
        "--port": head.option("--port"),
        **{name: head.option(name) for name in SHARED_PORTS if "worker-port" not in name},
        "router.port": str(config.router.port),
        "router.http_port": str(config.router.http_port),
    }
    low, high = int(head.option("--min-worker-port") or 0), int(head.option("--max-worker-port") or 0)
    seen: dict[str, str] = {}
    for name, port in ports.items():
        if port in seen:
            yield f"{name} and {seen[port]} are both {port}"
        seen[port] = name
        if port and low <= int(port) <= high:
            yield f"{name} is {port}, among the ports of Ray's workers, {low} to {high}"
    for rule in data["provider"].get("security_group", {}).get("IpPermissions", []):
        if rule["FromPort"] not in (config.router.port, config.router.http_port):
            yield f"port {rule['FromPort']} is opened to clients, and the router does not listen there"


def _head_has_the_router(data: Config) -> Iterator[str]:
    if data["provider"]["type"] == "local":
        if '"router"' not in _start(data, "head_start_ray_commands").option("--resources"):
            yield "the head offers no `router`"
        if data["min_workers"] != len(data["provider"]["worker_ips"]):
            yield f"min_workers is {data['min_workers']} with {len(data['provider']['worker_ips'])} worker_ips"
        return
    offered = data["available_node_types"][data["head_node_type"]]["resources"]
    if offered.get("router") != 1 or offered.get("CPU") != 0:
        yield f"the head offers {offered}, must offer `router: 1` and `CPU: 0`"
    for name, kind in data["available_node_types"].items():
        if name != data["head_node_type"] and kind["min_workers"] > kind["max_workers"]:
            yield f"{name} has min_workers {kind['min_workers']} and max_workers {kind['max_workers']}"


def _machine_types_are_known(data: Config) -> Iterator[str]:
    """Ray hands a `node_config` on as it is, and the cloud is the first to complain of a key."""
    provider = data["provider"]["type"]
    if provider not in NODE_KEYS:
        return
    type_key = NODE_KEYS[provider][0]
    for name, kind in data.get("available_node_types", {}).items():
        for key in set(kind["node_config"]) - set(NODE_KEYS[provider]):
            yield f"{name}.node_config has {key!r}, which is none of {', '.join(NODE_KEYS[provider])}"
        machine = kind["node_config"].get(type_key)
        if machine not in MACHINES:
            yield f"{name}.node_config.{type_key} is {machine!r}: what it has is not known here"
        elif name != data["head_node_type"]:
            offered = (kind["resources"].get("CPU"), kind["resources"].get("GPU", 0))
            if offered != MACHINES[machine]:
                yield f"{name} offers {offered} CPU and GPU, a {machine} has {MACHINES[machine]}"


def _installs_are_pinned(data: Config) -> Iterator[str]:
    kinds = ("setup_commands", "head_setup_commands", "worker_setup_commands")
    for text in [text for kind in kinds for text in data[kind]]:
        if "pip install" in text and (wrong := unpinned(text, LOCKS)):
            yield f"a set-up command {wrong}"
        for url in re.findall(r"https://\S+install\.sh", text):
            if not re.search(r"/\d+\.\d+\.\d+/", url):
                yield f"a set-up command runs {url}, which is not of one version"
    images = [value for key, value in (data.get("docker") or {}).items() if key.endswith("image")]
    for image in images:
        if not image_is_pinned(image):
            yield f"the image {image} is not pinned"


def _mounts_exist(data: Config, config: ClusterConfig) -> Iterator[str]:
    mounts: dict[str, str] = data["file_mounts"]
    user = data["auth"]["ssh_user"]
    home = "/root" if user == "root" else f"/home/{user}"
    if "~/.ray/auth_token" not in mounts:
        yield "no file mount brings ~/.ray/auth_token"
    remote = {name.replace("~", home, 1) for name in mounts}
    if config.router.api_keys_file and config.router.api_keys_file not in remote:
        yield f"no file mount brings router.api_keys_file, {config.router.api_keys_file}"
    for local in mounts.values():
        if not local.startswith(("~", "/", *MADE_LATER)) and not (ROOT / local).exists():
            yield f"the file mount {local} does not exist"
    used = set(re.findall(r"~/baton/[\w.-]+\.lock", " ".join(data["setup_commands"] + data["head_setup_commands"])))
    for name in used - set(mounts):
        yield f"no file mount brings {name}"
