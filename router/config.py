"""The configuration file: a Ray cluster-launcher YAML whose `metadata.baton` section is Baton's.

Owns: which settings there are, which of them go together, and reading them once into frozen dataclasses.
Refuses to know: what the settings do, the rest of the file (that is Ray's), the environment, and how a single value is
checked (`router.schema`).

    metadata:
      baton:
        model, engine, scheduler        defaults of all pools
        pools: {<name>: {role, size, engine, scheduler, resources}}
        router, kvtransfer, observability
        security: {require_auth, tls, cluster_tls}
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baton.proto.messages import Role
from baton.proto.settings import (
    ClusterTlsSettings,
    EngineSettings,
    ObservabilitySettings,
    SchedulerSettings,
    SecuritySettings,
    TlsSettings,
    TransferSettings,
    bounded,
    one_of,
)
from baton.router.placement import POLICIES
from baton.router.schema import (
    ConfigError,
    as_section,
    checked_field,
    checked_number,
    filled,
    read_yaml,
    refuse_unknown,
    subsection,
    suggestion,
)

__all__ = ["ClusterConfig", "ConfigError", "PoolConfig", "RouterSettings", "defaults", "from_mapping", "load"]

SECTION = "metadata.baton"
_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})")
MAX_POOL_SIZE = 4096


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The front door and the dispatch queue.

    `replicas`: router processes behind the same two ports, each with its share of what may be queued.
    `port` is gRPC's; a port of 0 takes a free one. `served_model_name`: what HTTP clients call the model, empty for its
    own name. `api_keys_file`: one key a line, which gRPC and HTTP clients must then show as a bearer token.
    `max_requests_per_s`, `max_requests_at_once`: of one client, which is a key's owner, or an address where no keys
    are; 0 requests a second is no limit. `max_request_tokens`: prompt and output together, 0 is what the model and the
    pools allow. `max_header_kib`: of one request. `cors_origins`: sites whose pages may call, by commas.
    `binding`: whether the decode worker is chosen with the prefill worker or when the prompt is computed.
    `short_output_tokens`: outputs that end after so many are generated where their prompt is computed, if nothing else
    waits there: to move its KV would take longer; 0 moves all. `credit_steps`: prompt tokens that a worker may hold
    uncomputed, in multiples of its `max_num_batched_tokens`. `no_worker_grace_s`: how long a request waits for a role
    of which no worker is there.
    `handoff_timeout_s`: from the first token to the first one of the decode worker. `drain_timeout_s`: how long running
    requests may go on when their worker or the router is to stop.
    `ready_with`: whether it serves when `all` workers do or when `some` do that can serve a request; `auto` is all on a
    Ray of its own, some on one that it has joined. `worker_silence_s`: without a word for so long, a worker is lost.
    `worker_network`: where workers listen, for all others: a network as 10.1.0.0/16, in which each takes its machine's
    address, or `node`, the machine's address in Ray; empty is loopback on a Ray of our own if `host` is, else `node`.
    `worker_ports`: of each machine, those that workers may take, as 20000-20999; empty takes any free ones.
    """

    host: str = "127.0.0.1"
    replicas: int = bounded(1, minimum=1, maximum=64)
    port: int = bounded(50051, minimum=0, maximum=65535)
    http_port: int = bounded(8000, minimum=0, maximum=65535)
    served_model_name: str = ""
    api_keys_file: str = ""
    max_requests_per_s: float = bounded(0.0, minimum=0.0)
    max_requests_at_once: int = bounded(2048, minimum=1)
    max_request_tokens: int = bounded(0, minimum=0)
    cors_origins: str = ""
    policy: str = one_of("queue_depth", POLICIES)
    binding: str = one_of("early", ("early", "late"))
    max_queued_requests: int = bounded(1024, minimum=1)
    max_queued_tokens: int = bounded(4_194_304, minimum=1)
    short_output_tokens: int = bounded(4, minimum=0, maximum=1024)
    credit_steps: float = bounded(2.0, minimum=0.1, maximum=1000.0)
    max_retries: int = bounded(5, minimum=0, maximum=100)
    request_timeout_s: float = bounded(600.0, minimum=0.1)
    handoff_timeout_s: float = bounded(30.0, minimum=0.1)
    drain_timeout_s: float = bounded(30.0, minimum=0.0)
    no_worker_grace_s: float = bounded(30.0, minimum=0.0)
    connect_timeout_s: float = bounded(10.0, minimum=0.1)
    worker_start_timeout_s: float = bounded(300.0, minimum=1.0)
    ready_with: str = one_of("auto", ("auto", "all", "some"))
    worker_silence_s: float = bounded(3.0, minimum=0.3)
    worker_network: str = ""
    worker_ports: str = ""
    max_message_mib: int = bounded(64, minimum=1, maximum=2047)
    max_header_kib: int = bounded(64, minimum=1, maximum=1024)

    @property
    def worker_port_range(self) -> range:
        """What `worker_ports` says; empty where any will do."""
        first, _, last = self.worker_ports.partition("-")
        return range(int(first), int(last) + 1) if self.worker_ports else range(0)

    def share(self) -> RouterSettings:
        """What one of the replicas goes by: of what may be queued, its part. `max_requests_per_s` stays: a client with
        one connection meets one replica, and may use all that it is allowed there."""
        return replace(
            self,
            max_queued_requests=-(-self.max_queued_requests // self.replicas),
            max_queued_tokens=-(-self.max_queued_tokens // self.replicas),
        )


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Workers of one role that are all alike.

    `num_cpus`, `num_gpus`: what each rank of a worker takes; a worker has `engine.tensor_parallel` of them, all on one
    machine. `resource`: a custom Ray resource of which each worker takes one, empty for none. The pool runs where it is
    offered.
    """

    name: str
    role: Role
    size: int
    engine: EngineSettings = field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resource: str = ""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """All of `metadata.baton`, checked. The methods give changed copies, checked again."""

    model: str
    pools: tuple[PoolConfig, ...]
    router: RouterSettings = field(default_factory=RouterSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    observability: ObservabilitySettings = field(default_factory=ObservabilitySettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)

    def size(self, role: Role) -> int:
        """Workers of a role, over all pools."""
        return sum(pool.size for pool in self.pools if pool.role is role)

    def resized(
        self, *, prefill: int | None = None, decode: int | None = None, colocated: int | None = None
    ) -> ClusterConfig:
        """The sizes of the roles' pools. A role without a pool gets one, like the first pool there is."""
        pools = self.pools
        for role, size in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.COLOCATED, colocated)):
            if size is not None:
                pools = _resized(pools, role, size)
        return _checked(replace(self, pools=pools))

    def with_model(self, model: str) -> ClusterConfig:
        checked_field(EngineSettings, "model", model, f"{SECTION}.model")
        pools = tuple(replace(pool, engine=replace(pool.engine, model=model)) for pool in self.pools)
        return _checked(replace(self, model=model, pools=pools))

    def with_device(self, device: str) -> ClusterConfig:
        """Every pool on `cpu` or `cuda`; a worker takes one GPU, or none, unless its pool says how many."""
        checked_field(EngineSettings, "device", device, f"{SECTION}.engine.device")
        pools = tuple(
            replace(
                pool,
                engine=replace(pool.engine, device=device),
                num_gpus=(pool.num_gpus or 1.0) if device == "cuda" else 0.0,
            )
            for pool in self.pools
        )
        return _checked(replace(self, pools=pools))

    def on_machines(self) -> ClusterConfig:
        """The same on a Ray that was joined, where machines come and go: what was left open is decided for that."""
        router = self.router
        ready_with = "some" if router.ready_with == "auto" else router.ready_with
        return replace(
            self, router=replace(router, ready_with=ready_with, worker_network=router.worker_network or "node")
        )

    def with_replicas(self, replicas: int) -> ClusterConfig:
        """As many router processes."""
        checked_field(RouterSettings, "replicas", replicas, f"{SECTION}.router.replicas")
        return replace(self, router=replace(self.router, replicas=replicas))

    def with_port(self, port: int, http_port: int | None = None) -> ClusterConfig:
        """gRPC on this port, and HTTP on the other if one is given."""
        http_port = self.router.http_port if http_port is None else http_port
        checked_field(RouterSettings, "port", port, f"{SECTION}.router.port")
        checked_field(RouterSettings, "http_port", http_port, f"{SECTION}.router.http_port")
        return replace(self, router=replace(self.router, port=port, http_port=http_port))

    def requiring_auth(self) -> ClusterConfig:
        return replace(self, security=replace(self.security, require_auth=True))


