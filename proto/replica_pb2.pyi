from baton.proto import cluster_pb2 as _cluster_pb2
from baton.proto import inference_pb2 as _inference_pb2
from baton.proto import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RosterEntry(_message.Message):
    __slots__ = ("worker_id", "pool", "role", "state", "restarts", "worker", "note")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool: str
    role: str
    state: str
    restarts: int
    worker: _worker_pb2.WorkerDescription
    note: str
    def __init__(self, worker_id: _Optional[str] = ..., pool: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., restarts: _Optional[int] = ..., worker: _Optional[_Union[_worker_pb2.WorkerDescription, _Mapping]] = ..., note: _Optional[str] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[RosterEntry]
    def __init__(self, workers: _Optional[_Iterable[_Union[RosterEntry, _Mapping]]] = ...) -> None: ...

class Routers(_message.Message):
    __slots__ = ("routers",)
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    routers: _containers.RepeatedCompositeFieldContainer[_cluster_pb2.RouterStatus]
    def __init__(self, routers: _Optional[_Iterable[_Union[_cluster_pb2.RouterStatus, _Mapping]]] = ...) -> None: ...

class KeeperMessage(_message.Message):
    __slots__ = ("roster", "routers")
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    roster: Roster
    routers: Routers
    def __init__(self, roster: _Optional[_Union[Roster, _Mapping]] = ..., routers: _Optional[_Union[Routers, _Mapping]] = ...) -> None: ...

class AbortHereRequest(_message.Message):
    __slots__ = ("request_id", "resumed_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resumed_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., resumed_tokens: _Optional[int] = ...) -> None: ...
