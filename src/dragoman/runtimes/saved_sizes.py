"""Compare config.json with the safetensors files beside it before a model of its sizes is built.

To build a model takes memory and time in proportion to its configuration, whatever its weights are.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from dragoman.core.documents import parse_json
from dragoman.core.errors import ModelFailed
from dragoman.runtimes.pretrained import load_object

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MAX_HEADER_BYTES = 1 << 27  # safetensors limits headers to 100 MB

# Sizes in config.json that are numbers of modules: each module has at least one tensor, except that the experts of a
# layer may be parts of one tensor.
_LAYERS = frozenset(
    (
        *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers", "num_encoder_layers"),
        *("encoder_layers", "decoder_layers", "num_blocks", "n_blocks", "depth"),
    )
)
_EXPERTS = frozenset(("num_experts", "num_local_experts", "n_routed_experts", "n_experts", "moe_num_experts"))
# transformers makes a table of names of so many classes, also for a model without a head for them.
_CLASSES, _MAX_CLASSES = "num_labels", 1_000_000
# Tensors that several modules share are saved once.
_MAX_RATIO = 2


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, those of its index if there are several."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    named = load_object(folder / INDEX, "its list of weights").get("weight_map")
    return [folder / name for name in sorted({str(name) for name in named.values()})] if isinstance(named, dict) else []


def check_sizes(folder: Path) -> None:
    """Raise ModelFailed if config.json has more layers or experts than the weights, or more classes than any model."""
    shapes = _shapes(folder)
    largest = max((size for shape in shapes for size in shape), default=0)
    limits: Mapping[str, int] = {
        _CLASSES: max(_MAX_CLASSES, largest),
        **dict.fromkeys(_EXPERTS, max(len(shapes), largest)),
        **dict.fromkeys(_LAYERS, len(shapes)),
    }
    for name, count in _counts(load_object(folder / "config.json", "its configuration")):
        if count > limits[name]:
            raise ModelFailed(
                f"config.json in '{folder.name}' has {name} {count}, but the weights have {len(shapes)} tensors; copy "
                "the folder again"
            )


def check_parameters(count: int, folder: Path) -> None:
    """Raise ModelFailed if a model with so many parameters is much larger than the weights, as by a vocab_size: those
    that are missing would be allocated before they are found to be missing."""
    saved = sum(map(prod, _shapes(folder)))
    if count > _MAX_RATIO * saved:
        raise ModelFailed(
            f"'{folder.name}' has weights of other shapes than config.json says: {saved} numbers instead of {count}; "
            "take both from the same place, and correct sizes such as vocab_size and hidden_size"
        )


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the numbers of modules and classes in a configuration and those inside it."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif isinstance(value, int) and (name == _CLASSES or name in _LAYERS | _EXPERTS):
            yield name, value


def _shapes(folder: Path) -> list[list[int]]:
    """Return the shapes of the tensors in the safetensors files of a folder."""
    return [each.get("shape", []) for path in weight_files(folder) for each in _tensors(path).values()]


def _tensors(path: Path) -> Mapping[str, Any]:
    """Return the descriptions of the tensors in a safetensors file. Raises ModelFailed if it has none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: Mapping[str, Any] = parse_json(file.read(min(length, MAX_HEADER_BYTES)))
        return {name: each for name, each in header.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFailed(f"{path.name} in '{path.parent.name}' cannot be read; copy it again") from error
