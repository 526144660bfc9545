"""One rank's part of a model: its weights, its KV pool, and the computation of a step with them.

Owns: what every rank does the same, rank 0 and a worker of one process included. Refuses to know: sequences, sampling,
the scheduler, and where a step's numbers come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch

from baton import __version__
from baton.engine import kv_cache
from baton.engine.checkpoint import cache_directory, model_name, resolve_model
from baton.engine.graphs import DecodeGraphs, decode_graphs
from baton.engine.group import Group
from baton.engine.layers import Batch, Decoder
from baton.engine.models import llama, mistral, qwen2, qwen3
from baton.engine.models.config import ModelConfig, UnsupportedModel, read_config
from baton.engine.models.decoder import Means, Traits, build
from baton.engine.native import NativeDecoder
from baton.engine.split import split
from baton.engine.step_inputs import StepInputs, resolved
from baton.engine.weights import Piece, Weights
from baton.kernels.cpu.library import open_cpu
from baton.kernels.dispatch import kernels_for
from baton.kernels.kv_store import Slots
from baton.kernels.parcel import send
from baton.proto.messages import KvGeometry
from baton.proto.settings import EngineSettings

_FAMILIES: dict[str, Callable[[ModelConfig], Traits]] = {
    "llama": llama.traits,
    "mistral": mistral.traits,
    "qwen2": qwen2.traits,
    "qwen3": qwen3.traits,
}
_FINGERPRINT_ROWS = 16


class ModelPart:
    """A loaded part of a model. `kv` is [block, layer, kv_head, 2, token, head_dim], one contiguous tensor.

    `first_kv_head`: of the model's KV heads the first that is here; `geometry` is the whole model's. Construction reads
    the weights and sets the process's number of threads (`threads` 0 leaves torch's own choice).

    Raises CheckpointError, UnsupportedModel, WeightError or OutOfMemory.
    """

    def __init__(self, settings: EngineSettings, group: Group) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.path = resolve_model(settings.model)
        self.config = config = read_config(self.path)
        self.max_model_len = _max_model_len(config, settings.max_model_len)
        mine = split(config, group.rank, group.size)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.device = torch.device(settings.device)
        self.cpu = None
        if settings.device == "cpu" and settings.cpu_kernels != "torch":
            self.cpu = open_cpu(cache_directory() / "kernels", torch.get_num_threads())
        # The compiled products as well, if they are wanted or known to be faster.
        multiplies = self.cpu is not None and (settings.cpu_kernels == "native" or self.cpu.multiplies_fast)
        means = Means(kernels_for(self.device, self.cpu), group, self.cpu if multiplies else None)
        with torch.inference_mode():
            weights = Weights(self.path, self.dtype, self.device)
            fingerprint = _fingerprint(config, weights)
            self.decoder: Decoder | NativeDecoder = build(
                config, weights, _FAMILIES[config.family](config), mine, means
            )
        self.first_kv_head = mine.kv_heads.start
        num_kv_heads, block_size = len(mine.kv_heads), settings.block_size
        num_blocks = settings.num_blocks or kv_cache.blocks_for(
            settings.kv_cache_gib, config, block_size, self.dtype, num_kv_heads
        )
        self.kv = kv_cache.allocate(config, num_blocks, block_size, self.dtype, self.device, num_kv_heads)
        self.geometry = KvGeometry(
            model=f"{model_name(settings.model)}@{config.digest}-{fingerprint}",
            version=__version__,
            dtype=settings.dtype,
            block_size=block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            tp_size=group.size,
        )
        self._graphs = self._recorded() if settings.cuda_graphs else None

    def hidden(self, inputs: StepInputs, sampled_R: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the step, leaves its KV in the pool, and returns the final hidden state of the rows asked for.

        `sampled_R`: the tokens of the step before. What is returned lasts until the next call.
        """
        if self._graphs is not None and inputs.decodes_only:
            hidden = self._graphs.hidden(inputs.token_ids, inputs.context_lens, inputs.tables, sampled_R)
            if hidden is not None:
                return hidden
        batch, rows = self._batch(inputs, sampled_R)
        return self.decoder.hidden(batch, self.kv, rows)

    @torch.inference_mode()
    def follow(self, inputs: StepInputs) -> None:
        """The part of a rank other than 0 in a step: everything but what becomes of the scores."""
        hidden, row = self.hidden(inputs), 0
        for count in inputs.scored:
            self.decoder.logits(hidden[row : row + count])
            row += count

    def _batch(self, inputs: StepInputs, sampled_R: torch.Tensor | None) -> tuple[Batch, torch.Tensor]:
        """The batch, and the rows asked for."""
        lengths, context_lens, tables = inputs.query_lens, inputs.context_lens, inputs.tables
        block_size = self.geometry.block_size
        offsets = np.cumsum(lengths) - lengths
        positions = np.arange(len(inputs.token_ids)) + np.repeat(context_lens - lengths - offsets, lengths)
        # One long table of all sequences' blocks: sequence i's part starts at bases[i].
        sizes = np.array([len(table) for table in tables])
        bases = np.cumsum(sizes) - sizes
        blocks = np.concatenate(tables)[positions // block_size + np.repeat(bases, lengths)]
        attention = self.decoder.plan_attention(self.kv, lengths.tolist(), context_lens.tolist(), tables)
        arrays = [inputs.token_ids, positions, blocks, positions % block_size, inputs.rows]
        ids_T, positions_T, blocks_T, offsets_T, rows_R = send(arrays, self.device)
        if (inputs.token_ids < 0).any():
            assert sampled_R is not None
            ids_T = resolved(ids_T, sampled_R)
        return Batch(ids_T, positions_T, Slots(blocks_T, offsets_T), attention), rows_R

    def _recorded(self) -> DecodeGraphs | None:
        """Decode steps as graphs, where there is a GPU and all of the model is on it."""
        if self.device.type != "cuda" or not isinstance(self.decoder, Decoder) or self.decoder.group.size > 1:
            return None
        return decode_graphs(self.decoder, self.kv, -(-self.max_model_len // self.geometry.block_size))


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


def _fingerprint(config: ModelConfig, weights: Weights) -> str:
    """16 hex digits that tell fine-tunes of one configuration apart: the last norm and some rows of the embedding."""
    table = (config.vocab_size, config.hidden_size)
    ids = torch.linspace(0, config.vocab_size - 1, _FINGERPRINT_ROWS).long().tolist()
    rows = weights.stacked([Piece("model.embed_tokens.weight", table, rows=range(i, i + 1)) for i in ids])
    norm = weights.tensor("model.norm.weight", config.hidden_size)
    digest = hashlib.sha256(norm.float().cpu().numpy().tobytes())
    digest.update(rows.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
