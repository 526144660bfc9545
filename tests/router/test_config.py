"""The configuration: what a file becomes, every complaint with its path, and that Ray takes the file too."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from baton.proto.messages import Role
from baton.proto.settings import EngineSettings, SchedulerSettings, TransferSettings
from baton.router.config import ClusterConfig, ConfigError, PoolConfig, RouterSettings, defaults, from_mapping, load

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER_YAML = ROOT / "cluster.yaml"
PAIR: dict[str, Any] = {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}


def read(**section: Any) -> ClusterConfig:
    return from_mapping({"metadata": {"baton": {"pools": PAIR} | section}})


def with_prefill(**pool: Any) -> dict[str, Any]:
    return {"pools": PAIR | {"prefill": {"role": "prefill"} | pool}}


# --- what is right ---


def test_what_is_not_said_has_the_defaults_of_the_settings() -> None:
    assert (
        read()
        == defaults()
        == ClusterConfig(
            model="demo",
            pools=(PoolConfig("prefill", Role.PREFILL, 1), PoolConfig("decode", Role.DECODE, 1)),
            router=RouterSettings(),
            transfer=TransferSettings(),
        )
    )


def test_a_pool_overrides_single_keys_of_the_shared_sections() -> None:
    config = read(
        model="/models/llama",
        engine={"dtype": "float32", "threads": 2, "kv_cache_gib": 2},
        scheduler={"max_num_seqs": 64, "policy": "priority"},
        pools=PAIR
        | {
            "prefill": {
                "role": "prefill",
                "size": 3,
                "engine": {"threads": 4},
                "scheduler": {"max_num_batched_tokens": 512},
                "resources": {"CPU": 4, "prefill": 1},
            }
        },
        router={"policy": "round_robin", "credit_steps": 1},
        kvtransfer={"checksums": "always"},
    )
    prefill, decode = config.pools
    assert config.model == "/models/llama"
    assert prefill.engine == EngineSettings("/models/llama", "float32", threads=4, kv_cache_gib=2.0)
    assert decode.engine == EngineSettings("/models/llama", "float32", threads=2, kv_cache_gib=2.0)
    assert prefill.scheduler == SchedulerSettings(512, 64, policy="priority")
    assert decode.scheduler == SchedulerSettings(max_num_seqs=64, policy="priority")
    assert (prefill.size, prefill.num_cpus, prefill.num_gpus, prefill.resource) == (3, 4.0, 0.0, "prefill")
    assert config.router == RouterSettings(policy="round_robin", credit_steps=1.0)
    assert config.transfer == TransferSettings(checksums="always")


def test_whole_numbers_become_floats_where_a_float_is_due() -> None:
    assert type(read(router={"credit_steps": 3}).router.credit_steps) is float


def test_a_pool_on_cuda_takes_one_gpu_unless_it_says_how_many() -> None:
    config = read(engine={"device": "cuda"}, **with_prefill(resources={"GPU": 0.5}))
    assert [pool.num_gpus for pool in config.pools] == [0.5, 1.0]


def test_colocated_workers_need_no_partner_and_may_use_the_local_connector() -> None:
    config = read(pools={"all": {"role": "colocated", "size": 2}}, kvtransfer={"connector": "local"})
    assert config.size(Role.COLOCATED) == 2
    assert config.size(Role.PREFILL) == 0


def test_an_empty_section_is_one_without_keys() -> None:
    assert read(router=None, engine={}) == defaults()


# --- what is wrong ---

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("unknown section", {"ruoter": {}}, "metadata.baton.ruoter is not a setting; did you mean router?"),
    ("unknown key", {"router": {"prot": 1}}, "metadata.baton.router.prot is not a setting; did you mean port?"),
    (
        "unknown key in a pool",
        with_prefill(scheduler={"max_num_seq": 3}),
        "metadata.baton.pools.prefill.scheduler.max_num_seq is not a setting; did you mean max_num_seqs?",
    ),
    (
        "unknown key like no other",
        with_prefill(xyzzy=3),
        "metadata.baton.pools.prefill.xyzzy is not a setting; known are role, size, engine, scheduler, resources",
    ),
    (
        "a bool is no number",
        {"scheduler": {"max_num_seqs": True}},
        "metadata.baton.scheduler.max_num_seqs is True, must be a whole number",
    ),
    (
        "a number is no bool",
        {"scheduler": {"prefix_cache": 1}},
        "metadata.baton.scheduler.prefix_cache is 1, must be true or false",
    ),
    (
        "a fraction is no whole number",
        {"engine": {"block_size": 16.0}},
        "metadata.baton.engine.block_size is 16.0, must be a whole number",
    ),
    ("text is no number", {"router": {"port": "80"}}, "metadata.baton.router.port is '80', must be a whole number"),
    (
        "not finite",
        {"kvtransfer": {"lease_s": float("inf")}},
        "metadata.baton.kvtransfer.lease_s is inf, must be finite",
    ),
    (
        "not a number",
        {"kvtransfer": {"lease_s": float("nan")}},
        "metadata.baton.kvtransfer.lease_s is nan, must be finite",
    ),
    ("a number is no text", {"model": 7}, "metadata.baton.model is 7, must be a string"),
    ("empty text", {"model": ""}, "metadata.baton.model is empty"),
    (
        "a bare off is false in YAML",
        {"kvtransfer": {"checksums": False}},
        "metadata.baton.kvtransfer.checksums is False, must be a string",
    ),
    ("too small", {"engine": {"block_size": 0}}, "metadata.baton.engine.block_size is 0, must be at least 1"),
    ("too large", {"router": {"port": 65536}}, "metadata.baton.router.port is 65536, must be at most 65535"),
    (
        "too small in a pool",
        with_prefill(scheduler={"max_num_seqs": 0}),
        "metadata.baton.pools.prefill.scheduler.max_num_seqs is 0, must be at least 1",
    ),
    ("negative size", with_prefill(size=-1), "metadata.baton.pools.prefill.size is -1, must be at least 0"),
    (
        "unknown choice",
        {"engine": {"dtype": "bfloat"}},
        "metadata.baton.engine.dtype is 'bfloat', must be one of bfloat16, float16, float32; did you mean bfloat16?",
    ),
    (
        "unknown policy",
        {"router": {"policy": "queue_dept"}},
        "metadata.baton.router.policy is 'queue_dept', must be one of power_of_two, queue_depth, random, round_robin; "
        "did you mean queue_depth?",
    ),
    (
        "unknown role",
        with_prefill(role="Prefill"),
        "metadata.baton.pools.prefill.role is 'Prefill', must be one of prefill, decode, colocated; "
        "did you mean prefill?",
    ),
    (
        "no role",
        {"pools": {"p": {"size": 1}}},
        "metadata.baton.pools.p.role is missing, must be one of prefill, decode, colocated",
    ),
    ("a section that is a list", {"router": [1]}, "metadata.baton.router is [1], must be a mapping"),
    (
        "a key that is a number",
        {"pools": {1: {}}},
        "metadata.baton.pools has the key 1, which must be a string: write it in quotes",
    ),
    (
        "no pool",
        {"pools": {}},
        "metadata.baton.pools has no worker: at least one prefill and one decode, or one colocated, is needed",
    ),
    (
        "only empty pools",
        {"pools": {"p": {"role": "prefill", "size": 0}, "d": {"role": "decode", "size": 0}}},
        "metadata.baton.pools has no worker: at least one prefill and one decode, or one colocated, is needed",
    ),
    (
        "prefill without decode",
        {"pools": {"p": {"role": "prefill", "size": 2}}},
        "metadata.baton.pools has 2 prefill workers and no decode worker: they work in pairs",
    ),
    (
        "decode without prefill",
        {"pools": {"d": {"role": "decode"}, "p": {"role": "prefill", "size": 0}}},
        "metadata.baton.pools has 1 decode workers and no prefill worker: they work in pairs",
    ),
    (
        "block size differs",
        {"pools": PAIR | {"decode": {"role": "decode", "engine": {"block_size": 32}}}},
        "metadata.baton.pools.decode.engine.block_size is 32, but 16 in metadata.baton.pools.prefill: "
        "it must be the same in all pools",
    ),
    (
        "dtype differs",
        {"pools": PAIR | {"decode": {"role": "decode", "engine": {"dtype": "float32"}}}},
        "metadata.baton.pools.decode.engine.dtype is 'float32', but 'bfloat16' in metadata.baton.pools.prefill: "
        "it must be the same in all pools",
    ),
    (
        "model differs",
        {"pools": PAIR | {"decode": {"role": "decode", "engine": {"model": "x"}}}},
        "metadata.baton.pools.decode.engine.model is 'x', but 'demo' in metadata.baton.pools.prefill: "
        "it must be the same in all pools",
    ),
    (
        "model said twice",
        {"model": "a", "engine": {"model": "b"}},
        "metadata.baton.engine.model is 'b', but metadata.baton.model is 'a'",
    ),
    (
        "local connector between processes",
        {"kvtransfer": {"connector": "local"}},
        "metadata.baton.kvtransfer.connector is 'local', which moves KV within one process, but prefill and decode "
        "workers are processes of their own",
    ),
    (
        "heartbeat slower than the lease",
        {"kvtransfer": {"heartbeat_s": 6}},
        "metadata.baton.kvtransfer.heartbeat_s is 6, must be at most half of lease_s, which is 10",
    ),
    (
        "resource in small letters",
        with_prefill(resources={"cpu": 1}),
        "metadata.baton.pools.prefill.resources.cpu is not a resource of Ray's; did you mean CPU?",
    ),
    (
        "two custom resources",
        with_prefill(resources={"a": 1, "b": 1}),
        "metadata.baton.pools.prefill.resources.b is a second custom resource beside a, at most one is allowed",
    ),
    (
        "much of a custom resource",
        with_prefill(resources={"a": 2}),
        "metadata.baton.pools.prefill.resources.a is 2, must be 1: each worker takes one of a custom resource",
    ),
    (
        "a GPU for a CPU engine",
        with_prefill(resources={"GPU": 1}),
        "metadata.baton.pools.prefill.resources.GPU is 1, but the pool's engine runs on cpu",
    ),
    (
        "no GPU for a CUDA engine",
        with_prefill(engine={"device": "cuda"}, resources={"GPU": 0}),
        "metadata.baton.pools.prefill.resources.GPU is 0, but the pool's engine runs on cuda",
    ),
]


@pytest.mark.parametrize(("section", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_complaint_names_path_value_and_bound_of(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**section)
    assert str(caught.value) == message
    assert caught.value.key.startswith("metadata.baton")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "metadata is missing"),
        ([1], "metadata is missing"),
        ({"metdata": {}}, "metadata is missing; was metdata meant to be it?"),
        ({"metadata": {}}, "metadata.baton is missing"),
        ({"metadata": {"baton": {}}}, "metadata.baton.pools is missing"),
    ],
)
def test_a_file_without_the_section_is_told_what_is_missing(data: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(data)
    assert str(caught.value) == message


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"none\.yaml: is not YAML"):
        load(path)
    path.write_text("metadata: {baton: {pools: {p: {role: cook}}}}")
    with pytest.raises(ConfigError, match=r"none\.yaml: metadata\.baton\.pools\.p\.role is 'cook'"):
        load(path)


def test_a_key_given_twice_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("metadata:\n  baton:\n    pools: {}\n    pools: {}\n")
    with pytest.raises(ConfigError, match=r"the key 'pools' is given twice(.|\n)*line 4"):
        load(path)


# --- what the command line changes ---


def test_roles_are_resized_and_an_impossible_size_is_refused() -> None:
    config = defaults().resized(prefill=3, decode=2)
    assert [(pool.name, pool.size) for pool in config.pools] == [("prefill", 3), ("decode", 2)]
    assert defaults().resized(decode=4).size(Role.PREFILL) == 1
    with pytest.raises(ConfigError, match="has 1 prefill workers and no decode worker"):
        defaults().resized(decode=0)
    with pytest.raises(ConfigError, match=r"pools\.prefill\.size is -1, must be at least 0"):
        defaults().resized(prefill=-1)


def test_a_role_without_a_pool_gets_one() -> None:
    config = defaults(device="cpu").with_model("x").resized(prefill=0, decode=0, colocated=2)
    assert [(pool.role, pool.size) for pool in config.pools if pool.size] == [(Role.COLOCATED, 2)]
    assert config.pools[-1].engine.model == "x"
    assert defaults().resized(colocated=0) == defaults()


def test_a_role_of_several_pools_has_no_one_size() -> None:
    config = read(pools=PAIR | {"more": {"role": "decode"}})
    assert config.size(Role.DECODE) == 2
    with pytest.raises(ConfigError, match=r"has 2 decode pools \(decode, more\)"):
        config.resized(decode=5)


def test_model_device_and_port_are_changed_everywhere_and_checked() -> None:
    config = defaults().with_model("m").with_device("cuda").with_port(0)
    assert config.model == "m"
    assert {(pool.engine.model, pool.engine.device, pool.num_gpus) for pool in config.pools} == {("m", "cuda", 1.0)}
    assert config.router.port == 0
    assert config.with_device("cpu").with_port(50051).with_model("demo") == defaults()
    with pytest.raises(ConfigError, match=r"router\.port is 70000, must be at most 65535"):
        config.with_port(70000)
    with pytest.raises(ConfigError, match=r"engine\.device is 'tpu', must be one of cpu, cuda"):
        config.with_device("tpu")
    with pytest.raises(ConfigError, match="model is empty"):
        config.with_model("")


def test_a_replicas_share_of_the_queue_is_its_part_and_all_shares_are_at_least_the_whole() -> None:
    for replicas in (1, 2, 3, 64):
        router = defaults().with_replicas(replicas).router
        share = router.share()
        assert (
            router.max_queued_requests <= replicas * share.max_queued_requests < router.max_queued_requests + replicas
        )
        assert router.max_queued_tokens <= replicas * share.max_queued_tokens < router.max_queued_tokens + replicas
        assert share.max_requests_per_s == router.max_requests_per_s
    for wrong in (0, 65):
        with pytest.raises(ConfigError, match=rf"router\.replicas is {wrong}, must be at"):
            defaults().with_replicas(wrong)


# --- the file in the repository ---


def test_the_files_own_configuration_is_one_pair_with_the_demo_model_on_cpu() -> None:
    config = load(CLUSTER_YAML)
    assert [(pool.role, pool.size, pool.engine.device) for pool in config.pools] == [
        (Role.PREFILL, 1, "cpu"),
        (Role.DECODE, 1, "cpu"),
    ]
    assert config.model == "demo"
    assert config.router == RouterSettings()
    assert config.transfer == TransferSettings()
    # On a CPU steps of few tokens compute as fast, and others wait for their end.
    assert {pool.scheduler.max_num_batched_tokens for pool in config.pools} == {512}
    as_by_default = SchedulerSettings()
    expected = [
        replace(pool, engine=replace(pool.engine, kv_cache_gib=1.0), scheduler=as_by_default, resource="")
        for pool in config.pools
    ]
    assert [replace(pool.scheduler, max_num_batched_tokens=2048) for pool in config.pools] == [as_by_default] * 2
    assert [pool.resource for pool in config.pools] == ["prefill", "decode"]
    assert expected == list(defaults().pools)


def test_ray_accepts_the_file_and_leaves_the_metadata_alone() -> None:
    raw = yaml.safe_load(CLUSTER_YAML.read_text())
    prepared = prepare_config(copy.deepcopy(raw))
    validate_config(prepared)
    assert prepared["metadata"] == raw["metadata"]
    assert from_mapping(prepared) == load(CLUSTER_YAML)


def test_ray_does_not_interpret_what_is_in_the_metadata() -> None:
    raw = yaml.safe_load(CLUSTER_YAML.read_text())
    with_nonsense = raw | {"metadata": {"baton": {"max_workers": "nonsense", "provider": 7}}}
    prepared = prepare_config(copy.deepcopy(with_nonsense))
    validate_config(prepared)
    del prepared["metadata"]
    without = prepare_config({key: value for key, value in raw.items() if key != "metadata"})
    assert prepared == without


def test_the_start_commands_of_head_and_workers_fit_together() -> None:
    raw = yaml.safe_load(CLUSTER_YAML.read_text())
    head, worker = " ".join(raw["head_start_ray_commands"]), " ".join(raw["worker_start_ray_commands"])
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert "RAY_health_check_period_ms=500" in head
    assert head.count("RAY_AUTH_MODE=token") == 2
    assert "RAY_AUTH_MODE=token" in worker
    port = re.search(r"--port=(\d+)", head)
    assert port is not None
    assert f"--address=$RAY_HEAD_IP:{port[1]}" in worker


def test_a_trace_endpoint_that_is_no_url_is_refused():
    section = {"pools": {"both": {"role": "colocated"}}, "observability": {"trace_endpoint": "collector:4318"}}
    with pytest.raises(ConfigError, match=r"observability\.trace_endpoint is 'collector:4318', must be a URL"):
        from_mapping({"metadata": {"baton": section}})
