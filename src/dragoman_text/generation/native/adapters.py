"""LoRA adapters of a model whose steps the kernels compute."""

import ctypes
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from dragoman.core.errors import ModelFailed
from dragoman_text.generation.adapters import LoraWeights, find_fused
from dragoman_text.generation.fused import FusedModel
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.native.config import COLUMNS, LANES, KernelConfig
from dragoman_text.generation.native.structures import (
    ADAPTED_ROWS,
    LINEAR_LAYERS,
    RANKS,
    AdaptedRun,
    AdapterLayer,
    AdapterPart,
)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """layers: [layers, linear layers]. memory: what they point to."""

    layers: ctypes.Array[AdapterLayer]
    memory: Sequence[object]


class KernelAdapters:
    """The adapters in memory, by name, as the kernels read them; see `AdapterLayers` for PyTorch."""

    def __init__(self, fused: FusedModel, config: KernelConfig) -> None:
        self._fused, self._config = fused, config
        self._adapters: dict[str, _Adapter] = {}

    @property
    def keys(self) -> Collection[str]:
        return self._adapters.keys()

    def add(self, key: str, weights: Mapping[str, LoraWeights], name: str) -> None:
        """As `Adapters.add`."""
        parts: dict[int, list[AdapterPart]] = {}
        memory: list[object] = []
        for path, lora in weights.items():
            place = find_fused(self._fused, name, path, lora)
            memory += (tensors := pack_adapter(lora, self._config.dtype))
            number = place.number * len(LINEAR_LAYERS) + LINEAR_LAYERS.index(place.layer)
            size = tensors[0].numel() // (rank := tensors[1].shape[1])
            part = AdapterPart(*(each.data_ptr() for each in tensors), rank, size, place.first, len(lora.up))
            parts.setdefault(number, []).append(part)
        layers = (AdapterLayer * (self._config.layers * len(LINEAR_LAYERS)))()
        for number, found in parts.items():
            memory.append(array := (AdapterPart * len(found))(*found))
            layers[number] = AdapterLayer(ctypes.addressof(array), len(found))
        self._adapters[key] = _Adapter(layers, memory)

    def remove(self, key: str) -> None:
        self._adapters.pop(key, None)

    def runs(self, rows: Sequence[BatchRow]) -> tuple[ctypes.Array[AdaptedRun], object]:
        """Return the rows of the kernels that have an adapter, in runs; and what to keep alive while they are read.

        Raises ModelFailed for an adapter that is not in memory.
        """
        if not any(row.adapter for row in rows):
            return _NO_RUNS, None
        names = np.repeat(np.array([row.adapter for row in rows], object), [len(row.tokens) for row in rows])
        firsts = np.flatnonzero(np.concatenate(([True], names[1:] != names[:-1]))).tolist()
        runs = [
            AdaptedRun(i, min(ADAPTED_ROWS, stop - i), ctypes.addressof(self._find(names[first]).layers))
            for first, stop in pairwise([*firsts, len(names)])
            if names[first]
            for i in range(first, stop, ADAPTED_ROWS)
        ]
        return (AdaptedRun * len(runs))(*runs), [self._adapters.get(name) for name in {*names}]

    def _find(self, key: str) -> _Adapter:
        if key not in self._adapters:
            raise ModelFailed(f"adapter '{key}' is not in memory")
        return self._adapters[key]


_NO_RUNS = (AdaptedRun * 0)()


def pack_adapter(lora: LoraWeights, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `down` as [rank / 4, inputs / 16, 4, 16], and `up` as [outputs / 64, rank, 64]; padded with 0."""
    down, up = _padded(lora.down, RANKS, LANES), _padded(lora.up.T, RANKS, COLUMNS)
    down = down.view(len(down) // RANKS, RANKS, -1, LANES).transpose(1, 2)
    up = up.view(len(up), -1, COLUMNS).transpose(0, 1)
    return down.to(dtype).contiguous(), up.to(dtype).contiguous()


def _padded(weights: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return weights with rows and columns of 0 up to multiples."""
    height, width = weights.shape
    return torch.nn.functional.pad(weights, (0, -width % columns, 0, -height % rows))
