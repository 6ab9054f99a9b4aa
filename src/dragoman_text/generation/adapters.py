"""LoRA adapters in the format of PEFT, applied to the rows of a batch that select them."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import nn

from dragoman.core.documents import read_json
from dragoman.core.errors import ModelFailed
from dragoman_text.generation.fused import FusedModel, PackedLinear

_PREFIX = "base_model.model."
# Layers whose rows are not those of the batch: embeddings take tokens, the head only rows with logits.
_NOT_ADAPTABLE = ("lm_head", "embed_tokens", "wte", "wpe")


# Layers of the fused forward pass: its product, and the position of the layer among those that are computed together.
_FUSED_PATH = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")
_FUSED_PRODUCTS: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "o_proj": ("out", 0),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
    "down_proj": ("down", 0),
}

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Weights of an adapter for one layer: `up` [out, rank], scaled, and `down` [rank, in]."""

    down: torch.Tensor
    up: torch.Tensor


class Adapters(Protocol):
    """LoRA adapters in memory. keys: theirs."""

    @property
    def keys(self) -> Collection[str]: ...

    def add(self, key: str, weights: Mapping[str, LoraWeights], name: str) -> None:
        """Add an adapter under a key; `name` is that in errors.

        Raises ModelFailed if it does not fit the model, which then stays as it was.
        """

    def remove(self, key: str) -> None: ...


