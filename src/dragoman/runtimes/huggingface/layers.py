"""Layers between the states of tokens and a vector, as sentence-transformers has them: pooling, dense, and so on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

from dragoman.core.errors import ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.files import check_pickle
from dragoman.runtimes.huggingface.sentence_transformers import Fields, Module

TOKENS, VECTOR = "token_embeddings", "sentence_embedding"


@dataclass(slots=True)
class Features:
    """Values of a batch by name: `token_embeddings` [rows, tokens, size], later `sentence_embedding` [rows, size].

    mask: [rows, tokens], 1 for a token and 0 for padding, which is on the right. prompts: number of tokens of the
    prompt in each row, [rows].
    """

    values: dict[str, torch.Tensor]
    mask: torch.Tensor
    prompts: torch.Tensor


Layer = Callable[[Features], None]

# --- pooling -----------------------------------------------------------------------------------------------------

# Functions of states, of the mask of the tokens that count, and of the number of tokens of each row.
_Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _first(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states), device=states.device), mask.argmax(1)]


def _last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return states[torch.arange(len(states), device=states.device), last]


def _largest(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1)


def _sum(states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (states * weights.unsqueeze(-1)).sum(1)


def _mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _sum(states, mask) / mask.sum(1, keepdim=True)


def _mean_by_root(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _sum(states, mask) / mask.sum(1, keepdim=True).sqrt()


def _mean_by_position(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean weighted by the position in the text, from 1 (Muennighoff 2022, SGPT)."""
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return _sum(states, weights) / weights.sum(1, keepdim=True)