def load(path: Path) -> ClusterConfig:
    """Reads a cluster-launcher file; raises `ConfigError` for the first thing that is wrong with Baton's section."""
    return from_mapping(read_yaml(path), source=str(path))


def from_mapping(data: object, source: str = "") -> ClusterConfig:
    """The configuration in the contents of a cluster-launcher file. `source` goes in front of every complaint."""
    try:
        return _cluster(subsection(subsection(data, "metadata", "metadata"), "baton", SECTION))
    except ConfigError as error:
        raise ConfigError(error.key, error.problem, source) from error


def defaults(
    *, prefill: int = 1, decode: int = 1, colocated: int = 0, model: str = "demo", device: str = "cpu"
) -> ClusterConfig:
    """A cluster of which nothing is said but this."""
    sizes = {Role.PREFILL: prefill, Role.DECODE: decode, Role.COLOCATED: colocated}
    pools = tuple(PoolConfig(role.value, role, size) for role, size in sizes.items() if size)
    return _checked(ClusterConfig("demo", pools)).with_model(model).with_device(device)


def _cluster(section: Mapping[str, Any]) -> ClusterConfig:
    known = ("model", "engine", "scheduler", "pools", "router", "kvtransfer", "observability", "security")
    refuse_unknown(section, known, SECTION)
    engine = filled(EngineSettings(), section.get("engine"), f"{SECTION}.engine")
    if "model" in section:
        model = checked_field(EngineSettings, "model", section["model"], f"{SECTION}.model")
        if "model" in (section.get("engine") or {}) and model != engine.model:
            raise ConfigError(f"{SECTION}.engine.model", f"is {engine.model!r}, but {SECTION}.model is {model!r}")
        engine = replace(engine, model=model)
    scheduler = filled(SchedulerSettings(), section.get("scheduler"), f"{SECTION}.scheduler")
    pools = subsection(section, "pools", f"{SECTION}.pools")
    config = ClusterConfig(
        model=engine.model,
        pools=tuple(_pool(name, subsection(pools, name, _path(name)), engine, scheduler) for name in pools),
        router=filled(RouterSettings(), section.get("router"), f"{SECTION}.router"),
        transfer=filled(TransferSettings(), section.get("kvtransfer"), f"{SECTION}.kvtransfer"),
        observability=filled(ObservabilitySettings(), section.get("observability"), f"{SECTION}.observability"),
        security=_security(as_section(section.get("security"), f"{SECTION}.security"), f"{SECTION}.security"),
    )
    return _checked(config)


