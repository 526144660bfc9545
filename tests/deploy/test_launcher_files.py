"""Every launcher file is one that Ray takes and Baton reads, whose two halves fit; and a mistake in one is found."""

from __future__ import annotations

import pytest
import yaml
from deploy.launcher import ROOT, machines, problems
from deploy.pools import need, room

from baton.proto.messages import Role
from baton.router.config import load

FILES = sorted((ROOT / "deploy").glob("*.yaml"))
AWS = (ROOT / "deploy" / "aws.yaml").read_text(encoding="utf-8")
LOCAL = (ROOT / "deploy" / "local-cpu.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_is_wrong_with_the_file(file) -> None:
    assert problems(file.read_text(encoding="utf-8")) == []


def test_there_is_one_for_each_kind_of_place() -> None:
    assert [file.name for file in FILES] == ["aws.yaml", "gcp.yaml", "local-cpu.yaml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_both_roles_are_served_from_the_machines_that_are_there_at_the_start(file) -> None:
    """min_workers machines hold the pools as they are configured, so the first start waits for no scaling."""
    config, data = load(file), yaml.safe_load(file.read_text(encoding="utf-8"))
    assert config.size(Role.PREFILL) >= 1
    assert config.size(Role.DECODE) >= 1
    kinds = {kind.name: kind for kind in machines(data)}
    for pool in config.pools:
        if pool.resource:
            kind = kinds[pool.resource]
            assert room(kind, need(pool)) * data["available_node_types"][kind.name]["min_workers"] >= pool.size


def test_aws_and_google_differ_in_machines_only() -> None:
    aws, gcp = (
        yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8")) for name in ("aws.yaml", "gcp.yaml")
    )
    for data in (aws, gcp):
        data["metadata"]["baton"]["kvtransfer"].pop("transport")
    same = ("metadata", "worker_start_ray_commands", "head_start_ray_commands", "setup_commands", "file_mounts")
    assert [key for key in same if aws[key] != gcp[key]] == []


PLANTED = [
    ("a key of Ray's", "idle_timeout_minutes:", "idle_timeout_minuets:", "idle_timeout_minuets"),
    ("a provider", "type: aws", "type: amazon", "amazon"),
    ("a fraction", "GPU: 8, prefill: 8}", "GPU: 8, prefill: 0.5}", "0.5"),
    ("the head's type", "head_node_type: head", "head_node_type: heads", "`head_node_type` must be one of"),
    ("more than max_workers", "max_workers: 8\n", "max_workers: 1\n", "max_workers"),
    ("min over max", "min_workers: 1\n    max_workers: 4", "min_workers: 5\n    max_workers: 4", "min_workers"),
    ("a key of Baton's", "kv_cache_gib: 48", "kv_cache_gb: 48", "metadata.baton.engine.kv_cache_gb"),
    ("a value of Baton's", "dtype: bfloat16", "dtype: bf16", "metadata.baton.engine.dtype"),
    ("half a pair", "role: decode\n        size: 8", "role: decode\n        size: 0", "decode"),
    ("a role's resource", "GPU: 1, prefill: 1}", "GPU: 1, prefil: 1}", "'prefil', which no machine offers"),
    ("a machine's resource", "GPU: 8, decode: 8}", "GPU: 8, decoder: 8}", "'decoder', which no pool asks for"),
    ("too many workers", "role: decode\n        size: 8", "role: decode\n        size: 40", "at most 32 workers"),
    ("too big a worker", "tensor_parallel: 1 ", "tensor_parallel: 16 ", "more than a machine of prefill has"),
    ("the address", "$RAY_HEAD_IP:6379", "$RAY_HEAD_IP:6380", "workers join '$RAY_HEAD_IP:6380'"),
    ("a port on one side", "IP:6379 --node-manager-port=8075", "IP:6379 --node-manager-port=8074", "'8074' on workers"),
    ("a port twice", "http_port: 8000", "http_port: 8076", "are both 8076"),
    ("a port of workers", "port: 50051", "port: 20005", "among the ports of Ray's workers"),
    ("a closed port", "FromPort: 8000, ToPort: 8000", "FromPort: 8080, ToPort: 8080", "port 8080 is opened"),
    ("no autoscaler", "--autoscaling-config=~/ray_bootstrap_config.yaml", "", "no worker would ever be started"),
    ("no health checks", "RAY_health_check_period_ms=500", "", "RAY_health_check_period_ms"),
    ("a Ray of its own", "RAY_ADDRESS=auto ", "", "a Ray of its own"),
    ("another file", "baton serve ~/ray_bootstrap_config.yaml", "baton serve ~/cluster.yaml", "last command"),
    (
        "no token",
        "RAY_AUTH_MODE=token RAY_worker_niceness=0\n    ray start --a",
        "ray start --a",
        "RAY_AUTH_MODE=token",
    ),
    ("no token file", '"~/.ray/auth_token": ', '"~/.ray/token": ', "~/.ray/auth_token"),
    ("no lock", "--constraint ~/baton/requirements.lock boto3==1.44.5", "boto3", "takes boto3 in whatever version"),
    ("a lock that is not there", "--requirement ~/baton/requirements-nodeps.lock", "-r ~/baton/all.lock", "all.lock"),
    ("an installer of any version", "uv/0.13.8/install.sh", "uv/install.sh", "not of one version"),
    ("a lock not brought", '"~/baton/requirements.lock": ', '"~/baton/locks": ', "requirements.lock"),
    ("a mount from nowhere", '"requirements.lock"\n', '"requirements.txt"\n', "requirements.txt does not exist"),
    ("keys in another place", "/home/ubuntu/baton/api-keys", "/home/ec2-user/baton/api-keys", "router.api_keys_file"),
    ("no keys", "      api_keys_file: /home/ubuntu/baton/api-keys\n", "", "asks for no key"),
    ("work on the head", "{CPU: 0, router: 1}", "{CPU: 8, router: 1}", "must offer `router: 1` and `CPU: 0`"),
    ("a key twice", "  type: aws", "  type: aws\n  type: gcp", "'type' is there twice"),
    ("a key of the cloud's", "InstanceType: p5", "InstanceTyp: p5", "node_config has 'InstanceTyp'"),
    ("fewer GPUs than are offered", "p5.48xlarge", "m7i.2xlarge", "a m7i.2xlarge has (8, 0)"),
    ("any image", "\nauth:\n", "\ndocker: {image: baton:latest, container_name: b}\n\nauth:\n", "baton:latest is not"),
]


@pytest.mark.parametrize(("right", "wrong", "told"), [plant[1:] for plant in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_mistake_is_found(right: str, wrong: str, told: str) -> None:
    assert right in AWS
    found = problems(AWS.replace(right, wrong))
    assert any(told in problem for problem in found), found


PLANTED_LOCAL = [
    (
        "node types",
        "min_workers: 3  ",
        "available_node_types: {w: {resources: {}, node_config: {}}}\nmin_workers: 3  ",
        "Ray:",
    ),
    ("too few cores", "--num-cpus=8", "--num-cpus=4", "more than a machine of worker_ips has"),
    ("too many workers", "role: decode\n        size: 2", "role: decode\n        size: 3", "take 32 CPU together"),
    ("a machine less", ", 10.0.0.13]", "]", "min_workers is 3 with 2 worker_ips"),
    ("autoscaler v2", "RAY_enable_autoscaler_v2=0 ", "", "the last worker never comes up"),
    ("no router", """--resources='{"router": 1}'""", "", "the head offers no `router`"),
]


@pytest.mark.parametrize(
    ("right", "wrong", "told"), [plant[1:] for plant in PLANTED_LOCAL], ids=[p[0] for p in PLANTED_LOCAL]
)
def test_a_planted_mistake_among_fixed_machines_is_found(right: str, wrong: str, told: str) -> None:
    assert right in LOCAL
    found = problems(LOCAL.replace(right, wrong))
    assert any(told in problem for problem in found), found
