"""What can be wrong with the manifests for KubeRay, found without a Kubernetes.

Owns: the schema of the fields that they use, and the rules by which the manifests go together; `problems` has them all.
Refuses to know: which files there are.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from deploy.pools import ROUTER, Machines, StrictLoader, image_is_pinned, open_without_keys, pools_fit
from jsonschema import Draft202012Validator

from baton.router.config import ClusterConfig, ConfigError, from_mapping

SCHEMA = yaml.safe_load((Path(__file__).parent / "kuberay-schema.yaml").read_text(encoding="utf-8"))
LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"
SCALE = {"m": 0.001}

Object = dict[str, Any]


class Manifests:
    """The objects of a deployment, by their kinds; there is one of each."""

    def __init__(self, objects: Sequence[Object]) -> None:
        self._objects = objects

    def of(self, kind: str) -> Object:
        found = [each for each in self._objects if each["kind"] == kind]
        assert len(found) == 1, f"there are {len(found)} objects of kind {kind}"
        return found[0]

    @property
    def cluster(self) -> Object:
        spec: Object = self.of("RayCluster")["spec"]
        return spec

    @cached_property
    def groups(self) -> list[Object]:
        """The head's and the workers', each with its name."""
        return [{"groupName": "head", **self.cluster["headGroupSpec"]}, *self.cluster["workerGroupSpecs"]]

    @cached_property
    def config(self) -> ClusterConfig:
        """What `baton serve` in the head pod reads."""
        return from_mapping(yaml.safe_load(self.of("ConfigMap")["data"]["cluster.yaml"]), "cluster.yaml")


def problems(text: str) -> list[str]:
    """All complaints about the manifests, of the first kind that has any, as the later ones build on it."""
    try:
        objects = list(yaml.load_all(text, StrictLoader))
    except yaml.YAMLError as error:
        return [str(error)]
    found = [
        f"{each.get('kind')}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
        for each in objects
        for error in Draft202012Validator(SCHEMA).iter_errors(each)
    ]
    if found:
        return found
    manifests = Manifests(objects)
    try:
        config = manifests.config
    except ConfigError as error:
        return [str(error)]
    return [
        *_counts_fit(manifests),
        *pools_fit(config, [_machines(group) for group in manifests.groups[1:]]),
        *_one_image_and_ray(manifests),
        *_ports_lead_to_the_router(manifests),
        *_names_lead_somewhere(manifests),
        *_there_is_time_to_drain(manifests),
        *open_without_keys(config),
    ]


def container(group: Object) -> Object:
    """The one that runs Ray: KubeRay takes the first."""
    first: Object = group["template"]["spec"]["containers"][0]
    return first


def resources(group: Object) -> dict[str, float]:
    """What a group offers by `resources`, as the shell in the pod hands it to `ray start`."""
    text = group["rayStartParams"].get("resources", '"{}"')
    (word,) = shlex.split(text)
    offered: dict[str, float] = json.loads(word)
    return offered


def _machines(group: Object) -> Machines:
    limits = container(group)["resources"]["limits"]
    offered = {"CPU": _number(limits["cpu"]), "GPU": _number(limits.get("nvidia.com/gpu", "0")), **resources(group)}
    return Machines(group["groupName"], offered, group["maxReplicas"])


def _number(quantity: str) -> float:
    digits = quantity.rstrip("m")
    return float(digits) * SCALE.get(quantity[len(digits) :], 1.0)


def _counts_fit(manifests: Manifests) -> Iterator[str]:
    for group in manifests.groups[1:]:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            counts = [group[name] for name in ("minReplicas", "replicas", "maxReplicas")]
            yield f"{group['groupName']}: minReplicas, replicas, maxReplicas are {counts}"
    if resources(manifests.groups[0]).get(ROUTER) != 1 or manifests.groups[0]["rayStartParams"].get("num-cpus") != "0":
        yield "the head must offer `router: 1` and no CPU"
    if manifests.cluster.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode is not token: whoever reaches port 6379 runs code"


def _one_image_and_ray(manifests: Manifests) -> Iterator[str]:
    images = {container(group)["image"] for group in manifests.groups}
    if len(images) != 1:
        yield f"the pods have different images: {sorted(images)}"
    for image in images:
        if not image_is_pinned(image):
            yield f"the image {image} is not pinned"
    (locked,) = re.findall(r"^ray==(.*)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if manifests.cluster["rayVersion"] != locked:
        yield f"rayVersion is {manifests.cluster['rayVersion']}, requirements.lock has {locked}"


def _ports_lead_to_the_router(manifests: Manifests) -> Iterator[str]:
    router = manifests.config.router
    open_ports = {port["name"]: port["containerPort"] for port in container(manifests.groups[0])["ports"]}
    service = manifests.of("Service")
    for name, port in (("grpc", router.port), ("http", router.http_port)):
        if open_ports.get(name) != port:
            yield f"the head's port {name} is {open_ports.get(name)}, the router listens on {port}"
        served = [each for each in service["spec"]["ports"] if each["targetPort"] == name]
        if [each["port"] for each in served] != [port]:
            yield f"the service has no port {port} that leads to {name}"
    for group in manifests.groups:
        named = {port["name"] for port in container(group)["ports"]}
        for endpoint in manifests.of("PodMonitor")["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] not in named:
                yield f"the PodMonitor scrapes port {endpoint['port']}, which a pod of {group['groupName']} has not"
    for discovery in manifests.of("ScrapeConfig")["spec"]["httpSDConfigs"]:
        url = urlsplit(discovery["url"])
        if (url.hostname, url.port) != (service["metadata"]["name"], router.http_port):
            yield f"the ScrapeConfig asks {url.netloc}, which is not the service's HTTP port"
        if url.path != "/metrics/targets":
            yield f"the ScrapeConfig asks for {url.path}"
        if router.api_keys_file and "authorization" not in discovery:
            yield "the ScrapeConfig shows no key, and the router asks for one"


def _names_lead_somewhere(manifests: Manifests) -> Iterator[str]:
    name = manifests.of("RayCluster")["metadata"]["name"]
    selectors = {
        "Service": manifests.of("Service")["spec"]["selector"],
        "RayJob": manifests.of("RayJob")["spec"]["clusterSelector"],
        "PodMonitor": manifests.of("PodMonitor")["spec"]["selector"]["matchLabels"],
    }
    for kind, selector in selectors.items():
        if selector.get("ray.io/cluster") != name:
            yield f"{kind} selects the cluster {selector.get('ray.io/cluster')!r}, it is called {name!r}"
    if selectors["Service"].get("ray.io/node-type") != "head":
        yield "the Service must select the head, where the router is"
    for group in manifests.groups:
        volumes = {volume["name"] for volume in group["template"]["spec"].get("volumes", [])}
        mounted = {mount["name"] for mount in container(group).get("volumeMounts", [])}
        if mounted != volumes:
            yield f"{group['groupName']} mounts {sorted(mounted)} of the volumes {sorted(volumes)}"
    head, settings = manifests.groups[0], manifests.config
    config_map = manifests.of("ConfigMap")
    mounts = {mount["name"]: mount["mountPath"] for mount in container(head)["volumeMounts"]}
    source = {volume["name"]: volume for volume in head["template"]["spec"]["volumes"]}
    config_paths = {
        f"{path}/{file}"
        for volume, path in mounts.items()
        if source.get(volume, {}).get("configMap", {}).get("name") == config_map["metadata"]["name"]
        for file in config_map["data"]
    }
    entrypoint = manifests.of("RayJob")["spec"]["entrypoint"].split()
    if entrypoint[:2] != ["baton", "serve"] or entrypoint[-1] not in config_paths:
        yield f"the RayJob runs {' '.join(entrypoint)}, the configuration is at {sorted(config_paths)}"
    for key, file, groups in (
        ("router.api_keys_file", settings.router.api_keys_file, [head]),
        ("observability.log_dir", settings.observability.log_dir, manifests.groups),
    ):
        for group in groups:
            paths = [mount["mountPath"] for mount in container(group).get("volumeMounts", [])]
            if file and not any(Path(file).is_relative_to(path) for path in paths):
                yield f"{key} is {file}, where a pod of {group['groupName']} has no volume"


def _there_is_time_to_drain(manifests: Manifests) -> Iterator[str]:
    drain_s = manifests.config.router.drain_timeout_s
    head = container(manifests.groups[0])
    environment = {each["name"]: each.get("value", "") for each in head["env"]}
    stop_s = float(environment.get("RAY_JOB_STOP_WAIT_TIME_S", "3"))
    if stop_s <= drain_s:
        yield f"Ray kills a stopped job after {stop_s:g} s, the router may drain for {drain_s:g} s"
    for group in manifests.groups:
        grace_s = group["template"]["spec"].get("terminationGracePeriodSeconds", 30)
        if grace_s <= stop_s:
            yield f"a pod of {group['groupName']} is killed after {grace_s} s, draining may take {stop_s:g} s"
