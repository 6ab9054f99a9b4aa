"""Check the folder of a text model before it is loaded; explain errors in one line."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed

_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
# Weights in unsupported formats, and what to do about each.
_CONVERT = "save it as safetensors, by save_pretrained of transformers on a machine where you trust it"
_OTHER_FORMATS: Mapping[str, str] = {
    "pytorch_model*.bin": f"PyTorch's pickles, which can run code when they are loaded; {_CONVERT}",
    "consolidated*.pth": f"PyTorch's pickles, which can run code when they are loaded; {_CONVERT}",
    "*.gguf": "GGUF; serve that file instead of the folder",
    "tf_model*.h5": f"TensorFlow's; {_CONVERT}",
    "flax_model*.msgpack": f"Flax's; {_CONVERT}",
}
_GIT_LFS = b"version https://git-lfs"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_MAX_HEADER_BYTES = 1 << 27  # safetensors limits headers to 100 MB


# Configurations of processors, of which a model that takes images has at least one.
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def takes_images(folder: Path) -> bool:
    """Return whether the model of a folder answers chats with images: it has a processor and a chat template."""
    if not any((folder / name).is_file() for name in PROCESSORS):
        return False
    config = _load_object(folder / "config.json", "its configuration")
    names = config.get("architectures")
    if "vision_config" not in config or not isinstance(names, list):
        return False
    has_template = any((folder / name).is_file() for name in _TEMPLATES) or any(
        "chat_template" in _load_object(folder / name, "its settings")
        for name in ("tokenizer_config.json", PROCESSORS[0])
        if (folder / name).is_file()
    )
    return has_template and any(str(name).endswith("ForConditionalGeneration") for name in names)


def check(folder: Path) -> None:
    """Raise ModelFailed for missing or truncated files, with a way to fix them. Weights are not read.

    A GGUF file contains the configuration, the weights and the tokenizer.
    """
    if folder.is_file():
        _check_gguf(folder)
        return
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise ModelFailed(
            f"'{folder.name}' is a LoRA adapter, not a model; put it into the folder 'adapters' of its base model and "
            "serve that"
        )
    _check_configuration(folder)
    _check_weights(folder)
    _check_tokenizer(folder)


def explain_error(error: Exception, folder: Path) -> str:
    """Return one line that explains why loading a folder or a GGUF file failed."""
    if folder.is_file():
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"'{folder.name}' cannot be loaded as a text model: {first}"
    config = _load_object(folder / "config.json", "its configuration")
    lines = str(error).strip().splitlines()
    reason = f"{lines[0] if lines else type(error).__name__}"
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "unknown")
        return (
            f"'{folder.name}' has weights quantized by '{method}' (quantization_config in config.json), which cannot "
            f"be run here: {reason}; serve the folder that it was made from"
        )
    if "auto_map" in config and "trust_remote_code" in str(error):
        return (
            f"'{folder.name}' needs code of its own (auto_map in config.json), and no code of a model is run; serve a "
            "model that transformers knows by itself"
        )
    if "Unrecognized configuration class" in str(error):
        return (
            f"'{folder.name}' is of the model_type '{config.get('model_type')}', for which transformers has no "
            "class that generates text"
        )
    if "does not recognize this architecture" in str(error):
        return (
            f"'{folder.name}' is of the model_type '{config.get('model_type')}', which the installed transformers does "
            "not know; install a newer one, or correct config.json"
        )
    return f"'{folder.name}' cannot be loaded as a text model: {reason}"


def _check_configuration(folder: Path) -> None:
    config = _load_object(folder / "config.json", "its configuration")
    if not config.get("model_type"):
        raise ModelFailed(
            f"config.json in '{folder.name}' has no 'model_type', so it is not known what the model is; take the file "
            "that save_pretrained wrote"
        )


# --- weights -----------------------------------------------------------------------------------------------


def _check_weights(folder: Path) -> None:
    if (folder / _WEIGHTS).is_file():
        _check_file(folder / _WEIGHTS)
    elif (folder / _INDEX).is_file():
        _check_shards(folder)
    elif shards := sorted(folder.glob("model-*-of-*.safetensors")):
        raise ModelFailed(f"'{folder.name}' has {shards[0].name} but no {_INDEX}; copy that file beside the weights")
    else:
        for pattern, format_ in _OTHER_FORMATS.items():
            if weights := next(iter(sorted(folder.glob(pattern))), None):
                raise ModelFailed(f"'{folder.name}' has no {_WEIGHTS}; the weights in {weights.name} are {format_}")
        raise ModelFailed(f"no weights found in '{folder.name}'; copy {_WEIGHTS} beside config.json")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, those of its index if there are several."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    named = _load_object(folder / _INDEX, "its list of weights").get("weight_map")
    return [folder / name for name in sorted({str(name) for name in named.values()})] if isinstance(named, dict) else []


def _check_shards(folder: Path) -> None:
    files = [path.name for path in weight_files(folder)]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing or not files:
        problem = f"lacks {missing[0]}, one of {len(missing)} missing files of" if missing else "names no files in"
        raise ModelFailed(f"'{folder.name}' {problem} {_INDEX}; copy the folder again")
    for name in files:
        _check_file(folder / name)


def _check_file(path: Path) -> None:
    """Compare the size of a safetensors file with its header (https://github.com/huggingface/safetensors, Format)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_GIT_LFS))
        if start == _GIT_LFS:
            raise ModelFailed(
                f"{path.name} in '{path.parent.name}' is a Git LFS pointer instead of weights; run `git lfs pull` there"
            )
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        header = file.read(length) if len(start) >= 8 and 2 <= length <= min(size, _MAX_HEADER_BYTES) else b""
    try:
        tensors: Mapping[str, Any] = json.loads(header)
        ends = [each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        expected = -1
    if size != expected:
        problem = f"expected {expected} bytes, got {size}" if expected >= 0 else "its header cannot be read"
        raise ModelFailed(f"{path.name} in '{path.parent.name}' is truncated: {problem}; copy it again")


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(_GIT_LFS))
    if start == _GIT_LFS:
        raise ModelFailed(f"{path.name} is a Git LFS pointer instead of weights; run `git lfs pull` there")
    if start[:4] != b"GGUF":
        raise ModelFailed(f"{path.name} is not a GGUF file: expected the bytes 'GGUF' at its start, got {start[:4]!r}")
    if _SHARD.search(path.name):
        raise ModelFailed(f"{path.name} is one of several files; join them with `llama-gguf-split --merge`")


# --- tokenizer ---------------------------------------------------------------------------------------------


def _check_tokenizer(folder: Path) -> None:
    files = [name for name in _TOKENIZERS if (folder / name).is_file()]
    if not files:
        raise ModelFailed(
            f"no tokenizer found in '{folder.name}'; copy tokenizer.json, or tokenizer.model, and "
            "tokenizer_config.json beside config.json"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _load_object(folder / name, "its tokenizer")


def _load_object(path: Path, description: str) -> Mapping[str, Any]:
    """Return the JSON object in a file; `what` describes it in errors."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelFailed(
            f"'{path.name}' not found in '{path.parent.name}', {description}; copy it from the model"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFailed(
            f"{path.name} in '{path.parent.name}' cannot be read ({error}); copy it from the model again"
        ) from error
    if not isinstance(value, dict):
        raise ModelFailed(f"{path.name} in '{path.parent.name}' is not a JSON object; copy it from the model again")
    return value