_POOLS: Mapping[str, _Pool] = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _mean_by_position,
    "lasttoken": _last,
}
# The flags of older files, in the order in which their vectors are joined.
_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SIZES = ("embedding_dimension", "word_embedding_dimension")


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pools the states of tokens by each mode, and joins the vectors. includes_prompt: also those of the prompt."""

    modes: tuple[str, ...]
    includes_prompt: bool = True

    def __call__(self, features: Features) -> None:
        states, mask = features.values[TOKENS], features.mask
        if not self.includes_prompt:
            mask = mask * (torch.arange(mask.shape[1], device=mask.device) >= features.prompts.unsqueeze(1))
        features.values[VECTOR] = torch.cat([_POOLS[mode](states, mask) for mode in self.modes], 1)


def pooling_modes(names: Any) -> tuple[str, ...] | None:
    """Return the modes of one name or a list of them, "last" meaning "lasttoken"; None if one is unknown."""
    given = [names] if isinstance(names, str) else names
    if not isinstance(given, list | tuple) or not given:
        return None
    modes = tuple("lasttoken" if str(name).lower() == "last" else str(name).lower() for name in given)
    return modes if all(mode in _POOLS for mode in modes) else None


def _pooling(module: Module, _spec: ModelSpec) -> Layer:
    fields, path = module.fields, module.folder / "config.json"
    _check_keys(path, fields, (*_SIZES, *_FLAGS, "pooling_mode", "include_prompt"))
    modes = pooling_modes(fields["pooling_mode"]) if "pooling_mode" in fields else None
    if "pooling_mode" in fields and modes is None:
        raise ModelFailed(
            f"{path}: 'pooling_mode': expected one of {', '.join(_POOLS)}, got {fields['pooling_mode']!r}"
        )
    modes = modes or tuple(mode for flag, mode in _FLAGS.items() if fields.get(flag)) or ("mean",)
    return Pooling(modes, bool(fields.get("include_prompt", True)))


# --- further layers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Function:
    """Applies a function to the value `source`, and stores the result as `target`."""

    function: Callable[[torch.Tensor], torch.Tensor]
    source: str = VECTOR
    target: str = VECTOR

    def __call__(self, features: Features) -> None:
        features.values[self.target] = self.function(features.values[self.source])


@dataclass(frozen=True, slots=True)
class Normalize:
    """Scales the value `source` to length 1, and stores it as `target`."""

    source: str = VECTOR
    target: str = VECTOR

    def __call__(self, features: Features) -> None:
        features.values[self.target] = functional.normalize(features.values[self.source], dim=-1)


def _normalize(module: Module, _spec: ModelSpec) -> Layer:
    _check_keys(module.folder / "config.json", module.fields, ("module_input_name", "module_output_name"))
    return Normalize(*_names(module.fields))


def _dense(module: Module, spec: ModelSpec) -> Layer:
    fields, path = module.fields, module.folder / "config.json"
    names = ("in_features", "out_features", "bias", "activation_function", "use_residual")
    _check_keys(path, fields, (*names, "module_input_name", "module_output_name"))
    weights = _weights(module.folder, spec)
    try:
        weight, bias = weights["linear.weight"].float(), weights["linear.bias"].float() if fields["bias"] else None
        if weight.shape != (fields["out_features"], fields["in_features"]):
            raise ModelFailed(f"{path}: expected weights [out_features, in_features], got {list(weight.shape)}")
        residual = weights["residual.weight"].float() if "residual.weight" in weights else None
    except KeyError as error:
        raise ModelFailed(f"{module.folder}: the dense layer lacks {error}") from error
    activation = activation_function(path, str(fields.get("activation_function", "torch.nn.modules.activation.Tanh")))
    adds = bool(fields.get("use_residual"))
    if adds and residual is None and weight.shape[0] != weight.shape[1]:
        raise ModelFailed(f"{module.folder}: the dense layer lacks 'residual.weight'")

    def compute(vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = activation(functional.linear(vectors, weight.to(vectors.device), _on(bias, vectors)))
        if adds:
            result = result + (vectors if residual is None else functional.linear(vectors, residual.to(vectors.device)))
        return result

    return _Function(compute, *_names(fields))


def _layer_norm(module: Module, spec: ModelSpec) -> Layer:
    _check_keys(module.folder / "config.json", module.fields, ("dimension",))
    weights = _weights(module.folder, spec)
    weight, bias = weights["norm.weight"].float(), weights["norm.bias"].float()

    def compute(vectors: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(vectors, weight.shape, weight.to(vectors.device), _on(bias, vectors))

    return _Function(compute)


def _splade(module: Module, _spec: ModelSpec) -> Layer:
    """log(1 + ReLU(logits)), pooled over the tokens (Formal et al. 2021, SPLADE)."""
    fields, path = module.fields, module.folder / "config.json"
    _check_keys(path, fields, (*_SIZES, "pooling_strategy", "activation_function", "chunk_size"))
    strategy, activation = fields.get("pooling_strategy", "max"), fields.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ModelFailed(
            f"{path}: expected 'pooling_strategy' max or sum, and 'activation_function' relu or log1p_relu; got "
            f"{strategy!r} and {activation!r}"
        )

    def pool(features: Features) -> None:
        weights = (features.values[TOKENS] * features.mask.unsqueeze(-1)).relu().log1p()
        weights = weights.log1p() if activation == "log1p_relu" else weights
        features.values[VECTOR] = weights.amax(1) if strategy == "max" else weights.sum(1)

    return pool


def _nothing(_module: Module, _spec: ModelSpec) -> Layer:
    return lambda _: None  # of training alone


# How a module is built from its settings and weights.
_BUILDERS: Mapping[str, Callable[[Module, ModelSpec], Layer]] = {
    "Pooling": _pooling,
    "Normalize": _normalize,
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Dropout": _nothing,
    "SpladePooling": _splade,
}


def build_layers(modules: Sequence[Module], spec: ModelSpec) -> list[Layer]:
    """Return the layers of modules. Raises ModelFailed for a module or a key that is not supported."""
    unknown = [module.kind for module in modules if module.kind not in _BUILDERS]
    if unknown:
        raise ModelFailed(
            f"module '{unknown[0]}' of sentence-transformers is not supported; expected one of {', '.join(_BUILDERS)}"
        )
    return [_BUILDERS[module.kind](module, spec) for module in modules]


def activation_function(where: Path | str, name: str) -> Any:
    """Return an instance of a class of torch.nn by its full name. Raises ModelFailed for any other class."""
    kind = getattr(torch.nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module):
        raise ModelFailed(f"{where}: 'activation_function': expected a class of torch.nn, got '{name}'")
    try:
        return kind()
    except TypeError as error:
        raise ModelFailed(f"{where}: 'activation_function': '{name}' needs arguments") from error


def _names(fields: Fields) -> tuple[str, str]:
    source = fields.get("module_input_name") or VECTOR
    return source, fields.get("module_output_name") or source


def _on(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(other.device)


def _check_keys(path: Path, fields: Fields, known: Sequence[str]) -> None:
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ModelFailed(f"{path}: unknown key '{unknown[0]}'; expected {', '.join(known)}")


def _weights(folder: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    if (folder / "model.safetensors").is_file():
        weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
        return weights
    pickled = folder / "pytorch_model.bin"
    if not pickled.is_file():
        raise ModelFailed(f"no weights found in '{folder.name}'; expected model.safetensors")
    check_pickle(pickled, spec)
    pickled_weights: dict[str, torch.Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
    return pickled_weights