def _security(section: Mapping[str, Any], path: str) -> SecuritySettings:
    refuse_unknown(section, ("require_auth", "tls", "cluster_tls"), path)
    required = section.get("require_auth", False)
    return SecuritySettings(
        require_auth=checked_field(SecuritySettings, "require_auth", required, f"{path}.require_auth"),
        tls=filled(TlsSettings(), section.get("tls"), f"{path}.tls"),
        cluster_tls=filled(ClusterTlsSettings(), section.get("cluster_tls"), f"{path}.cluster_tls"),
    )


def _pool(name: str, section: Mapping[str, Any], engine: EngineSettings, scheduler: SchedulerSettings) -> PoolConfig:
    path = _path(name)
    refuse_unknown(section, ("role", "size", "engine", "scheduler", "resources"), path)
    roles = [role.value for role in Role]
    role = section.get("role")
    if role not in roles:
        problem = "is missing, must be" if role is None else f"is {role!r}, must be"
        raise ConfigError(f"{path}.role", f"{problem} one of {', '.join(roles)}{suggestion(role, roles)}")
    pool = PoolConfig(
        name=name,
        role=Role(role),
        size=checked_number(section.get("size", 1), int, f"{path}.size", 0, MAX_POOL_SIZE),
        engine=filled(engine, section.get("engine"), f"{path}.engine"),
        scheduler=filled(scheduler, section.get("scheduler"), f"{path}.scheduler"),
    )
    if pool.engine.device == "cuda":
        pool = replace(pool, num_gpus=1.0)
    return _with_resources(pool, section.get("resources"))


