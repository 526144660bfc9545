"""Cost models of GPUs that are not at hand: rooflines of a model's shape and a device's data sheet.

Owns: shapes of models, figures of devices and links, and the arithmetic between them. All results are marked as
estimates. Refuses to know: what they are used for.

    rows      the larger of weights / memory bandwidth and 2 x parameters x rows / arithmetic
    pair      4 x heads x head size x layers operations       kv_token   its bytes / memory bandwidth
    sequence  its row of the output layer, and sampling       overhead   a step's fixed part and its kernel launches
    TP        everything above divided by its degree, and two all-reduces a layer by NVLink or PCIe

Data sheets promise more than programs get, so every rate has the share of it that good kernels reach. What a roofline
cannot know: how well the knee is rounded, tile sizes, stragglers. Expect errors of 20 to 40 %, and the order of set-ups
to be right before the figures are.

    estimate("llama-3-8b@h100")    estimate("llama-3-70b@h200x4", link="roce8")
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.capacity.cost import CostModel, Curve, Origin, RoutingCost, Source, StepCost, TransferCost


class UnknownPreset(ValueError):
    """A name of no model, device or link here; the message lists those that are."""


class DoesNotFit(ValueError):
    """Weights that a device has no memory for."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. `mlp_matrices`: 3 where the activation is gated. `weight_bits` of the layers; the rest has 16."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    mlp_matrices: int = 3
    weight_bits: int = 16
    max_model_len: int = 8192

    @property
    def layer_parameters(self) -> int:
        """Of all layers together, norms left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + self.mlp_matrices * self.hidden * self.mlp)

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> float:
        """Of what a step reads: layers and output layer."""
        return self.layer_parameters * self.weight_bits / 8 + self.head_parameters * 2

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * 2


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: rates by its data sheet (16-bit floats, dense), and the shares of them that kernels reach.

    `peer_bytes_s`: to another GPU of the same machine, in one direction.
    """

    flop_s: float
    memory_bytes_s: float
    memory_gib: float
    peer_bytes_s: float
    flop_share: float = 0.65
    attention_share: float = 0.45
    memory_share: float = 0.85
    peer_share: float = 0.75
    all_reduce_s: float = 10e-6


MODELS = {
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151936, max_model_len=40960),
    "qwen2.5-7b-int4": ModelShape(28, 3584, 28, 4, 128, 18944, 152064, weight_bits=4, max_model_len=32768),
    "opt-13b": ModelShape(40, 5120, 40, 40, 128, 20480, 50272, mlp_matrices=2, max_model_len=2048),
    "opt-66b": ModelShape(64, 9216, 72, 72, 128, 36864, 50272, mlp_matrices=2, max_model_len=2048),
}

DEVICES = {
    "h100": Device(989e12, 3.35e12, 80, 450e9),
    "h200": Device(989e12, 4.8e12, 141, 450e9),
    "h800": Device(989e12, 3.35e12, 80, 200e9),
    "a100": Device(312e12, 2.039e12, 80, 300e9, flop_share=0.75),
    "l40s": Device(362e12, 0.864e12, 48, 32e9, flop_share=0.6, all_reduce_s=30e-6),
    "a10": Device(125e12, 0.6e12, 24, 32e9, flop_share=0.7, all_reduce_s=30e-6),
}

# Bytes a second of one hand-off. `roce8` is 8 network cards of one machine, as measured (142 GiB/s at 4.5 GiB);
# `roce1` one of them. `peer` is the device's own way to its neighbours.
LINKS = {"roce8": 152e9, "roce1": 20e9, "ethernet100": 11e9}
NAMES_OF_LINKS = ("peer", *LINKS)

_START_S = 0.5e-3  # of a read: notice, posting, completion
_RUN_S = 1e-6
_STEP_S = 0.6e-3  # of a step, on the host
_LAUNCH_S = 4e-6
_LAUNCHES = 8  # kernels of a layer
_SAMPLING_S = 2e-6  # of a row
_SPEC = re.compile(r"([\w.\-]+)@([a-z0-9]+?)(?:x(\d+))?")


