"""The manifests are ones that KubeRay takes, as far as they use it, and go together; and a mistake in one is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from deploy.kuberay import SCHEMA, Manifests, container, problems, resources

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kuberay"
FILES = sorted(FOLDER.glob("*.yaml"))
TEXT = "\n---\n".join(file.read_text(encoding="utf-8") for file in FILES)


def test_nothing_is_wrong_with_the_manifests() -> None:
    assert problems(TEXT) == []


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_each_role_has_a_group_of_its_own() -> None:
    manifests = Manifests(list(yaml.safe_load_all(TEXT)))
    offered = {group["groupName"]: resources(group) for group in manifests.groups}
    assert offered == {"head": {"router": 1}, "prefill": {"prefill": 8}, "decode": {"decode": 8}}


def test_a_group_begins_with_as_many_pods_as_its_pool_needs() -> None:
    manifests = Manifests(list(yaml.safe_load_all(TEXT)))
    groups = {group["groupName"]: group for group in manifests.groups}
    for pool in manifests.config.pools:
        assert resources(groups[pool.name])[pool.name] * groups[pool.name]["replicas"] == pool.size


def test_a_pod_knows_no_secret_but_by_name() -> None:
    for group in Manifests(list(yaml.safe_load_all(TEXT))).groups:
        for variable in container(group)["env"]:
            assert not any(word in variable["name"].lower() for word in ("token", "key", "secret", "password"))


PLANTED = [
    ("a key twice", "mode: token", "mode: token\n    mode: disabled", "'mode' is there twice"),
    ("a key", "workerGroupSpecs:", "workerGroupSpec:", "workerGroupSpec"),
    ("a key of a pod", "terminationGracePeriodSeconds: 90", "terminationGracePeriod: 90", "terminationGracePeriod"),
    ("a key of a probe", "failureThreshold: 60", "failureTreshold: 60", "failureTreshold"),
    ("a kind", "kind: RayJob", "kind: RayService", "RayService"),
    (
        "another version of the API",
        "apiVersion: ray.io/v1\nkind: RayC",
        "apiVersion: ray.io/v1alpha1\nkind: RayC",
        "'ray.io/v1' was expected",
    ),
    (
        "a number in the environment",
        'RAY_worker_niceness, value: "0"',
        "RAY_worker_niceness, value: 0",
        "0 is not of type",
    ),
    ("a number for ray start", 'num-cpus: "0"', "num-cpus: 0", "0 is not of type"),
    ("resources without quotes", """'"{\\"prefill\\": 8}"'""", """'{"prefill": 8}'""", "resources"),
    ("a name that is too long", "name: gcs-server", "name: global-control-store", "global-control-store"),
    ("a root user", "runAsUser: 1000", "runAsUser: 0", "runAsUser"),
    ("no probe", "            readinessProbe: &head_probe", "            x: &head_probe", "readinessProbe"),
    ("min over max", "minReplicas: 1", "minReplicas: 5", "minReplicas, replicas, maxReplicas are [5, 1, 4]"),
    ("a key of Baton's", "kv_cache_gib: 48", "kv_cache_gb: 48", "metadata.baton.engine.kv_cache_gb"),
    ("a role's resource", "GPU: 1, decode: 1}", "GPU: 1, decoder: 1}", "'decoder', which no machine offers"),
    ("a group's resource", '{\\"decode\\": 8}', '{\\"decoding\\": 8}', "'decoding', which no pool asks for"),
    (
        "too many workers",
        "role: decode\n            size: 8",
        "role: decode\n            size: 33",
        "at most 32 workers",
    ),
    ("no GPUs", 'limits: {cpu: "96", memory: 512Gi, nvidia.com/gpu: "8"}', 'limits: {cpu: "96", memory: 512Gi}', "GPU"),
    ("work on the head", 'num-cpus: "0"', 'num-cpus: "8"', "no CPU"),
    ("no token", "mode: token", "mode: disabled", "authOptions.mode"),
    ("any image", "baton:0.1.0-cuda ", "baton:latest ", "not pinned"),
    ("two images", "image: *image", "image: baton:0.1.0-cpu", "different images"),
    ("another Ray", 'rayVersion: "2.60.0"', 'rayVersion: "2.9.0"', "requirements.lock has"),
    ("the router's port", "http_port: 8000", "http_port: 8001", "the head's port http is 8000"),
    ("the service's port", "port: 50051, targetPort: grpc", "port: 50052, targetPort: grpc", "no port 50051"),
    ("a metrics port", "{port: metrics, path", "{port: metric, path", "scrapes port metric"),
    ("the service's name", "http://baton:8000", "http://baton-head:8000", "not the service's HTTP port"),
    (
        "discovery without a key",
        "      authorization:\n        credentials: {name: baton-prometheus, key: api-key}\n",
        "",
        "shows no key",
    ),
    (
        "the cluster's name",
        "clusterSelector: {ray.io/cluster: baton}",
        "clusterSelector: {ray.io/cluster: bato}",
        "'bato'",
    ),
    ("all pods behind the service", ", ray.io/node-type: head}", "}", "must select the head"),
    ("a volume", "- {name: config, configMap", "- {name: configuration, configMap", "mounts"),
    ("another file", "serve /etc/baton/cluster.yaml", "serve /etc/baton/config.yaml", "the configuration is at"),
    ("keys in no volume", "/etc/baton-keys/api-keys", "/etc/keys/api-keys", "router.api_keys_file"),
    ("logs in no volume", "log_dir: /var/log/baton", "log_dir: /var/log", "observability.log_dir"),
    ("no time to drain", "drain_timeout_s: 45.0", "drain_timeout_s: 75.0", "may drain for 75 s"),
    ("a short grace", "terminationGracePeriodSeconds: 90", "terminationGracePeriodSeconds: 30", "killed after 30 s"),
    ("no keys", "          api_keys_file: /etc/baton-keys/api-keys\n", "", "asks for no key"),
]


@pytest.mark.parametrize(("right", "wrong", "told"), [plant[1:] for plant in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_mistake_is_found(right: str, wrong: str, told: str) -> None:
    assert right in TEXT
    found = problems(TEXT.replace(right, wrong))
    assert any(told in problem for problem in found), found