def _with_resources(pool: PoolConfig, data: object) -> PoolConfig:
    """What a worker takes of its machine, in Ray's words: CPU and GPU for each rank, and 1 of at most one resource."""
    path = f"{_path(pool.name)}.resources"
    for key, value in as_section(data, path).items():
        amount = checked_number(value, float, f"{path}.{key}", 0)
        if key == "CPU":
            pool = replace(pool, num_cpus=amount)
        elif key == "GPU":
            pool = replace(pool, num_gpus=amount)
        elif key.upper() in ("CPU", "GPU"):
            raise ConfigError(f"{path}.{key}", f"is not a resource of Ray's; did you mean {key.upper()}?")
        elif pool.resource:
            raise ConfigError(
                f"{path}.{key}", f"is a second custom resource beside {pool.resource}, at most one is allowed"
            )
        elif amount != 1:
            raise ConfigError(f"{path}.{key}", f"is {value!r}, must be 1: each worker takes one of a custom resource")
        else:
            pool = replace(pool, resource=key)
    return pool


def _resized(pools: tuple[PoolConfig, ...], role: Role, size: int) -> tuple[PoolConfig, ...]:
    checked_number(size, int, f"{_path(role.value)}.size", 0, MAX_POOL_SIZE)
    of_role = [pool.name for pool in pools if pool.role is role]
    if len(of_role) > 1:
        raise ConfigError(
            f"{SECTION}.pools", f"has {len(of_role)} {role} pools ({', '.join(of_role)}): which one to size?"
        )
    if of_role:
        return tuple(replace(pool, size=size) if pool.role is role else pool for pool in pools)
    return (*pools, replace(pools[0], name=role.value, role=role, size=size, resource="")) if size else pools


def _path(pool_name: str) -> str:
    return f"{SECTION}.pools.{pool_name}"


def _checked(config: ClusterConfig) -> ClusterConfig:
    """The configuration, if its parts go together."""
    sizes = {role: config.size(role) for role in Role}
    pools = f"{SECTION}.pools"
    if not any(sizes.values()):
        raise ConfigError(pools, "has no worker: at least one prefill and one decode, or one colocated, is needed")
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if sizes[role] and not sizes[other]:
            problem = f"has {sizes[role]} {role} workers and no {other} worker: they work in pairs"
            raise ConfigError(pools, problem)
    _check_alike(config)
    _check_transfer(config.transfer, paired=sizes[Role.PREFILL] > 0)
    _check_worker_addresses(config.router)
    endpoint = config.observability.trace_endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        problem = f"is {endpoint!r}, must be a URL like http://collector:4318"
        raise ConfigError(f"{SECTION}.observability.trace_endpoint", problem)
    for name in ("log_dir", "targets_file"):
        value = getattr(config.observability, name)
        if value and not Path(value).is_absolute():
            problem = f"is {value!r}, must be an absolute path: processes of other working directories open it"
            raise ConfigError(f"{SECTION}.observability.{name}", problem)
    for pool in config.pools:
        _check_devices(pool)
    _check_security(config.security)
    return config


