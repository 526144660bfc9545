from baton.proto import inference_pb2 as _inference_pb2
from baton.proto import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class WorkerPace(_message.Message):
    __slots__ = ("window_s", "prompt_tokens_per_s", "tokens_per_s", "pulled_bytes_per_s", "budget_share")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BUDGET_SHARE_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    prompt_tokens_per_s: float
    tokens_per_s: float
    pulled_bytes_per_s: float
    budget_share: float
    def __init__(self, window_s: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., pulled_bytes_per_s: _Optional[float] = ..., budget_share: _Optional[float] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "pool", "role", "incarnation", "address", "state", "load", "load_age_s", "in_flight", "restarts", "rss_bytes", "pid", "pace", "block_size", "kv_bytes_per_token", "queue_budget_tokens", "connector", "host", "note", "lanes", "version")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_AGE_S_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    role: str
    incarnation: str
    address: str
    state: str
    load: _worker_pb2.LoadReport
    load_age_s: float
    in_flight: int
    restarts: int
    rss_bytes: int
    pid: int
    pace: WorkerPace
    block_size: int
    kv_bytes_per_token: int
    queue_budget_tokens: int
    connector: str
    host: str
    note: str
    lanes: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Lane]
    version: str
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[_Union[_worker_pb2.LoadReport, _Mapping]] = ..., load_age_s: _Optional[float] = ..., in_flight: _Optional[int] = ..., restarts: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., pid: _Optional[int] = ..., pace: _Optional[_Union[WorkerPace, _Mapping]] = ..., block_size: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., queue_budget_tokens: _Optional[int] = ..., connector: _Optional[str] = ..., host: _Optional[str] = ..., note: _Optional[str] = ..., lanes: _Optional[_Iterable[_Union[_worker_pb2.Lane, _Mapping]]] = ..., version: _Optional[str] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("name", "role", "size", "workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    size: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., size: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("incarnation", "queued", "running", "requests_total", "retries_total", "draining", "uptime_s", "rss_bytes", "pid", "queued_tokens", "max_queued_requests", "max_queued_tokens", "refused_total", "failed_total", "number", "keeper", "grpc_address", "http_address", "peer_address")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RETRIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEEPER_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    queued: int
    running: int
    requests_total: int
    retries_total: int
    draining: bool
    uptime_s: float
    rss_bytes: int
    pid: int
    queued_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    refused_total: int
    failed_total: int
    number: int
    keeper: bool
    grpc_address: str
    http_address: str
    peer_address: str
    def __init__(self, incarnation: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., requests_total: _Optional[int] = ..., retries_total: _Optional[int] = ..., draining: _Optional[bool] = ..., uptime_s: _Optional[float] = ..., rss_bytes: _Optional[int] = ..., pid: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., refused_total: _Optional[int] = ..., failed_total: _Optional[int] = ..., number: _Optional[int] = ..., keeper: _Optional[bool] = ..., grpc_address: _Optional[str] = ..., http_address: _Optional[str] = ..., peer_address: _Optional[str] = ...) -> None: ...

class RecentRequest(_message.Message):
    __slots__ = ("number", "request_id", "face", "outcome", "message", "num_outputs", "prompt_tokens", "cached_tokens", "transferred_tokens", "recomputed_tokens", "completion_tokens", "prefill_worker", "decode_worker", "connector", "retries", "ttft_s", "timeline", "age_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FACE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    face: str
    outcome: str
    message: str
    num_outputs: int
    prompt_tokens: int
    cached_tokens: int
    transferred_tokens: int
    recomputed_tokens: int
    completion_tokens: int
    prefill_worker: str
    decode_worker: str
    connector: str
    retries: int
    ttft_s: float
    timeline: _inference_pb2.Timeline
    age_s: float
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., face: _Optional[str] = ..., outcome: _Optional[str] = ..., message: _Optional[str] = ..., num_outputs: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., transferred_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., connector: _Optional[str] = ..., retries: _Optional[int] = ..., ttft_s: _Optional[float] = ..., timeline: _Optional[_Union[_inference_pb2.Timeline, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("model", "router", "pools", "recent", "version", "routers", "router_replicas")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model: str
    router: RouterStatus
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    recent: _containers.RepeatedCompositeFieldContainer[RecentRequest]
    version: str
    routers: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    router_replicas: int
    def __init__(self, model: _Optional[str] = ..., router: _Optional[_Union[RouterStatus, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., recent: _Optional[_Iterable[_Union[RecentRequest, _Mapping]]] = ..., version: _Optional[str] = ..., routers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ..., router_replicas: _Optional[int] = ...) -> None: ...

class GetLogsRequest(_message.Message):
    __slots__ = ("worker_id", "lines", "previous")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    lines: int
    previous: bool
    def __init__(self, worker_id: _Optional[str] = ..., lines: _Optional[int] = ..., previous: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "timeout_s", "leave", "host", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout_s: float
    leave: bool
    host: str
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., timeout_s: _Optional[float] = ..., leave: _Optional[bool] = ..., host: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("moved", "left")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    moved: int
    left: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, moved: _Optional[int] = ..., left: _Optional[_Iterable[str]] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role", "timeout_s", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    timeout_s: float
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., timeout_s: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("drain_s", "total_s", "moved")
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    drain_s: float
    total_s: float
    moved: int
    def __init__(self, drain_s: _Optional[float] = ..., total_s: _Optional[float] = ..., moved: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "size")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    size: int
    def __init__(self, pool: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class ExamineClusterRequest(_message.Message):
    __slots__ = ("timeout_s", "router_only")
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ONLY_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    router_only: bool
    def __init__(self, timeout_s: _Optional[float] = ..., router_only: _Optional[bool] = ...) -> None: ...

class ExaminedWorker(_message.Message):
    __slots__ = ("worker_id", "pool", "role", "state", "address", "restarts", "silence", "round_trip_s", "clock_ahead_s", "examination")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    EXAMINATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    role: str
    state: str
    address: str
    restarts: int
    silence: str
    round_trip_s: float
    clock_ahead_s: float
    examination: _worker_pb2.WorkerExamination
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., restarts: _Optional[int] = ..., silence: _Optional[str] = ..., round_trip_s: _Optional[float] = ..., clock_ahead_s: _Optional[float] = ..., examination: _Optional[_Union[_worker_pb2.WorkerExamination, _Mapping]] = ...) -> None: ...

class ClusterExamination(_message.Message):
    __slots__ = ("version", "model", "machine", "pools", "workers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    machine: _worker_pb2.Machine
    pools: _containers.RepeatedCompositeFieldContainer[_inference_pb2.PoolInfo]
    workers: _containers.RepeatedCompositeFieldContainer[ExaminedWorker]
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., machine: _Optional[_Union[_worker_pb2.Machine, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[_inference_pb2.PoolInfo, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[ExaminedWorker, _Mapping]]] = ...) -> None: ...