class AdapterRows:
    """Rows of the current batch by adapter; empty if no row selects one."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Tensor | slice] = {}


@dataclass(frozen=True, slots=True)
class _Part:
    """Contribution of an adapter to the outputs `first` to `last` of a layer."""

    first: int
    last: int
    down: Product
    up: Product


class AdaptedLinear(nn.Module):
    """A linear layer plus the contributions of adapters to their rows. `product` and `plus`: as of `LinearLayer`."""

    def __init__(self, base: Any, rows: AdapterRows) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = _features(base)
        self.parts: dict[str, list[_Part]] = {}
        self._rows = rows

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        forward = self.base if isinstance(self.base, nn.Module) else self.base.forward
        return self._add(states, forward(states))

    def product(self, states: torch.Tensor) -> torch.Tensor:
        return self._add(states, self.base.product(states))

    def plus(self, states: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return self._add(states, self.base.plus(states, added))

    def _add(self, states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        for name, rows in self._rows.of.items():
            for part in self.parts.get(name, ()):
                selected = states.reshape(-1, self.in_features)[rows]
                output.view(-1, self.out_features)[rows, part.first : part.last] += part.up(part.down(selected))
        return output


class AdapterLayers:
    """The adapters in memory of a model, by name, and the layers that they change.

    fused: the forward pass that replaces the model's own code, if any. packed: whether to pack weights as those of
    the model, so that the result of a row does not depend on the other rows.
    """

    def __init__(self, model: Any, fused: FusedModel | None, dtype: torch.dtype, device: Any, *, packed: bool) -> None:
        self._model, self._fused, self._dtype, self._device = model, fused, dtype, device
        self._packed = packed
        self._rows = AdapterRows()
        self._layers: dict[str, list[AdaptedLinear]] = {}

    @property
    def keys(self) -> Collection[str]:
        return self._layers.keys()

    def add(self, key: str, weights: Mapping[str, LoraWeights], name: str) -> None:
        """As `Adapters.add`."""
        parts = []
        for path, lora in weights.items():
            layer, first, last = self._find(name, path, lora)
            parts.append((layer, _Part(first, last, self._product(lora.down), self._product(lora.up))))
        for layer, part in parts:
            layer.parts.setdefault(key, []).append(part)
        self._layers[key] = [layer for layer, _ in parts]

    def remove(self, key: str) -> None:
        for layer in self._layers.pop(key, ()):
            layer.parts.pop(key, None)

    def assign(self, names: Sequence[str]) -> None:
        """Set the adapter of each row, "" for none. Raises ModelFailed for one that is not in memory."""
        used = set(names) - {""}
        missing = used - self._layers.keys()
        if missing:
            raise ModelFailed(f"adapter '{sorted(missing)[0]}' is not in memory")
        if len(used) == 1 and "" not in names:
            self._rows.of = {used.pop(): slice(None)}
            return
        self._rows.of = {
            used_name: torch.tensor([i for i, name in enumerate(names) if name == used_name], device=self._device)
            for used_name in used
        }

    def _product(self, weight: torch.Tensor) -> Product:
        weight = weight.to(self._device, self._dtype).contiguous()
        return PackedLinear(weight, None) if self._packed else lambda states: nn.functional.linear(states, weight)

    def _find(self, name: str, path: str, lora: LoraWeights) -> tuple[AdaptedLinear, int, int]:
        """Return the adapted layer of a path, and which of its outputs are those of the path."""
        if self._fused is not None:
            place = find_fused(self._fused, name, path, lora)
            return self._adapt_fused(self._fused, place), place.first, place.first + len(lora.up)
        try:
            layer = self._adapt(path)
        except (AttributeError, LookupError, TypeError):
            raise _not_adaptable(name, path) from None
        _check_shape(name, path, lora, layer.in_features, layer.out_features)
        return layer, 0, layer.out_features

    def _adapt(self, path: str) -> AdaptedLinear:
        above, _, last = path.rpartition(".")
        if last in _NOT_ADAPTABLE:
            raise AttributeError
        parent = self._model.get_submodule(above)
        layer = getattr(parent, last)
        if not isinstance(layer, AdaptedLinear):
            layer = AdaptedLinear(layer, self._rows)
            setattr(parent, last, layer)
        return layer

    def _adapt_fused(self, fused: FusedModel, place: "FusedPlace") -> AdaptedLinear:
        layer = getattr(fused.layers[place.number], place.layer)
        if not isinstance(layer, AdaptedLinear):
            layer = AdaptedLinear(layer, self._rows)
            changed: dict[str, Any] = {place.layer: layer}
            fused.layers[place.number] = replace(fused.layers[place.number], **changed)
        return layer


@dataclass(frozen=True, slots=True)
class FusedPlace:
    """Where the outputs of a layer are in the fused forward pass: in its layer `number`, from `first` on of `layer`."""

    number: int
    layer: str
    first: int


def find_fused(fused: FusedModel, name: str, path: str, lora: LoraWeights) -> FusedPlace:
    """Return the place of a layer. Raises ModelFailed for another path, or weights that do not fit."""
    match = _FUSED_PATH.fullmatch(path)
    try:
        if match is None:
            raise LookupError
        number, (name_of_layer, part) = int(match[1]), _FUSED_PRODUCTS[match[2]]
        layer = getattr(fused.layers[number], name_of_layer)
    except LookupError:
        raise _not_adaptable(name, path) from None
    sizes = [layer.out_features]
    if name_of_layer == "qkv":
        sizes = [heads * fused.head_size for heads in (fused.query_heads, fused.kv_heads, fused.kv_heads)]
    elif name_of_layer == "gate_up":
        sizes = [layer.out_features // 2] * 2
    _check_shape(name, path, lora, layer.in_features, sizes[part])
    return FusedPlace(number, name_of_layer, sum(sizes[:part]))


def _not_adaptable(name: str, path: str) -> ModelFailed:
    return ModelFailed(f"adapter '{name}' is for the layer '{path}', which cannot be adapted")


def _check_shape(name: str, path: str, lora: LoraWeights, inputs: int, outputs: int) -> None:
    shape = lora.down.shape[1], lora.up.shape[0]
    if shape != (inputs, outputs):
        raise ModelFailed(
            f"adapter '{name}' does not fit the layer '{path}': expected {inputs} inputs and {outputs} outputs, "
            f"got {shape[0]} and {shape[1]}"
        )


def _features(layer: Any) -> tuple[int, int]:
    """Return the number of inputs and outputs of a linear layer. Raises TypeError for other layers."""
    if hasattr(layer, "nf") and hasattr(layer, "weight"):  # GPT-2's
        return int(layer.weight.shape[0]), int(layer.nf)
    if not hasattr(layer, "in_features"):
        raise TypeError
    return int(layer.in_features), int(layer.out_features)


def read_adapter(name: str, folder: Path, max_rank: int = 0) -> dict[str, LoraWeights]:
    """Return the weights of an adapter by layer, from `adapter_config.json` and `adapter_model.safetensors`.

    max_rank: 0 for no limit. Raises ModelFailed for files that are missing, malformed or not those of plain LoRA.
    """
    try:
        config: dict[str, Any] = read_json(folder / "adapter_config.json")
        weights = load_file(folder / "adapter_model.safetensors")
    except OSError as error:
        raise ModelFailed(f"adapter '{name}' cannot be read: {error.strerror or type(error).__name__}") from error
    except Exception as error:  # safetensors has an error of its own
        raise ModelFailed(f"adapter '{name}' cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelFailed(f"adapter '{name}': expected adapter_config.json to be an object")
    _check_config(name, config)
    layers = {}
    for key, down in weights.items():
        path, _, kind = key.removeprefix(_PREFIX).partition(".lora_A.")
        if kind != "weight":
            if ".lora_B.weight" in key:
                if key.replace(".lora_B.", ".lora_A.") not in weights:
                    raise ModelFailed(f"adapter '{name}' lacks lora_A for '{path.removesuffix('.lora_B.weight')}'")
                continue
            raise ModelFailed(f"adapter '{name}' holds '{key}'; expected weights lora_A and lora_B alone")
        up = weights.get(key.replace(".lora_A.", ".lora_B."))
        if up is None:
            raise ModelFailed(f"adapter '{name}' lacks lora_B for '{path}'")
        _check_rank(name, path, down, up, config, max_rank)
        layers[path] = LoraWeights(down.float(), up.float() * _scale(name, config, path, down.shape[0]))
        if not all(bool(part.isfinite().all()) for part in (layers[path].down, layers[path].up)):
            raise ModelFailed(f"adapter '{name}': weights for '{path}' are not finite")
    if not layers:
        raise ModelFailed(f"adapter '{name}' has no weights")
    return layers


def _check_rank(
    name: str, path: str, down: torch.Tensor, up: torch.Tensor, config: Mapping[str, Any], max_rank: int
) -> None:
    if down.ndim != 2 or up.ndim != 2 or not 0 < down.shape[0] == up.shape[1]:
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise ModelFailed(f"adapter '{name}': expected weights [rank, in] and [out, rank] for '{path}', got {shapes}")
    if 0 < max_rank < down.shape[0]:
        raise ModelFailed(
            f"adapter '{name}': expected a rank of at most {max_rank} (max_adapter_rank), got {down.shape[0]}"
        )
    patterns = config.get("rank_pattern")
    named = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    if named[0] is not None and down.shape[0] not in named:
        got = down.shape[0]
        raise ModelFailed(f"adapter '{name}': expected weights of rank {named[0]} (r) for '{path}', got {got}")


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    expected = {
        "use_dora": (None, False),
        "bias": (None, "none"),
        "modules_to_save": (None, []),
        "peft_type": ("LORA",),
        "lora_bias": (None, False),
        "layer_replication": (None, []),
        "alora_invocation_tokens": (None, []),
    }
    for key, allowed in expected.items():
        if config.get(key) not in allowed:
            raise ModelFailed(f"adapter '{name}': {key} is {config.get(key)!r}; expected plain LoRA")


def _scale(name: str, config: Mapping[str, Any], path: str, rank: int) -> float:
    """alpha / rank (Hu et al. 2021), or alpha / sqrt(rank) for rank-stabilised ones (Kalajdzievski 2023)."""
    patterns = config.get("alpha_pattern") or {}
    try:
        alpha = next((value for end, value in patterns.items() if path.endswith(end)), config.get("lora_alpha", rank))
        scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (AttributeError, TypeError, ValueError):
        scale = math.nan
    if not math.isfinite(scale):
        raise ModelFailed(f"adapter '{name}': expected lora_alpha and alpha_pattern as finite numbers")
    return scale


def folders(model: Path, configured: Mapping[str, str]) -> dict[str, Path]:
    """Return the folders of adapters by name: configured ones, and those in the model's folder `adapters`."""
    if model.is_file():
        return {name: model.parent / path for name, path in configured.items()}
    inside = model / "adapters"
    adapters = {each.name: each for each in sorted(inside.iterdir())} if inside.is_dir() else {}
    adapters = {name: folder for name, folder in adapters.items() if (folder / "adapter_config.json").is_file()}
    return adapters | {name: model / path for name, path in configured.items()}
