"""The values that cross a process boundary inside Baton, as frozen dataclasses.

Owns: the shape of each message and its translation to and from protobuf (`to_wire`, `from_wire`).
Refuses to know: who sends it, over what, and what is decided from it.

    client --GenerateRequest--> router --Request--> prefill worker --ChunkNotice--> decode worker
                                router <--TokenBatch / LegFailure / LoadReport-- both workers
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import NamedTuple

from baton.proto import inference_pb2 as inference
from baton.proto import worker_pb2 as wire
from baton.proto.value import value


class Role(StrEnum):
    """What a pool of workers is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Leg(Enum):
    """Which part of a request's life a worker is asked to run."""

    PREFILL = wire.LEG_PREFILL
    DECODE = wire.LEG_DECODE
    WHOLE = wire.LEG_WHOLE


class FinishReason(Enum):
    STOP = inference.FINISH_REASON_STOP
    LENGTH = inference.FINISH_REASON_LENGTH
    ABORTED = inference.FINISH_REASON_ABORTED


class FailureKind(Enum):
    """Why a leg ended without finishing. `router.journey` alone decides what follows from it."""

    REFUSED = wire.LEG_FAILURE_KIND_REFUSED
    OVERLOADED = wire.LEG_FAILURE_KIND_OVERLOADED
    SOURCE_LOST = wire.LEG_FAILURE_KIND_SOURCE_LOST
    LEASE_LOST = wire.LEG_FAILURE_KIND_LEASE_LOST
    WORKER_LOST = wire.LEG_FAILURE_KIND_WORKER_LOST
    DEADLINE = wire.LEG_FAILURE_KIND_DEADLINE
    DRAINING = wire.LEG_FAILURE_KIND_DRAINING
    INTERNAL = wire.LEG_FAILURE_KIND_INTERNAL


@dataclass(frozen=True, slots=True)
class LogitBias:
    token_id: int
    bias: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, every default filled in.

    `temperature` 0 is greedy. `top_k` 0 is off. `max_tokens` and `min_tokens` count output tokens from the end of the
    prompt, tokens emitted by an earlier attempt included. `stop_token_ids` holds the model's end-of-sequence ids too,
    unless the client asked to ignore them. `grammar`: what the output must match, in the grammar library's notation;
    empty is any text. `logprobs`: None is off, 0 reports the chosen token only, k adds the k most
    likely. Randomness is a function of (`seed`, position of the token in the sequence) and of nothing else.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[LogitBias, ...] = ()
    grammar: str = ""

    def to_wire(self) -> wire.ResolvedSampling:
        return wire.ResolvedSampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logit_bias={entry.token_id: entry.bias for entry in self.logit_bias},
            grammar=self.grammar,
        )

    @classmethod
    def from_wire(cls, message: wire.ResolvedSampling) -> Sampling:
        return cls(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            stop_token_ids=tuple(message.stop_token_ids),
            seed=message.seed,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            logit_bias=tuple(LogitBias(token_id, bias) for token_id, bias in sorted(message.logit_bias.items())),
            grammar=message.grammar,
        )


@dataclass(frozen=True, slots=True)
class HandoffSource:
    """Where a decode leg finds its KV: a sequence of one incarnation of one prefill worker."""

    worker_id: str
    incarnation: str
    address: str
    sequence_id: str

    def to_wire(self) -> wire.HandoffSource:
        return wire.HandoffSource(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            address=self.address,
            sequence_id=self.sequence_id,
        )

    @classmethod
    def from_wire(cls, message: wire.HandoffSource) -> HandoffSource:
        return cls(message.worker_id, message.incarnation, message.address, message.sequence_id)