@dataclass(frozen=True, slots=True)
class Preset:
    """A model on `tp` GPUs of one machine that compute each layer together."""

    name: str
    shape: ModelShape
    device: Device
    tp: int

    def num_blocks(self, block_size: int = 16, memory_share: float = 0.9) -> int:
        """Blocks of KV that fit beside the weights in a share of the memory. Raises DoesNotFit if none does."""
        memory = self.device.memory_gib * (1 << 30) * self.tp * memory_share
        weights = self.shape.weight_bytes + self.shape.head_parameters * 2  # with the embedding, which no step reads
        blocks = int((memory - weights) // (self.shape.kv_bytes_per_token * block_size))
        if blocks < 1:
            problem = f"weights of {weights / 1e9:.0f} GB in {memory / 1e9:.0f} GB leave no room for KV"
            raise DoesNotFit(f"{self.name}: {problem}")
        return blocks


def preset(spec: str) -> Preset:
    """`MODEL@DEVICE` or `MODEL@DEVICExTP`. Raises UnknownPreset."""
    matched = _SPEC.fullmatch(spec)
    if matched is None or matched[1] not in MODELS or matched[2] not in DEVICES or matched[3] == "0":
        raise UnknownPreset(
            f"unknown preset {spec!r}: must be MODEL@DEVICE or MODEL@DEVICExTP with MODEL one of {', '.join(MODELS)} "
            f"and DEVICE one of {', '.join(DEVICES)}"
        )
    tp = int(matched[3] or 1)
    shape = MODELS[matched[1]]
    if shape.heads % tp:
        raise UnknownPreset(f"unknown preset {spec!r}: {tp} GPUs cannot share {shape.heads} heads evenly")
    return Preset(spec, shape, DEVICES[matched[2]], tp)


def estimate(spec: str, link: str = "peer") -> CostModel:
    """The cost model of a preset; `link` is what KV travels by, one of NAMES_OF_LINKS. Raises UnknownPreset."""
    if link not in NAMES_OF_LINKS:
        raise UnknownPreset(f"unknown link {link!r}: must be one of {', '.join(NAMES_OF_LINKS)}")
    chosen = preset(spec)
    shape, device, tp = chosen.shape, chosen.device, chosen.tp
    flop_s = device.flop_s * device.flop_share * tp
    memory_bytes_s = device.memory_bytes_s * device.memory_share * tp
    # Twice a layer each GPU gives and takes 2 (tp - 1) / tp of the rows' 16-bit activations.
    exchanged = 2 * shape.layers * 2 * (tp - 1) / tp * shape.hidden * 2
    row_exchange_s = exchanged / (device.peer_bytes_s * device.peer_share)
    steps = StepCost(
        rows=_roofline(shape.weight_bytes / memory_bytes_s, 2 * shape.layer_parameters / flop_s, row_exchange_s),
        overhead_s=_STEP_S
        + shape.layers * _LAUNCHES * _LAUNCH_S
        + (2 * shape.layers * device.all_reduce_s if tp > 1 else 0.0),
        pair_s=4 * shape.heads * shape.head_dim * shape.layers / (device.flop_s * device.attention_share * tp),
        sequence_s=2 * shape.head_parameters / flop_s + _SAMPLING_S,
        kv_token_s=shape.kv_bytes_per_token / memory_bytes_s,
    )
    link_bytes_s = device.peer_bytes_s * device.peer_share * tp if link == "peer" else LINKS[link]
    return CostModel(
        origin=Origin(
            Source.ESTIMATE, chosen.name.partition("@")[2], chosen.name.partition("@")[0], note=f"link {link}"
        ),
        steps=steps,
        transfer=TransferCost(start_s=_START_S, byte_s=1 / link_bytes_s, run_s=_RUN_S, control_s=0.5e-3),
        routing=RoutingCost(routing_s=2e-3, delivery_s=1e-3, report_delay_s=0.5e-3),
    )


def _roofline(floor_s: float, row_s: float, row_exchange_s: float) -> Curve:
    """Weights are read while rows are computed: the longer of the two counts. What is exchanged comes on top."""
    knee = max(floor_s / row_s, 2.0)
    rows = (1.0, knee, 2 * knee)
    return Curve(rows, tuple(max(floor_s, row_s * count) + row_exchange_s * count for count in rows))
