"""Recognise the runtime of model files and folders, also of folders that transformers or optimum-intel wrote."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.core.errors import ModelFailed
from dragoman.generation.folder import PROCESSORS, takes_images
from dragoman.runtimes.unserved import UNKNOWN, reason_of, unknown_reason

# Suffixes that many other files have, too: such a file is reported only if it is called model.*
_COMMON_SUFFIXES = frozenset({".json", ".txt"})
_NAMED = 3  # files of a folder without a model that the reason names
_SCRIPT = (
    "a Python file in a folder is not a model by itself; name it in the command (dragoman serve FILE), or call it "
    "model.py in a sub-folder of its own"
)


def recognise(path: Path) -> str | None:
    """Return the name of the runtime that loads a file or folder; None if it is not a model that one knows."""
    if not (path.is_dir() or path.is_file()):
        return None
    for runtimes in (plugins.built_in_runtimes, plugins.other_runtimes):
        for name, runtime in runtimes().items():
            if runtime.recognises(path):
                return name
    return None


def own_name(path: Path) -> str:
    """Return the name that the contents of a file or folder give its model, "" for none."""
    name = recognise(path)
    runtime = plugins.runtime(name) if name else None
    return runtime.own_name(path) if runtime and runtime.own_name else ""


def refusal(path: Path) -> str:
    """Return why a file or folder that was named as a model is none, and what to serve instead."""
    if reason := reason_of(path) or _mismatch(path):
        return reason
    if not path.is_dir():
        return UNKNOWN
    inside = [(entry.name, skip_reason(entry)) for entry in sorted(path.iterdir()) if not entry.name.startswith(".")]
    reasons = [f"{name}: {reason}" for name, reason in inside if reason]
    return f"the folder holds no model; {'; '.join(reasons[:_NAMED]) or 'expected a model file'}"


def skip_reason(path: Path) -> str:
    """Return why a file or folder among models is not served; "" for what is not like a model, as a README."""
    suffix = path.suffix.lower()
    if suffix == ".py":
        return "" if path.name.startswith("__") else _SCRIPT
    if reason := reason_of(path):
        return reason
    if path.is_dir():
        return ""
    mismatch = _mismatch(path) if suffix not in _COMMON_SUFFIXES or path.stem == "model" else ""
    return mismatch or unknown_reason(path)


def _mismatch(path: Path) -> str:
    """Return why a file is not a model although its suffix is that of one; "" for any other file."""
    if not path.is_file():
        return ""
    suffix = path.suffix.lower()
    runtimes = (*plugins.built_in_runtimes().values(), *plugins.other_runtimes().values())
    expected = [each.expected for each in runtimes if suffix in each.shared_suffixes and each.expected]
    if not expected or recognise(path) is not None:
        return ""
    return f"'{path.name}' is not a model: expected {' or '.join(expected)}"


def model_file(folder: Path) -> Path | None:
    """Return the one model in a folder: the folder itself, a file, or a folder in it such as a SavedModel.

    Python files other than model.py are not models. Raises ModelFailed naming the models if there are several.
    """
    if recognise(folder) is not None:
        return folder
    files = sorted(entry for entry in folder.iterdir() if is_candidate(entry))
    if len(files) > 1:
        raise ModelFailed(
            f"folder '{folder.name}' holds several models: {', '.join(entry.name for entry in files)}; name one of "
            "them in its model-settings.json as parameters.uri"
        )
    return files[0] if files else None


def is_candidate(entry: Path) -> bool:
    """Return whether a file or folder in a model's folder is a model: no code beside the model."""
    if entry.name.startswith(".") or entry.suffix == ".py":
        return False
    runtime = recognise(entry)
    return runtime is not None and not (entry.is_dir() and runtime == "python")


# The weights of a model, or the list of their files.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Files of sentence-transformers: the list of modules, and the pooling that the first versions wrote without it.
MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
# The files that a tokenizer is read from.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def pretrained_runtime(folder: Path) -> str | None:
    """Return the runtime of a folder with a configuration of transformers: `huggingface`, `llm` or `openvino_genai`.

    The folder of a decoder is a model even without weights, so that loading it reports what is missing.
    """
    if is_sentence_transformers(folder):
        return "huggingface"
    config = folder / "config.json"
    if not config.is_file():
        return None
    weights = any((folder / name).is_file() for name in _WEIGHTS)
    try:
        config_fields = json.loads(config.read_bytes())
    except (ValueError, RecursionError):
        return "llm" if weights and any((folder / name).is_file() for name in _TOKENIZERS) else None
    if not isinstance(config_fields, dict) or not ("architectures" in config_fields or "model_type" in config_fields):
        return None
    if weights:
        generates = _is_decoder(config_fields) or _is_text_to_text(config_fields, folder) or takes_images(folder)
        return "llm" if generates else "huggingface"
    if not _is_decoder(config_fields):
        return None
    if (folder / "openvino_model.xml").is_file():
        return "openvino_genai"
    return None if _holds_other_models(folder) else "llm"


def is_sentence_transformers(folder: Path) -> bool:
    """Return whether sentence-transformers wrote the folder: its model embeds or compares texts, also a decoder."""
    if (folder / POOLING_FILE).is_file():
        return True
    try:
        listed = json.loads((folder / MODULES_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return (
        isinstance(listed, list) and bool(listed) and all(isinstance(each, dict) and "type" in each for each in listed)
    )


def _is_decoder(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or []
    return isinstance(names, list) and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _is_text_to_text(config: Mapping[str, Any], folder: Path) -> bool:
    """Return whether the model generates text from text by an encoder and a decoder, as T5, BART and Marian do.

    Those that read images or sound have a processor.
    """
    names = config.get("architectures") or []
    heads = ("ForConditionalGeneration", "MTModel", "T5WithLMHeadModel")
    is_named = isinstance(names, list) and any(str(name).endswith(heads) for name in names)
    return is_named and bool(config.get("is_encoder_decoder")) and not any((folder / n).is_file() for n in PROCESSORS)


def _holds_other_models(folder: Path) -> bool:
    """Return whether the folder or a sub-folder has the model in another format, as exporters write it."""
    below = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return any(is_candidate(entry) for each in (folder, *below) for entry in each.iterdir())