@value
class Request:
    """One leg of one attempt at a client's request, as a worker sees it.

    `sequence_id` is minted by the router for each leg of each attempt and never comes from a client.
    `token_ids` is the prompt followed by the output tokens that the client already has, so `len(token_ids) -
    num_prompt_tokens` is the index of the next output token. `deadline_s` is the time left, not a point in time:
    no clock crosses a machine. `traceparent` is the W3C trace context of the client's request, empty without one.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    leg: Leg = Leg.WHOLE
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    adapter: str = ""
    source: HandoffSource | None = None
    traceparent: str = ""

    def to_wire(self, number: int) -> wire.Submit:
        return wire.Submit(
            number=number,
            sequence_id=self.sequence_id,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling.to_wire(),
            priority=self.priority,
            deadline_s=self.deadline_s,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            leg=self.leg.value,
            source=self.source.to_wire() if self.source is not None else None,
            traceparent=self.traceparent,
        )

    @classmethod
    def from_wire(cls, message: wire.Submit) -> Request:
        return cls(
            sequence_id=message.sequence_id,
            token_ids=tuple(message.token_ids),
            num_prompt_tokens=message.num_prompt_tokens,
            sampling=Sampling.from_wire(message.sampling),
            leg=Leg(message.leg),
            priority=message.priority,
            deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
            cache_salt=message.cache_salt,
            adapter=message.adapter,
            source=HandoffSource.from_wire(message.source) if message.HasField("source") else None,
            traceparent=message.traceparent,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and of its most likely rivals, after penalties and bias, before temperature."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def to_wire(self) -> inference.TokenLogprobs:
        return inference.TokenLogprobs(
            token_id=self.token_id,
            logprob=self.logprob,
            rank=self.rank,
            top=[
                inference.TopLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in zip(self.top_ids, self.top_logprobs, strict=True)
            ],
        )

    @classmethod
    def from_wire(cls, message: inference.TokenLogprobs) -> TokenLogprob:
        return cls(
            token_id=message.token_id,
            logprob=message.logprob,
            rank=message.rank,
            top_ids=tuple(entry.token_id for entry in message.top),
            top_logprobs=tuple(entry.logprob for entry in message.top),
        )


@value
class StageTimes:
    """Seconds that one leg spent in each of its stages. Stages of other legs are 0."""

    prefill_queue: float = 0.0
    prefill_compute: float = 0.0
    handoff_wait: float = 0.0
    handoff_transfer: float = 0.0
    decode_admission: float = 0.0
    decode: float = 0.0

    def to_wire(self) -> wire.StageTimes:
        return wire.StageTimes(
            prefill_queue=self.prefill_queue,
            prefill_compute=self.prefill_compute,
            handoff_wait=self.handoff_wait,
            handoff_transfer=self.handoff_transfer,
            decode_admission=self.decode_admission,
            decode=self.decode,
        )

    @classmethod
    def from_wire(cls, message: wire.StageTimes) -> StageTimes:
        return cls(
            message.prefill_queue,
            message.prefill_compute,
            message.handoff_wait,
            message.handoff_transfer,
            message.decode_admission,
            message.decode,
        )


@value
class LegSummary:
    """What a leg cost. `connector` names what moved the KV, empty where nothing moved."""

    times: StageTimes = field(default_factory=StageTimes)
    cached_tokens: int = 0
    transferred_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    connector: str = ""

    def to_wire(self) -> wire.LegSummary:
        return wire.LegSummary(
            times=self.times.to_wire(),
            cached_tokens=self.cached_tokens,
            transferred_tokens=self.transferred_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            connector=self.connector,
        )

    @classmethod
    def from_wire(cls, message: wire.LegSummary) -> LegSummary:
        return cls(
            times=StageTimes.from_wire(message.times),
            cached_tokens=message.cached_tokens,
            transferred_tokens=message.transferred_tokens,
            recomputed_tokens=message.recomputed_tokens,
            preemptions=message.preemptions,
            connector=message.connector,
        )


class TokenBatch(NamedTuple):
    """The tokens that one leg produced in one step. `summary` comes with the leg's last batch.

    A prefill leg's last batch has its one token and no `finish_reason` unless that token also ends the request. A
    named tuple, as one is made for each token and a frozen dataclass takes several times as long to make.
    """

    sequence_id: str
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    summary: LegSummary | None = None

    def to_wire(self) -> wire.TokenBatch:
        return wire.TokenBatch(
            sequence_id=self.sequence_id,
            first_index=self.first_index,
            token_ids=self.token_ids,
            logprobs=[entry.to_wire() for entry in self.logprobs],
            prompt_logprobs=[entry.to_wire() for entry in self.prompt_logprobs],
            finish_reason=self.finish_reason.value if self.finish_reason is not None else None,
            summary=self.summary.to_wire() if self.summary is not None else None,
        )

    @classmethod
    def from_wire(cls, message: wire.TokenBatch) -> TokenBatch:
        logprobs, prompt_logprobs = message.logprobs, message.prompt_logprobs
        return cls(
            sequence_id=message.sequence_id,
            first_index=message.first_index,
            token_ids=tuple(message.token_ids),
            logprobs=tuple(map(TokenLogprob.from_wire, logprobs)) if logprobs else (),
            prompt_logprobs=tuple(map(TokenLogprob.from_wire, prompt_logprobs)) if prompt_logprobs else (),
            finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
            summary=LegSummary.from_wire(message.summary) if message.HasField("summary") else None,
        )


@dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg that ended without finishing, as a value."""

    sequence_id: str
    kind: FailureKind
    message: str

    def to_wire(self) -> wire.LegFailure:
        return wire.LegFailure(sequence_id=self.sequence_id, kind=self.kind.value, message=self.message)

    @classmethod
    def from_wire(cls, message: wire.LegFailure) -> LegFailure:
        return cls(message.sequence_id, FailureKind(message.kind), message.message)


