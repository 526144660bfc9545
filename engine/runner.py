"""Computes steps: owns the model's weights and the KV pool of one worker.

Owns: the translation of a Step into one flat batch of tensors, and of the result into token ids and log-probabilities.
Refuses to know: why these chunks, what follows from the tokens, and that other workers exist. It reads sequences and
never writes to them.

    Step: chunks   [ A: 1 token ] [ B: 200 tokens, samples ] [ C: 1 token ] [ D: 64 tokens ]
    batch rows     C A (one token each, short contexts first) B B B B ... D D ...
    logits         of C, A and the last row of B;  of other rows of B where prompt log-probabilities are wanted
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from baton import __version__
from baton.engine import kv_cache
from baton.engine.checkpoint import cache_directory, model_name, resolve_model
from baton.engine.description import ModelDescription
from baton.engine.grammar import NO_LIMITS, Constrained, Grammars
from baton.engine.layers import Batch, Decoder
from baton.engine.loop import Computed
from baton.engine.models import llama, mistral, qwen2, qwen3
from baton.engine.models.config import ModelConfig, UnsupportedModel, read_config
from baton.engine.native import NativeDecoder
from baton.engine.sampler import Row, sample, token_logprobs
from baton.engine.weights import Weights
from baton.kernels.cpu.library import Cpu, open_cpu
from baton.kernels.kv_store import Slots
from baton.kernels.paged_attention import plan_attention
from baton.proto.messages import KvGeometry, TokenLogprob
from baton.proto.settings import EngineSettings
from baton.scheduler.plan import Chunk, Logprobs, Step, StepResult
from baton.scheduler.sequence import Sequence as ScheduledSequence

_LOADERS: dict[str, Callable[[ModelConfig, Weights, Cpu | None], Decoder | NativeDecoder]] = {
    "llama": llama.load,
    "mistral": mistral.load,
    "qwen2": qwen2.load,
    "qwen3": qwen3.load,
}
_MASKS_S = 60.0  # the library bounds its work; one that hangs must not hang the worker
_PROMPT_ROWS = 256  # rows of prompt logits that are in memory at a time
_FINGERPRINT_ROWS = 16


class Runner:
    """A loaded model and its KV pool. `kv` is [block, layer, kv_head, 2, token, head_dim], one contiguous tensor.

    Construction reads the weights and sets the process's number of threads (`threads` 0 leaves torch's own choice).
    Raises CheckpointError, UnsupportedModel, WeightError or OutOfMemory.
    """

    def __init__(self, settings: EngineSettings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        path = resolve_model(settings.model)
        config = read_config(path)
        max_model_len = _max_model_len(config, settings.max_model_len)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        self._device = torch.device(settings.device)
        self._block_size = settings.block_size
        self._cpu = None
        if settings.device == "cpu" and settings.cpu_kernels != "torch":
            self._cpu = open_cpu(cache_directory() / "kernels", torch.get_num_threads())
        with torch.inference_mode():
            weights = Weights(path, dtype, self._device)
            self._decoder = _LOADERS[config.family](config, weights, self._products(settings))
        num_blocks = settings.num_blocks or kv_cache.blocks_for(
            settings.kv_cache_gib, config, settings.block_size, dtype
        )
        self.kv = kv_cache.allocate(config, num_blocks, settings.block_size, dtype, self._device)
        name = model_name(settings.model)
        self.description = ModelDescription(
            name=name,
            path=path,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            dtype=settings.dtype,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            kv_bytes_per_token=kv_cache.kv_bytes_per_token(config, dtype),
        )
        self._sampled: dict[ScheduledSequence, int] = {}
        self._grammars = Grammars(path, config.vocab_size, config.eos_token_ids, settings.threads)
        self.geometry = KvGeometry(
            model=f"{name}@{config.digest}-{_fingerprint(self._decoder)}",
            version=__version__,
            dtype=settings.dtype,
            block_size=settings.block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def _products(self, settings: EngineSettings) -> Cpu | None:
        """The compiled kernels, if they are to do the products too."""
        wanted = self._cpu is not None and (settings.cpu_kernels == "native" or self._cpu.multiplies_fast)
        return self._cpu if wanted else None

    def launch(self, step: Step) -> Computed:
        """Computes a step; see `run`. On a CPU it is over when this returns."""
        return Computed(self.run(step))

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult:
        """Computes all chunks, leaves their KV in the pool, and samples for the chunks that reach their end.

        Masks of constrained rows are filled beside it, by a thread that does not need the interpreter for long.
        """
        chunks = step.chunks
        if not chunks:
            return StepResult([])
        order = sorted(range(len(chunks)), key=lambda i: _batch_position(chunks[i]))
        batch, offsets = self._batch([chunks[i] for i in order])
        first_rows = dict(zip(order, offsets, strict=True))
        sampling = [i for i in order if chunks[i].samples]
        scored = [i for i in order if _num_prompt_rows(chunks[i])]
        constrained = [
            _constrained(k, chunks[i]) for k, i in enumerate(sampling) if chunks[i].sequence.sampling.grammar
        ]
        masks = self._grammars.begin(constrained) if constrained else None
        rows = [first_rows[i] + chunks[i].num_tokens - 1 for i in sampling]
        for i in scored:
            rows.extend(range(first_rows[i], first_rows[i] + _num_prompt_rows(chunks[i])))
        hidden = self._decoder.hidden(batch, self.kv, torch.tensor(rows, dtype=torch.int64, device=self._device))

        token_ids = [-1] * len(chunks)
        logprobs: dict[int, Logprobs] = {}
        limits = NO_LIMITS
        if sampling:
            logits = self._decoder.logits(hidden[: len(sampling)])
            limits = masks.result(_MASKS_S) if masks is not None else NO_LIMITS
            samples = sample(logits, [_row(chunks[i]) for i in sampling], limits.mask)
            for i, token_id in zip(sampling, samples.token_ids, strict=True):
                token_ids[i] = token_id
            self._sampled = {chunks[i].sequence: token_ids[i] for i in sampling}
            logprobs = {sampling[k]: Logprobs(sampled=entry) for k, entry in samples.logprobs.items()}
            for k in limits.refused:
                token_ids[sampling[k]] = min(chunks[sampling[k]].sequence.stop_token_ids)
        row = len(sampling)
        for i in scored:
            count = _num_prompt_rows(chunks[i])
            prompt = self._prompt_logprobs(chunks[i], hidden[row : row + count])
            logprobs[i] = Logprobs(sampled=logprobs[i].sampled if i in logprobs else None, prompt=prompt)
            row += count
        return StepResult(token_ids, logprobs, {sampling[k]: reason for k, reason in limits.refused.items()})

    def _batch(self, chunks: Sequence[Chunk]) -> tuple[Batch, list[int]]:
        """The chunks' tokens on one axis, and the row at which each chunk starts."""
        lengths = np.array([chunk.num_tokens for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        offsets = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) + np.repeat(starts - offsets, lengths)
        token_ids = np.concatenate([np.asarray(self._token_ids(chunk), dtype=np.int64) for chunk in chunks])
        tables = [np.asarray(chunk.sequence.block_ids, dtype=np.int64) for chunk in chunks]
        # One long table of all sequences' blocks: sequence i's part starts at bases[i].
        sizes = np.array([len(table) for table in tables])
        bases = np.cumsum(sizes) - sizes
        blocks = np.concatenate(tables)[positions // self._block_size + np.repeat(bases, lengths)]
        attention = plan_attention(self.kv, lengths.tolist(), (starts + lengths).tolist(), tables, self._cpu)
        slots = Slots(self._tensor(blocks), self._tensor(positions % self._block_size))
        return Batch(self._tensor(token_ids), self._tensor(positions), slots, attention), offsets.tolist()

    def _token_ids(self, chunk: Chunk) -> list[int]:
        """The chunk's tokens. One that its sequence does not have yet is what the last step sampled."""
        known = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
        return known or [self._sampled[chunk.sequence]]

    def _tensor(self, values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _prompt_logprobs(self, chunk: Chunk, hidden_RE: torch.Tensor) -> tuple[TokenLogprob, ...]:
        count = chunk.sequence.sampling.prompt_logprobs or 0
        first = chunk.start + 1
        targets = torch.tensor(chunk.sequence.token_ids[first : first + len(hidden_RE)], device=self._device)
        entries: list[TokenLogprob] = []
        for row in range(0, len(targets), _PROMPT_ROWS):
            logits = self._decoder.logits(hidden_RE[row : row + _PROMPT_ROWS])
            entries.extend(token_logprobs(logits, targets[row : row + _PROMPT_ROWS], [count] * len(logits)))
        return tuple(entries)


def _batch_position(chunk: Chunk) -> tuple[bool, int]:
    """One-token chunks first, by the length of their context: neighbours share a group in attention."""
    return chunk.num_tokens > 1, chunk.start


def _num_prompt_rows(chunk: Chunk) -> int:
    """Leading rows of a chunk whose next token is a prompt token that somebody wants scored."""
    if chunk.sequence.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(chunk.num_tokens, chunk.sequence.num_prompt_tokens - 1 - chunk.start))


def _row(chunk: Chunk) -> Row:
    sequence = chunk.sequence
    return Row(sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens, chunk.start + chunk.num_tokens)


def _constrained(row: int, chunk: Chunk) -> Constrained:
    sequence = chunk.sequence
    return Constrained(
        row=row,
        sequence_id=sequence.sequence_id,
        grammar=sequence.sampling.grammar,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_tokens=chunk.start + chunk.num_tokens,
        stop_token_ids=sequence.stop_token_ids,
    )


def _max_model_len(config: ModelConfig, wanted: int) -> int:
    if wanted > config.max_model_len:
        raise UnsupportedModel(f"max_model_len {wanted}: the model has positions up to {config.max_model_len}")
    length = wanted or config.max_model_len
    if config.sliding_window is not None and config.sliding_window < length:
        raise UnsupportedModel(
            f"sliding_window {config.sliding_window} is shorter than max_model_len {length}: sliding-window attention "
            f"is not supported, set max_model_len to {config.sliding_window} or less"
        )
    return length


def _fingerprint(decoder: Decoder | NativeDecoder) -> str:
    """16 hex digits that tell fine-tunes of one configuration apart: the last norm and some rows of the embedding."""
    rows = torch.linspace(0, len(decoder.embedding) - 1, _FINGERPRINT_ROWS).long()
    digest = hashlib.sha256(decoder.norm.float().cpu().numpy().tobytes())
    digest.update(decoder.embedding[rows.to(decoder.embedding.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
