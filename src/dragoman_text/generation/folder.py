"""Check the folder of a text model before it is loaded; explain errors in one line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.core.documents import parse_json
from dragoman.core.errors import ModelFailed
from dragoman.runtimes.pretrained import load_object
from dragoman.runtimes.saved_sizes import INDEX, MAX_HEADER_BYTES, WEIGHTS, check_sizes, weight_files
from dragoman_text.generation.gguf_file import GgufError, GgufFile, open_file

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


def check(folder: Path) -> GgufFile | None:
    """Raise ModelFailed for missing or truncated files, with a way to fix them. Weights are not read.

    A GGUF file contains the configuration, the weights and the tokenizer; it is returned, since `open_file` reads its
    header again once nobody has it.
    """
    if folder.is_file():
        return _check_gguf(folder)
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise ModelFailed(
            f"'{folder.name}' is a LoRA adapter, not a model; put it into the folder 'adapters' of its base model and "
            "serve that"
        )
    _check_configuration(folder)
    _check_weights(folder)
    check_sizes(folder)
    _check_tokenizer(folder)
    return None


def explain_error(error: Exception, folder: Path) -> str:
    """Return one line that explains why loading a folder or a GGUF file failed."""
    if folder.is_file():
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"'{folder.name}' cannot be loaded as a text model: {first}"
    config = load_object(folder / "config.json", "its configuration")
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
    if "ignore_mismatched_sizes" in str(error):
        return (
            f"'{folder.name}' has weights of other shapes than config.json says; take both from the same place, and "
            "correct sizes such as vocab_size and hidden_size"
        )
    return f"'{folder.name}' cannot be loaded as a text model: {reason}"


def _check_configuration(folder: Path) -> None:
    config = load_object(folder / "config.json", "its configuration")
    if not config.get("model_type"):
        raise ModelFailed(
            f"config.json in '{folder.name}' has no 'model_type', so it is not known what the model is; take the file "
            "that save_pretrained wrote"
        )


# --- weights -----------------------------------------------------------------------------------------------


def _check_weights(folder: Path) -> None:
    if (folder / WEIGHTS).is_file():
        _check_file(folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        _check_shards(folder)
    elif shards := sorted(folder.glob("model-*-of-*.safetensors")):
        raise ModelFailed(f"'{folder.name}' has {shards[0].name} but no {INDEX}; copy that file beside the weights")
    else:
        for pattern, format_ in _OTHER_FORMATS.items():
            if weights := next(iter(sorted(folder.glob(pattern))), None):
                raise ModelFailed(f"'{folder.name}' has no {WEIGHTS}; the weights in {weights.name} are {format_}")
        raise ModelFailed(f"no weights found in '{folder.name}'; copy {WEIGHTS} beside config.json")


def _check_shards(folder: Path) -> None:
    files = [path.name for path in weight_files(folder)]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing or not files:
        problem = f"lacks {missing[0]}, one of {len(missing)} missing files of" if missing else "names no files in"
        raise ModelFailed(f"'{folder.name}' {problem} {INDEX}; copy the folder again")
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
        header = file.read(length) if len(start) >= 8 and 2 <= length <= min(size, MAX_HEADER_BYTES) else b""
    try:
        tensors: Mapping[str, Any] = parse_json(header)
        ends = [each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        expected = -1
    if size != expected:
        problem = f"expected {expected} bytes, got {size}" if expected >= 0 else "its header cannot be read"
        raise ModelFailed(f"{path.name} in '{path.parent.name}' is truncated: {problem}; copy it again")


def _check_gguf(path: Path) -> GgufFile:
    with path.open("rb") as file:
        if file.read(len(_GIT_LFS)) == _GIT_LFS:
            raise ModelFailed(f"{path.name} is a Git LFS pointer instead of weights; run `git lfs pull` there")
    try:
        checked = open_file(path)
    except GgufError as error:
        raise ModelFailed(f"{path.name} is not a valid GGUF file: {error}; copy it again") from error
    if _SHARD.search(path.name) or checked.metadata.get("split.count", 0) not in (0, 1):
        raise ModelFailed(f"{path.name} is one of several files; join them with `llama-gguf-split --merge`")
    for name, count in checked.metadata.items():
        limit = {".block_count": len(checked.tensors), ".expert_count": _MAX_EXPERTS}.get(name[name.rfind(".") :])
        if limit is not None and isinstance(count, int) and count > limit:
            raise ModelFailed(f"{path.name} has {name} {count}, but {len(checked.tensors)} tensors; copy it again")
    return checked


# Experts of one layer are parts of one tensor.
_MAX_EXPERTS = 4096


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
            load_object(folder / name, "its tokenizer")
