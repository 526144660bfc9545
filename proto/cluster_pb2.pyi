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

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "pool", "role", "incarnation", "address", "state", "load", "load_age_s", "in_flight", "restarts", "rss_bytes", "pid")
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
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., load: _Optional[_Union[_worker_pb2.LoadReport, _Mapping]] = ..., load_age_s: _Optional[float] = ..., in_flight: _Optional[int] = ..., restarts: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("incarnation", "queued", "running", "requests_total", "retries_total", "draining", "uptime_s", "rss_bytes", "pid")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RETRIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    queued: int
    running: int
    requests_total: int
    retries_total: int
    draining: bool
    uptime_s: float
    rss_bytes: int
    pid: int
    def __init__(self, incarnation: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., requests_total: _Optional[int] = ..., retries_total: _Optional[int] = ..., draining: _Optional[bool] = ..., uptime_s: _Optional[float] = ..., rss_bytes: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("model", "router", "pools")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    model: str
    router: RouterStatus
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    def __init__(self, model: _Optional[str] = ..., router: _Optional[_Union[RouterStatus, _Mapping]] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("moved",)
    MOVED_FIELD_NUMBER: _ClassVar[int]
    moved: int
    def __init__(self, moved: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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
