"""Tensors of a safetensors checkpoint, by name.

Owns: which file holds which tensor, shape checks, dtype conversion and stacking of tensors that are computed as one.
Refuses to know: what the tensors mean; that is a family's business. Files are mapped, not read: a tensor costs its own
pages once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class WeightError(ValueError):
    """A checkpoint's file or tensor that is missing, damaged or of the wrong shape."""


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

    def has(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor, a copy of its own."""
        return self.stacked([name], *shape)

    def stacked(self, names: Sequence[str], *shape: int) -> torch.Tensor:
        """Tensors joined along the first axis; `shape` is that of the result, -1 of the first axis is not accepted."""
        parts = [self._mapped(name) for name in names]
        for name, part in zip(names, parts, strict=True):
            if part.dtype not in _FLOATS:
                raise WeightError(f"{self._directory}: {name} has dtype {part.dtype}, which is not supported")
            if part.dim() != len(shape) or tuple(part.shape[1:]) != shape[1:]:
                raise WeightError(f"{self._directory}: {name} has shape {list(part.shape)}, expected {list(shape)}")
        rows = sum(part.shape[0] for part in parts)
        if rows != shape[0]:
            found = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(names, parts, strict=True))
            raise WeightError(f"{self._directory}: {found}: {rows} rows, expected shape {list(shape)}")
        joined = torch.empty(shape, dtype=self._dtype, device=self._device)
        row = 0
        for part in parts:
            joined[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        return joined

    def _mapped(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise WeightError(f"{self._directory}: tensor {name} is missing")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
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
