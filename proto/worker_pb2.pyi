from baton.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_UNSPECIFIED: _ClassVar[Leg]
    LEG_PREFILL: _ClassVar[Leg]
    LEG_DECODE: _ClassVar[Leg]
    LEG_WHOLE: _ClassVar[Leg]

class LegFailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_FAILURE_KIND_UNSPECIFIED: _ClassVar[LegFailureKind]
    LEG_FAILURE_KIND_REFUSED: _ClassVar[LegFailureKind]
    LEG_FAILURE_KIND_OVERLOADED: _ClassVar[LegFailureKind]
    LEG_FAILURE_KIND_SOURCE_LOST: _ClassVar[LegFailureKind]
    LEG_FAILURE_KIND_LEASE_LOST: _ClassVar[LegFailureKind]
    LEG_FAILURE_KIND_WORKER_LOST: _ClassVar[LegFailureKind]
    LEG_FAILURE_KIND_DEADLINE: _ClassVar[LegFailureKind]
    LEG_FAILURE_KIND_DRAINING: _ClassVar[LegFailureKind]
    LEG_FAILURE_KIND_INTERNAL: _ClassVar[LegFailureKind]
LEG_UNSPECIFIED: Leg
LEG_PREFILL: Leg
LEG_DECODE: Leg
LEG_WHOLE: Leg
LEG_FAILURE_KIND_UNSPECIFIED: LegFailureKind
LEG_FAILURE_KIND_REFUSED: LegFailureKind
LEG_FAILURE_KIND_OVERLOADED: LegFailureKind
LEG_FAILURE_KIND_SOURCE_LOST: LegFailureKind
LEG_FAILURE_KIND_LEASE_LOST: LegFailureKind
LEG_FAILURE_KIND_WORKER_LOST: LegFailureKind
LEG_FAILURE_KIND_DEADLINE: LegFailureKind
LEG_FAILURE_KIND_DRAINING: LegFailureKind
LEG_FAILURE_KIND_INTERNAL: LegFailureKind

class TailRequest(_message.Message):
    __slots__ = ("lines", "previous")
    LINES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    lines: int
    previous: bool
    def __init__(self, lines: _Optional[int] = ..., previous: _Optional[bool] = ...) -> None: ...

class LogTail(_message.Message):
    __slots__ = ("process", "host", "incarnation", "file", "lines")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    process: str
    host: str
    incarnation: str
    file: str
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, process: _Optional[str] = ..., host: _Optional[str] = ..., incarnation: _Optional[str] = ..., file: _Optional[str] = ..., lines: _Optional[_Iterable[str]] = ...) -> None: ...

class ResolvedSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "stop_token_ids", "seed", "logprobs", "prompt_logprobs", "logit_bias", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    logprobs: int
    prompt_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., grammar: _Optional[str] = ...) -> None: ...