def _check_alike(config: ClusterConfig) -> None:
    """KV moves between pools and a request may move to any, so what shapes KV and tokens is the same in all of them."""
    first = config.pools[0]
    for pool in config.pools:
        alike = ("model", "dtype", "block_size")
        for name in (*alike, "tensor_parallel") if config.transfer.connector == "nccl" else alike:
            here, there = getattr(pool.engine, name), getattr(first.engine, name)
            if here != there:
                problem = f"is {here!r}, but {there!r} in {_path(first.name)}: it must be the same in all pools"
                if name == "tensor_parallel":
                    problem += " with the connector nccl, which reads whole blocks"
                raise ConfigError(f"{_path(pool.name)}.engine.{name}", problem)
    if first.engine.model != config.model:
        raise ConfigError(f"{SECTION}.model", f"is {config.model!r}, but {first.engine.model!r} in {_path(first.name)}")


def _check_transfer(transfer: TransferSettings, *, paired: bool) -> None:
    path = f"{SECTION}.kvtransfer"
    if paired and transfer.connector == "local":
        problem = (
            "is 'local', which moves KV within one process, but prefill and decode workers are processes of their own"
        )
        raise ConfigError(f"{path}.connector", problem)
    for name in ("lease_s", "peer_timeout_s"):
        limit_s = getattr(transfer, name)
        if transfer.heartbeat_s * 2 > limit_s:
            problem = f"is {transfer.heartbeat_s:g}, must be at most half of {name}, which is {limit_s:g}"
            raise ConfigError(f"{path}.heartbeat_s", problem)


def _check_worker_addresses(router: RouterSettings) -> None:
    path, ports = f"{SECTION}.router", _PORTS.fullmatch(router.worker_ports)
    if router.worker_ports and not (ports and 0 < int(ports[1]) <= int(ports[2]) <= 65535):
        problem = f"is {router.worker_ports!r}, must be the first and the last port, as 20000-20999, from 1 to 65535"
        raise ConfigError(f"{path}.worker_ports", problem)
    if router.worker_network not in ("", "node"):
        try:
            ipaddress.ip_network(router.worker_network, strict=False)
        except ValueError as error:
            problem = f"is {router.worker_network!r}, must be node or a network as 10.1.0.0/16 or fd00::/8"
            raise ConfigError(f"{path}.worker_network", problem) from error


def _check_security(security: SecuritySettings) -> None:
    """A certificate without its key, or half of what makes trust mutual, would fail later and elsewhere."""
    tls, cluster, path = security.tls, security.cluster_tls, f"{SECTION}.security"
    sections = [("tls", tls, ("cert_file", "key_file")), ("cluster_tls", cluster, ("ca_file", "cert_file", "key_file"))]
    for name, section, together in sections:
        given = [key for key in together if getattr(section, key)]
        missing = [key for key in together if key not in given]
        if given and missing:
            raise ConfigError(f"{path}.{name}.{missing[0]}", f"is empty, but {given[0]} is given: they go together")
    if tls.client_ca_file and not tls.cert_file:
        raise ConfigError(f"{path}.tls.cert_file", "is empty, but client_ca_file is given: they go together")


def _check_devices(pool: PoolConfig) -> None:
    path = f"{_path(pool.name)}.resources.GPU"
    if pool.engine.device == "cuda" and pool.num_gpus == 0:
        raise ConfigError(path, "is 0, but the pool's engine runs on cuda")
    if pool.engine.device == "cpu" and pool.num_gpus > 0:
        raise ConfigError(path, f"is {pool.num_gpus:g}, but the pool's engine runs on cpu")
