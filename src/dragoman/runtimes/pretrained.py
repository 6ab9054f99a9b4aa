"""Folders that `save_pretrained` of transformers wrote, and what optimum-intel made of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.runtimes.recognise import is_candidate

# The weights of a model, or the list of their files.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The files that a tokenizer is read from.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def pretrained_runtime(folder: Path) -> str | None:
    """Return the runtime of a folder with a configuration of transformers: `huggingface`, `llm` or `openvino_genai`.

    The folder of a decoder is a model even without weights, so that loading it reports what is missing.
    """
    config = folder / "config.json"
    if not config.is_file():
        return None
    weights = any((folder / name).is_file() for name in _WEIGHTS)
    try:
        found = json.loads(config.read_bytes())
    except (ValueError, RecursionError):
        return "llm" if weights and any((folder / name).is_file() for name in _TOKENIZERS) else None
    if not isinstance(found, dict) or not ("architectures" in found or "model_type" in found):
        return None
    if weights:
        return "llm" if _is_decoder(found) else "huggingface"
    if not _is_decoder(found):
        return None
    if (folder / "openvino_model.xml").is_file():
        return "openvino_genai"
    return None if _holds_other_models(folder) else "llm"


def _is_decoder(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or []
    return isinstance(names, list) and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _holds_other_models(folder: Path) -> bool:
    """Return whether the folder or a sub-folder has the model in another format, as exporters write it."""
    below = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return any(is_candidate(entry) for place in (folder, *below) for entry in place.iterdir())
