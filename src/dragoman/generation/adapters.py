"""LoRA adapters in the format of PEFT, applied to the rows of a batch that select them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from dragoman.core.errors import ModelFailed

_PREFIX = "base_model.model."
# Layers whose rows are not those of the batch: embeddings take tokens, the head only rows with logits.
_NOT_ADAPTABLE = ("lm_head", "embed_tokens", "wte", "wpe")


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Weights of an adapter for one layer: `up` [out, rank], scaled, and `down` [rank, in]."""

    down: torch.Tensor
    up: torch.Tensor


class AdapterRows:
    """Rows of the current batch by adapter; empty if no row selects one."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Tensor | slice] = {}

    def assign_all(self, name: str) -> None:
        """Set the adapter of all rows, "" for none."""
        self.of = {name: slice(None)} if name else {}

    def assign(self, names: Sequence[str], device: torch.device) -> None:
        """Set the adapter of each row, "" for none."""
        used = set(names) - {""}
        self.of = {
            used_name: torch.tensor([i for i, name in enumerate(names) if name == used_name], device=device)
            for used_name in used
        }


class AdaptedLinear(nn.Module):
    """A linear layer plus the contributions of adapters to their rows."""

    def __init__(self, base: nn.Module, rows: AdapterRows, parts: Mapping[str, LoraWeights]) -> None:
        super().__init__()
        self.base = base
        self._rows, self._parts = rows, parts

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(states)
        for name, rows in self._rows.of.items():
            part = self._parts.get(name)
            if part is not None:
                output[:, rows] += states[:, rows] @ part.down.t() @ part.up.t()
        return output


def attach(model: nn.Module, folders: Mapping[str, Path], dtype: torch.dtype, device: torch.device) -> AdapterRows:
    """Attach adapters, given as folders by name. Raises ModelFailed for one that cannot be applied."""
    rows = AdapterRows()
    by_layer: dict[str, dict[str, LoraWeights]] = {}
    for name, folder in folders.items():
        for path, part in read_adapter(name, folder).items():
            moved = LoraWeights(part.down.to(device, dtype), part.up.to(device, dtype))
            by_layer.setdefault(path, {})[name] = moved
    layers = dict(model.named_modules())
    for path, parts in by_layer.items():
        layer = layers.get(path)
        if layer is None or path.rpartition(".")[2] in _NOT_ADAPTABLE:
            raise ModelFailed(f"adapter '{next(iter(parts))}' is for the layer '{path}', which cannot be adapted")
        above, _, last = path.rpartition(".")
        setattr(layers[above], last, AdaptedLinear(layer, rows, parts))
    return rows


def read_adapter(name: str, folder: Path) -> dict[str, LoraWeights]:
    """Return the weights of an adapter by layer, from `adapter_config.json` and `adapter_model.safetensors`."""
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_bytes())
        weights = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError) as error:
        raise ModelFailed(f"adapter '{name}' cannot be read: {error}") from error
    _check_config(name, config)
    layers = {}
    for key, down in weights.items():
        path, _, kind = key.removeprefix(_PREFIX).partition(".lora_A.")
        if kind != "weight":
            if ".lora_B.weight" in key:
                continue
            raise ModelFailed(f"adapter '{name}' holds '{key}'; expected weights lora_A and lora_B alone")
        up = weights.get(key.replace(".lora_A.", ".lora_B."))
        if up is None:
            raise ModelFailed(f"adapter '{name}' lacks lora_B for '{path}'")
        layers[path] = LoraWeights(down.float(), up.float() * _scale(config, path, down.shape[0]))
    return layers


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    expected = {
        "use_dora": (None, False),
        "bias": (None, "none"),
        "modules_to_save": (None, []),
        "peft_type": ("LORA",),
    }
    for key, allowed in expected.items():
        if config.get(key) not in allowed:
            raise ModelFailed(f"adapter '{name}': {key} is {config.get(key)!r}; expected plain LoRA")


def _scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    """alpha / rank (Hu et al. 2021), or alpha / sqrt(rank) for rank-stabilised ones (Kalajdzievski 2023)."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((value for end, value in patterns.items() if path.endswith(end)), config.get("lora_alpha", rank))
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def folders(model: Path, configured: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders of adapters by name: configured ones, and those in the model's folder `adapters`."""
    if model.is_file():
        return {name: model.parent / path for name, path in configured.items()}
    inside = model / "adapters"
    adapters = {each.name: each for each in sorted(inside.iterdir())} if inside.is_dir() else {}
    adapters = {name: folder for name, folder in adapters.items() if (folder / "adapter_config.json").is_file()}
    return adapters | {name: model / path for name, path in configured.items()}