_COUNTERS = tuple(wire.WorkerCounters.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """Counts since the start of the worker's process; see worker.proto for each."""

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_transferred: int = 0
    tokens_recomputed: int = 0
    tokens_generated: int = 0
    preemptions_recompute: int = 0
    steps: int = 0
    budget_tokens_used: int = 0
    budget_tokens_offered: int = 0
    chunks_pulled: int = 0
    chunks_pulled_early: int = 0
    bytes_pulled: int = 0
    pulls_failed: int = 0
    validations_refused: int = 0
    leases_expired: int = 0
    unknown_completions: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def to_wire(self) -> wire.WorkerCounters:
        return wire.WorkerCounters(**{name: getattr(self, name) for name in _COUNTERS})

    @classmethod
    def from_wire(cls, message: wire.WorkerCounters) -> WorkerCounters:
        return cls(**{name: getattr(message, name) for name in _COUNTERS})


_LOAD_SCALARS = (
    "worker_id",
    "incarnation",
    "sequence_number",
    "running",
    "waiting",
    "receiving",
    "exported",
    "queued_tokens",
    "running_context_tokens",
    "total_blocks",
    "free_blocks",
    "held_blocks",
    "cached_blocks",
    "lent_blocks",
    "quarantined_blocks",
    "step_s",
    "draining",
    "last_submit",
    "age_s",
)


@value
class LoadReport:
    """How busy one incarnation of a worker was `age_s` seconds before it was sent.

    `queued_tokens`: prompt tokens accepted but not computed. `free_blocks` counts free and evictable blocks.
    `last_submit` is the number of the last `Submit` of the receiving router's stream that the figures include.
    """

    worker_id: str
    incarnation: str
    role: Role
    sequence_number: int = 0
    running: int = 0
    waiting: int = 0
    receiving: int = 0
    exported: int = 0
    queued_tokens: int = 0
    running_context_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    held_blocks: int = 0
    cached_blocks: int = 0
    lent_blocks: int = 0
    quarantined_blocks: int = 0
    step_s: float = 0.0
    draining: bool = False
    last_submit: int = 0
    age_s: float = 0.0
    counters: WorkerCounters = field(default_factory=WorkerCounters)

    def stamped(self, last_submit: int, age_s: float) -> LoadReport:
        """The same report, addressed to one router."""
        return replace(self, last_submit=last_submit, age_s=age_s)

    def to_wire(self) -> wire.LoadReport:
        message = wire.LoadReport(role=self.role.value, counters=self.counters.to_wire())
        for name in _LOAD_SCALARS:
            setattr(message, name, getattr(self, name))
        return message

    @classmethod
    def from_wire(cls, message: wire.LoadReport) -> LoadReport:
        return cls(
            role=Role(message.role),
            counters=WorkerCounters.from_wire(message.counters),
            **{name: getattr(message, name) for name in _LOAD_SCALARS},
        )


_DESCRIPTION_SCALARS = (
    "worker_id",
    "incarnation",
    "address",
    "model",
    "max_model_len",
    "vocab_size",
    "block_size",
    "num_blocks",
    "max_num_batched_tokens",
    "max_num_seqs",
    "dtype",
    "connector",
    "version",
    "kv_bytes_per_token",
    "pid",
    "metrics_address",
)


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What does not change during one incarnation of a worker."""

    worker_id: str
    incarnation: str
    address: str
    role: Role
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
    metrics_address: str = ""

    def to_wire(self) -> wire.WorkerDescription:
        message = wire.WorkerDescription(role=self.role.value)
        for name in _DESCRIPTION_SCALARS:
            setattr(message, name, getattr(self, name))
        return message

    @classmethod
    def from_wire(cls, message: wire.WorkerDescription) -> WorkerDescription:
        return cls(role=Role(message.role), **{name: getattr(message, name) for name in _DESCRIPTION_SCALARS})


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A worker serves in the role that it was asked to take.

    `drain_s`: until it was at rest. `num_moved`: legs that did not end in that time, and failed. Both are 0 if it had
    the role already.
    """

    description: WorkerDescription
    drain_s: float
    num_moved: int


@dataclass(frozen=True, slots=True)
class RoleKept:
    """A worker could not change its role, and serves as before. The reason is for a person."""

    reason: str


KV_LAYOUT = "block,layer,kv_head,kv,token,head_dim"
"""The order of a KV pool's dimensions, by which code that lays it out otherwise is told apart."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What two workers' KV must agree on before a byte moves between them: all but `tp_size`, the number of ranks that
    its heads are split over.
    """

    model: str
    version: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tp_size: int = 1
    layout: str = KV_LAYOUT

    def differs_in(self, other: KvGeometry) -> str:
        """The first field that differs and may not; empty if none does."""
        return next((name for name in _ALIKE if getattr(self, name) != getattr(other, name)), "")

    def to_wire(self) -> wire.KvGeometry:
        return wire.KvGeometry(**{name: getattr(self, name) for name in _GEOMETRY})

    @classmethod
    def from_wire(cls, message: wire.KvGeometry) -> KvGeometry:
        return cls(**{name: getattr(message, name) for name in _GEOMETRY})


_GEOMETRY = tuple(wire.KvGeometry.DESCRIPTOR.fields_by_name)
# Other code may fill the other fields otherwise: that is then what to say.
_ALIKE = ("version", *(name for name in _GEOMETRY if name not in ("version", "tp_size")))


@value
class ChunkNotice:
    """The lender's word that tokens [0, num_tokens) of a sequence have KV in these blocks, for one epoch.

    `block_ids[i]` holds tokens [(first_block + i) * block_size, ...). `final` says that the whole prompt has KV;
    `next_token` is then the token that was sampled after it, `age_s` before this notice was made.
    """

    sequence_id: str
    epoch: int
    num_tokens: int
    first_block: int
    block_ids: tuple[int, ...]
    final: bool = False
    next_token: int = 0
    checksum: int = 0
    age_s: float = 0.0

    def to_wire(self) -> wire.ChunkNotice:
        return wire.ChunkNotice(
            sequence_id=self.sequence_id,
            epoch=self.epoch,
            num_tokens=self.num_tokens,
            first_block=self.first_block,
            block_ids=self.block_ids,
            final=self.final,
            next_token=self.next_token,
            checksum=self.checksum,
            age_s=self.age_s,
        )

    @classmethod
    def from_wire(cls, message: wire.ChunkNotice) -> ChunkNotice:
        return cls(
            sequence_id=message.sequence_id,
            epoch=message.epoch,
            num_tokens=message.num_tokens,
            first_block=message.first_block,
            block_ids=tuple(message.block_ids),
            final=message.final,
            next_token=message.next_token,
            checksum=message.checksum,
            age_s=message.age_s,
        )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """All that a worker tells one router at one moment: a step's tokens, failures and its load."""

    batches: tuple[TokenBatch, ...] = ()
    failures: tuple[LegFailure, ...] = ()
    load: LoadReport | None = None

    def to_wire(self) -> wire.WorkerMessage:
        return wire.WorkerMessage(
            batches=[batch.to_wire() for batch in self.batches],
            failures=[failure.to_wire() for failure in self.failures],
            load=self.load.to_wire() if self.load is not None else None,
        )

    @classmethod
    def from_wire(cls, message: wire.WorkerMessage) -> WorkerReport:
        return cls(
            batches=tuple(TokenBatch.from_wire(batch) for batch in message.batches),
            failures=tuple(LegFailure.from_wire(failure) for failure in message.failures),
            load=LoadReport.from_wire(message.load) if message.HasField("load") else None,
        )
