"""Tensors of a safetensors checkpoint, by name.

Owns: which file holds which tensor, shape checks, dtype conversion, stacking of tensors that are computed as one, and
reading parts of tensors. Refuses to know: what the tensors mean; that is a family's business. Files are mapped, not
read: a tensor costs its own pages once, and of a part no other page is touched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class WeightError(ValueError):
    """A checkpoint's file or tensor that is missing, damaged or of the wrong shape."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows and columns of a tensor that has this shape as a whole; None is all of them."""

    name: str
    shape: tuple[int, ...]
    rows: range | None = None
    columns: range | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the tensor is left out."""
        return self.cut_shape == self.shape

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        kept = (self.rows, self.columns)
        return tuple(
            extent if cut is None else len(cut) for extent, cut in zip(self.shape, kept[: len(self.shape)], strict=True)
        )


class Weights:
    """The tensors of one checkpoint directory, converted to one dtype and device as they are asked for."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._files: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightError(f"{path}: {error}") from error
            reader: Any = file
            self._files.update(dict.fromkeys(reader.keys(), reader))

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor, a copy of its own."""
        return self.stacked([Piece(name, shape)])

    def stacked(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Pieces joined along the first axis, a copy of its own. Raises WeightError with the tensor's name."""
        shapes = [piece.cut_shape for piece in pieces]
        joined = torch.empty(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device
        )
        row = 0
        for piece, shape in zip(pieces, shapes, strict=True):
            joined[row : row + shape[0]].copy_(self._mapped(piece))
            row += shape[0]
        return joined

    def _mapped(self, piece: Piece) -> torch.Tensor:
        name = piece.name
        if name not in self._files:
            raise WeightError(f"{self._directory}: tensor {name} is missing")
        file = self._files[name]
        view = file.get_slice(name)
        shape = tuple(view.get_shape())
        if shape != piece.shape:
            raise WeightError(f"{self._directory}: {name} has shape {list(shape)}, expected {list(piece.shape)}")
        if piece.is_whole:
            tensor: torch.Tensor = file.get_tensor(name)
        else:
            cuts = [
                slice(cut.start, cut.stop) if cut is not None else slice(None) for cut in (piece.rows, piece.columns)
            ]
            tensor = view[tuple(cuts[: len(shape)])]
        if tensor.dtype not in _FLOATS:
            raise WeightError(f"{self._directory}: {name} has dtype {tensor.dtype}, which is not supported")
        return tensor


def _weight_files(directory: Path) -> list[Path]:
    """The index's shards, or else the one file that holds everything."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise WeightError(f"{index}: not an index of safetensors files: {error!r}") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise WeightError(f"{index}: names files that are missing: {', '.join(missing)}")
        return [directory / name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    raise WeightError(f"{directory}: neither model.safetensors nor model.safetensors.index.json is there")
