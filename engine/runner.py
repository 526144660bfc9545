"""Computes steps: owns the model's weights and the KV pool of one worker.

Owns: the translation of a Step into one flat batch of tensors, and of the result into token ids and log-probabilities.
Refuses to know: why these chunks, what follows from the tokens, and that other workers exist. It reads sequences and
never writes to them.

    Step: chunks   [ A: 1 token ] [ B: 200 tokens, samples ] [ C: 1 token ] [ D: 64 tokens ]
    batch rows     C A (one token each, short contexts first) B B B B ... D D ...
    logits         of C, A and the last row of B;  of other rows of B where prompt log-probabilities are wanted
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine import kv_cache
from baton.engine.checkpoint import model_name
from baton.engine.description import ModelDescription
from baton.engine.grammar import NO_LIMITS, Constrained, Grammars
from baton.engine.group import Alone
from baton.engine.loop import Computed
from baton.engine.parallel import Ranks
from baton.engine.part import ModelPart
from baton.engine.sampler import Row, sample, token_logprobs
from baton.engine.step_inputs import Numbers, StepInputs
from baton.proto.messages import TokenLogprob
from baton.proto.settings import EngineSettings
from baton.scheduler.plan import Chunk, Logprobs, Step, StepResult
from baton.scheduler.sequence import Sequence as ScheduledSequence

_MASKS_S = 60.0  # the library bounds its work; one that hangs must not hang the worker
_PROMPT_ROWS = 256  # rows of prompt logits that are in memory at a time


class Runner:
    """A loaded model and its KV pool. `kv` is [block, layer, kv_head, 2, token, head_dim], one contiguous tensor.

    With `ranks` it is rank 0 of them, and `kv` holds its own KV heads only. Construction reads the weights and sets the
    process's number of threads (`threads` 0 leaves torch's own choice); it returns when every rank has read its own.
    Raises CheckpointError, UnsupportedModel, WeightError, OutOfMemory or RankLost.
    """

    def __init__(self, settings: EngineSettings, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._part = part = ModelPart(settings, ranks.group if ranks is not None else Alone())
        config = part.config
        self._decoder, self._cpu = part.decoder, part.cpu
        self.kv = part.kv
        self.geometry = part.geometry
        self.description = ModelDescription(
            name=model_name(settings.model),
            path=part.path,
            max_model_len=part.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            dtype=settings.dtype,
            block_size=settings.block_size,
            num_blocks=len(part.kv),
            kv_bytes_per_token=kv_cache.kv_bytes_per_token(config, part.dtype),
        )
        self._sampled: dict[ScheduledSequence, int] = {}
        self._grammars = Grammars(part.path, config.vocab_size, config.eos_token_ids, settings.threads)
        if ranks is not None:
            ranks.wait_ready()

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
        batch = [chunks[i] for i in order]
        ends = np.cumsum([chunk.num_tokens for chunk in batch])
        first_rows = {i: int(end) - chunks[i].num_tokens for i, end in zip(order, ends, strict=True)}
        sampling = [i for i in order if chunks[i].samples]
        scored = [i for i in order if _num_prompt_rows(chunks[i])]
        constrained = [
            _constrained(k, chunks[i]) for k, i in enumerate(sampling) if chunks[i].sequence.sampling.grammar
        ]
        masks = self._grammars.begin(constrained) if constrained else None
        rows = [first_rows[i] + chunks[i].num_tokens - 1 for i in sampling]
        counts = [len(sampling)] if sampling else []
        for i in scored:
            num_rows = _num_prompt_rows(chunks[i])
            rows.extend(range(first_rows[i], first_rows[i] + num_rows))
            counts.extend(min(_PROMPT_ROWS, num_rows - row) for row in range(0, num_rows, _PROMPT_ROWS))
        inputs = self._inputs(batch, np.array(rows, dtype=np.int64), counts)
        if self._ranks is not None:
            self._ranks.send(inputs)
        hidden = self._part.hidden(inputs)

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

    def _inputs(self, chunks: Sequence[Chunk], rows: Numbers, counts: Sequence[int]) -> StepInputs:
        """The chunks' numbers on one axis."""
        lengths = np.array([chunk.num_tokens for chunk in chunks])
        token_ids = np.concatenate([np.asarray(self._token_ids(chunk), dtype=np.int64) for chunk in chunks])
        context_lens = lengths + np.array([chunk.start for chunk in chunks])
        tables = [np.asarray(chunk.sequence.block_ids, dtype=np.int64) for chunk in chunks]
        return StepInputs(token_ids, lengths, context_lens, tables, rows, counts)

    def _token_ids(self, chunk: Chunk) -> list[int]:
        """The chunk's tokens. One that its sequence does not have yet is what the last step sampled."""
        known = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
        return known or [self._sampled[chunk.sequence]]

    def _prompt_logprobs(self, chunk: Chunk, hidden_RE: torch.Tensor) -> tuple[TokenLogprob, ...]:
        count = chunk.sequence.sampling.prompt_logprobs or 0
        first = chunk.start + 1
        targets = torch.tensor(chunk.sequence.token_ids[first : first + len(hidden_RE)], device=self._part.device)
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
