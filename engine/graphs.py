"""Decode steps as CUDA graphs: launched as one piece, instead of some ten kernels for each layer.

Owns: the buckets of batch sizes, the inputs that graphs read from fixed places on the device, and one recorded step a
bucket. Refuses to know: sequences, sampling, and steps with prompts, whose shapes never repeat.

    step of 5 sequences -> bucket 8:   rows 0..4 are theirs, rows 5..7 are padding: context 0, no block, token 0
    inputs    | token ids | positions | blocks | offsets | bounds | tables |     written before each run, read in it

Padding stores nothing and attends to nothing, so what is computed for it is finite and never looked at. All buckets
read the same places, each its first rows; the steps run one after the other.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from baton.engine.layers import Batch, Decoder
from baton.engine.step_inputs import Numbers, resolved
from baton.kernels.kv_store import Slots
from baton.kernels.parcel import send

LARGEST_BATCH = 256  # larger ones keep a GPU busy without being recorded

Run = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Records a computation; what it returns does it again, on what then lies in the same places."""

    def record(self, compute: Run) -> Run: ...


class GraphRecorder:
    """CUDA graphs that share their memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, compute: Run) -> Run:
        # Kernels are compiled and libraries open their handles at the first run, which no graph may hold.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = compute()

        def run() -> torch.Tensor:
            graph.replay()
            return out

        return run


def decode_graphs(decoder: Decoder, pool_NLK2SD: torch.Tensor, max_blocks: int) -> DecodeGraphs | None:
    """Recorded steps on the GPU where pool and weights are; None where its kernels cannot be recorded."""
    if not decoder.kernels.records:
        return None
    return DecodeGraphs(decoder, pool_NLK2SD, LARGEST_BATCH, max_blocks, GraphRecorder())


def buckets_up_to(most: int) -> list[int]:
    """1, 2, 4, then multiples of 8, from 64 on of 16, and `most`: padding costs at most a quarter above 16 rows."""
    sizes = {1, 2, 4, *range(8, min(most, 64), 8), *range(64, most, 16)}
    return [*sorted(size for size in sizes if size < most), most]


class DecodeGraphs:
    """Recorded decode steps of up to `max_num_seqs` sequences with up to `max_blocks` blocks each.

    Construction records every bucket. `hidden` returns a view that the next call overwrites: use it on the same stream.
    """

    def __init__(
        self, decoder: Decoder, pool_NLK2SD: torch.Tensor, max_num_seqs: int, max_blocks: int, recorder: Recorder
    ) -> None:
        device = pool_NLK2SD.device
        self._block_size = pool_NLK2SD.shape[4]
        self._buckets = buckets_up_to(max_num_seqs)
        self._numbers = torch.zeros((4, max_num_seqs), dtype=torch.int64, device=device)
        self._bounds = torch.zeros((max_num_seqs, 4), dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        rows = torch.arange(max_num_seqs, device=device)
        self._write(max_num_seqs, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), [])
        self._runs: dict[int, Run] = {}
        with torch.inference_mode():
            for size in reversed(self._buckets):  # the largest first: the others fit into its memory
                token_ids, positions, blocks, offsets = self._numbers[:, :size].unbind()
                plan = decoder.kernels.fixed_plan(
                    pool_NLK2SD, self._bounds[:size], self._tables[:size], decoder.num_heads
                )
                batch = Batch(token_ids, positions, Slots(blocks, offsets), plan)
                self._runs[size] = recorder.record(_step(decoder, batch, pool_NLK2SD, rows[:size]))

    def hidden(
        self,
        token_ids: Numbers,
        context_lens: Numbers,
        tables: Sequence[Numbers],
        sampled_R: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The final hidden state of each sequence's last token, [B, E]; None for more sequences than buckets take.

        `context_lens` count that token, whose id is in `token_ids`, or in `sampled_R` as StepInputs says.
        """
        place = bisect_left(self._buckets, len(token_ids))
        if place == len(self._buckets):
            return None
        size = self._buckets[place]
        self._write(size, token_ids, context_lens, tables)
        if (token_ids < 0).any():
            assert sampled_R is not None
            self._numbers[0, :size] = resolved(self._numbers[0, :size], sampled_R)
        return self._runs[size]()[: len(token_ids)]

    def _write(self, size: int, token_ids: Numbers, context_lens: Numbers, tables: Sequence[Numbers]) -> None:
        count, positions = len(token_ids), context_lens - 1
        numbers = np.zeros((4, size), dtype=np.int64)
        numbers[2] = -1
        numbers[0, :count], numbers[1, :count], numbers[3, :count] = token_ids, positions, positions % self._block_size
        numbers[2, :count] = [table[i] for table, i in zip(tables, positions // self._block_size, strict=True)]
        bounds = np.zeros((size, 4), dtype=np.int32)
        bounds[:, 0], bounds[:, 1] = np.arange(size), 1
        bounds[:count, 2] = context_lens
        used = -(-context_lens // self._block_size)
        padded = np.zeros((count, int(used.max(initial=0))), dtype=np.int32)
        for row, table, width in zip(padded, tables, used.tolist(), strict=True):
            row[:width] = table[:width]
        sent_numbers, sent_bounds, sent_tables = send([numbers, bounds, padded], self._numbers.device)
        self._numbers[:, :size].copy_(sent_numbers)
        self._bounds[:size].copy_(sent_bounds)
        self._tables[:count, : padded.shape[1]].copy_(sent_tables)


def _step(decoder: Decoder, batch: Batch, pool_NLK2SD: torch.Tensor, rows_R: torch.Tensor) -> Run:
    return lambda: decoder.hidden(batch, pool_NLK2SD, rows_R)