class HandoffSource(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "sequence_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    sequence_id: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., sequence_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("number", "sequence_id", "token_ids", "num_prompt_tokens", "sampling", "priority", "deadline_s", "cache_salt", "adapter", "leg", "source", "traceparent")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    sequence_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: ResolvedSampling
    priority: int
    deadline_s: float
    cache_salt: str
    adapter: str
    leg: Leg
    source: HandoffSource
    traceparent: str
    def __init__(self, number: _Optional[int] = ..., sequence_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., leg: _Optional[_Union[Leg, str]] = ..., source: _Optional[_Union[HandoffSource, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class AbortLeg(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    def __init__(self, sequence_id: _Optional[str] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_incarnation",)
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: str
    def __init__(self, router_incarnation: _Optional[str] = ...) -> None: ...

class SetDraining(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: _Optional[bool] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "abort", "draining")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    abort: AbortLeg
    draining: SetDraining
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[AbortLeg, _Mapping]] = ..., draining: _Optional[_Union[SetDraining, _Mapping]] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("prefill_queue", "prefill_compute", "handoff_wait", "handoff_transfer", "decode_admission", "decode")
    PREFILL_QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_WAIT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADMISSION_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill_queue: float
    prefill_compute: float
    handoff_wait: float
    handoff_transfer: float
    decode_admission: float
    decode: float
    def __init__(self, prefill_queue: _Optional[float] = ..., prefill_compute: _Optional[float] = ..., handoff_wait: _Optional[float] = ..., handoff_transfer: _Optional[float] = ..., decode_admission: _Optional[float] = ..., decode: _Optional[float] = ...) -> None: ...

class LegSummary(_message.Message):
    __slots__ = ("times", "cached_tokens", "transferred_tokens", "recomputed_tokens", "preemptions", "connector")
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    times: StageTimes
    cached_tokens: int
    transferred_tokens: int
    recomputed_tokens: int
    preemptions: int
    connector: str
    def __init__(self, times: _Optional[_Union[StageTimes, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., transferred_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., connector: _Optional[str] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("sequence_id", "first_index", "token_ids", "logprobs", "prompt_logprobs", "finish_reason", "summary")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finish_reason: _inference_pb2.FinishReason
    summary: LegSummary
    def __init__(self, sequence_id: _Optional[str] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., summary: _Optional[_Union[LegSummary, _Mapping]] = ...) -> None: ...

class LegFailure(_message.Message):
    __slots__ = ("sequence_id", "kind", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    kind: LegFailureKind
    message: str
    def __init__(self, sequence_id: _Optional[str] = ..., kind: _Optional[_Union[LegFailureKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class WorkerCounters(_message.Message):
    __slots__ = ("prompt_tokens_computed", "prompt_tokens_cached", "prompt_tokens_transferred", "tokens_recomputed", "tokens_generated", "preemptions_recompute", "steps", "budget_tokens_used", "budget_tokens_offered", "chunks_pulled", "chunks_pulled_early", "bytes_pulled", "pulls_failed", "validations_refused", "leases_expired", "unknown_completions", "requests_finished", "requests_aborted", "prefix_queries", "prefix_hits")
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_OFFERED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_PULLED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_PULLED_EARLY_FIELD_NUMBER: _ClassVar[int]
    BYTES_PULLED_FIELD_NUMBER: _ClassVar[int]
    PULLS_FAILED_FIELD_NUMBER: _ClassVar[int]
    VALIDATIONS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    LEASES_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    prompt_tokens_transferred: int
    tokens_recomputed: int
    tokens_generated: int
    preemptions_recompute: int
    steps: int
    budget_tokens_used: int
    budget_tokens_offered: int
    chunks_pulled: int
    chunks_pulled_early: int
    bytes_pulled: int
    pulls_failed: int
    validations_refused: int
    leases_expired: int
    unknown_completions: int
    requests_finished: int
    requests_aborted: int
    prefix_queries: int
    prefix_hits: int
    def __init__(self, prompt_tokens_computed: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., prompt_tokens_transferred: _Optional[int] = ..., tokens_recomputed: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., preemptions_recompute: _Optional[int] = ..., steps: _Optional[int] = ..., budget_tokens_used: _Optional[int] = ..., budget_tokens_offered: _Optional[int] = ..., chunks_pulled: _Optional[int] = ..., chunks_pulled_early: _Optional[int] = ..., bytes_pulled: _Optional[int] = ..., pulls_failed: _Optional[int] = ..., validations_refused: _Optional[int] = ..., leases_expired: _Optional[int] = ..., unknown_completions: _Optional[int] = ..., requests_finished: _Optional[int] = ..., requests_aborted: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("worker_id", "incarnation", "sequence_number", "role", "running", "waiting", "receiving", "exported", "queued_tokens", "running_context_tokens", "total_blocks", "free_blocks", "held_blocks", "cached_blocks", "lent_blocks", "quarantined_blocks", "step_s", "draining", "last_submit", "counters", "age_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LAST_SUBMIT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    sequence_number: int
    role: str
    running: int
    waiting: int
    receiving: int
    exported: int
    queued_tokens: int
    running_context_tokens: int
    total_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    lent_blocks: int
    quarantined_blocks: int
    step_s: float
    draining: bool
    last_submit: int
    counters: WorkerCounters
    age_s: float
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., sequence_number: _Optional[int] = ..., role: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., receiving: _Optional[int] = ..., exported: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., running_context_tokens: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., lent_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., step_s: _Optional[float] = ..., draining: _Optional[bool] = ..., last_submit: _Optional[int] = ..., counters: _Optional[_Union[WorkerCounters, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerDescription
    def __init__(self, worker: _Optional[_Union[WorkerDescription, _Mapping]] = ...) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "role", "model", "max_model_len", "vocab_size", "block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "dtype", "connector", "version", "kv_bytes_per_token", "pid", "metrics_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    role: str
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    dtype: str
    connector: str
    version: str
    kv_bytes_per_token: int
    pid: int
    metrics_address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., dtype: _Optional[str] = ..., connector: _Optional[str] = ..., version: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., pid: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class Lane(_message.Message):
    __slots__ = ("source", "source_incarnation", "source_address", "transport", "state", "reason", "gb_per_s", "measured_bytes", "round_trip_s", "expected_gb_per_s", "is_slow", "age_s")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    IS_SLOW_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    source: str
    source_incarnation: str
    source_address: str
    transport: str
    state: str
    reason: str
    gb_per_s: float
    measured_bytes: int
    round_trip_s: float
    expected_gb_per_s: float
    is_slow: bool
    age_s: float
    def __init__(self, source: _Optional[str] = ..., source_incarnation: _Optional[str] = ..., source_address: _Optional[str] = ..., transport: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., gb_per_s: _Optional[float] = ..., measured_bytes: _Optional[int] = ..., round_trip_s: _Optional[float] = ..., expected_gb_per_s: _Optional[float] = ..., is_slow: _Optional[bool] = ..., age_s: _Optional[float] = ...) -> None: ...

class Lanes(_message.Message):
    __slots__ = ("lanes",)
    LANES_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedCompositeFieldContainer[Lane]
    def __init__(self, lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "batches", "failures", "load", "lanes")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    batches: _containers.RepeatedCompositeFieldContainer[TokenBatch]
    failures: _containers.RepeatedCompositeFieldContainer[LegFailure]
    load: LoadReport
    lanes: Lanes
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., batches: _Optional[_Iterable[_Union[TokenBatch, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[LegFailure, _Mapping]]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., lanes: _Optional[_Union[Lanes, _Mapping]] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ("sources", "timeout_s", "probe_bytes")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PROBE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[HandoffSource]
    timeout_s: float
    probe_bytes: int
    def __init__(self, sources: _Optional[_Iterable[_Union[HandoffSource, _Mapping]]] = ..., timeout_s: _Optional[float] = ..., probe_bytes: _Optional[int] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("host", "boot_id", "unix_s", "num_cores", "memory_bytes", "available_bytes", "shm_bytes", "shm_free_bytes", "num_gpus")
    HOST_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHM_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_GPUS_FIELD_NUMBER: _ClassVar[int]
    host: str
    boot_id: str
    unix_s: float
    num_cores: int
    memory_bytes: int
    available_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    num_gpus: int
    def __init__(self, host: _Optional[str] = ..., boot_id: _Optional[str] = ..., unix_s: _Optional[float] = ..., num_cores: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., shm_bytes: _Optional[int] = ..., shm_free_bytes: _Optional[int] = ..., num_gpus: _Optional[int] = ...) -> None: ...

class WorkerExamination(_message.Message):
    __slots__ = ("worker", "machine", "lanes", "device")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerDescription
    machine: Machine
    lanes: _containers.RepeatedCompositeFieldContainer[Lane]
    device: str
    def __init__(self, worker: _Optional[_Union[WorkerDescription, _Mapping]] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ..., lanes: _Optional[_Iterable[_Union[Lane, _Mapping]]] = ..., device: _Optional[str] = ...) -> None: ...

class KvGeometry(_message.Message):
    __slots__ = ("model", "version", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "tp_size", "layout")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp_size: int
    layout: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., tp_size: _Optional[int] = ..., layout: _Optional[str] = ...) -> None: ...

class WatcherHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "geometry", "connector")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    geometry: KvGeometry
    connector: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., geometry: _Optional[_Union[KvGeometry, _Mapping]] = ..., connector: _Optional[str] = ...) -> None: ...

class LenderHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "geometry", "address", "address_crc32", "refused", "lease_s", "connector", "num_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_CRC32_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    geometry: KvGeometry
    address: bytes
    address_crc32: int
    refused: str
    lease_s: float
    connector: str
    num_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., geometry: _Optional[_Union[KvGeometry, _Mapping]] = ..., address: _Optional[bytes] = ..., address_crc32: _Optional[int] = ..., refused: _Optional[str] = ..., lease_s: _Optional[float] = ..., connector: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    def __init__(self, sequence_id: _Optional[str] = ...) -> None: ...

class Validate(_message.Message):
    __slots__ = ("sequence_id", "epoch", "token")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    token: int
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("sequence_id", "epoch")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class WatcherMessage(_message.Message):
    __slots__ = ("hello", "subscribe", "validate", "acknowledge", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: WatcherHello
    subscribe: Subscribe
    validate: Validate
    acknowledge: Acknowledge
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[WatcherHello, _Mapping]] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., validate: _Optional[_Union[Validate, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class ChunkNotice(_message.Message):
    __slots__ = ("sequence_id", "epoch", "num_tokens", "first_block", "block_ids", "final", "next_token", "checksum", "age_s")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    num_tokens: int
    first_block: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    final: bool
    next_token: int
    checksum: int
    age_s: float
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_block: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., final: _Optional[bool] = ..., next_token: _Optional[int] = ..., checksum: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class Validated(_message.Message):
    __slots__ = ("sequence_id", "token", "lent")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    token: int
    lent: bool
    def __init__(self, sequence_id: _Optional[str] = ..., token: _Optional[int] = ..., lent: _Optional[bool] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("sequence_id", "epoch", "gone", "reason")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    epoch: int
    gone: bool
    reason: str
    def __init__(self, sequence_id: _Optional[str] = ..., epoch: _Optional[int] = ..., gone: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class LenderMessage(_message.Message):
    __slots__ = ("hello", "notice", "validated", "revoked", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    VALIDATED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: LenderHello
    notice: ChunkNotice
    validated: Validated
    revoked: Revoked
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[LenderHello, _Mapping]] = ..., notice: _Optional[_Union[ChunkNotice, _Mapping]] = ..., validated: _Optional[_Union[Validated, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class ExportPart(_message.Message):
    __slots__ = ("number", "export_id", "block_ids")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EXPORT_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    export_id: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., export_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PullPart(_message.Message):
    __slots__ = ("pull_id", "peer", "address", "source_blocks", "destination_blocks", "first_head", "num_heads", "checksum")
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    peer: str
    address: bytes
    source_blocks: _containers.RepeatedScalarFieldContainer[int]
    destination_blocks: _containers.RepeatedScalarFieldContainer[int]
    first_head: int
    num_heads: int
    checksum: int
    def __init__(self, pull_id: _Optional[int] = ..., peer: _Optional[str] = ..., address: _Optional[bytes] = ..., source_blocks: _Optional[_Iterable[int]] = ..., destination_blocks: _Optional[_Iterable[int]] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class ConnectorCommand(_message.Message):
    __slots__ = ("export", "pull", "forget", "release", "close")
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    export: ExportPart
    pull: PullPart
    forget: str
    release: str
    close: bool
    def __init__(self, export: _Optional[_Union[ExportPart, _Mapping]] = ..., pull: _Optional[_Union[PullPart, _Mapping]] = ..., forget: _Optional[str] = ..., release: _Optional[str] = ..., close: _Optional[bool] = ...) -> None: ...

class PullPartEvent(_message.Message):
    __slots__ = ("pull_id", "state", "num_bytes", "reason", "checksums")
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    pull_id: int
    state: str
    num_bytes: int
    reason: str
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pull_id: _Optional[int] = ..., state: _Optional[str] = ..., num_bytes: _Optional[int] = ..., reason: _Optional[str] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class ConnectorReport(_message.Message):
    __slots__ = ("address", "events", "exported", "checksum")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    address: bytes
    events: _containers.RepeatedCompositeFieldContainer[PullPartEvent]
    exported: int
    checksum: int
    def __init__(self, address: _Optional[bytes] = ..., events: _Optional[_Iterable[_Union[PullPartEvent, _Mapping]]] = ..., exported: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...
