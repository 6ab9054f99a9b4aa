"""Recognise the runtime of folders that transformers, sentence-transformers or optimum-intel wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.core.documents import read_json
from dragoman.core.errors import ModelFailed
from dragoman.runtimes.recognise import is_candidate

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
# Configurations of processors, of which a model that takes images has at least one.
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


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
        config_fields = read_json(config)
    except ValueError:
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
        listed = read_json(folder / MODULES_FILE)
    except (OSError, ValueError):
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


def takes_images(folder: Path) -> bool:
    """Return whether the model of a folder answers chats with images: it has a processor and a chat template."""
    if not any((folder / name).is_file() for name in PROCESSORS):
        return False
    config = load_object(folder / "config.json", "its configuration")
    names = config.get("architectures")
    if "vision_config" not in config or not isinstance(names, list):
        return False
    has_template = any((folder / name).is_file() for name in _TEMPLATES) or any(
        "chat_template" in load_object(folder / name, "its settings")
        for name in ("tokenizer_config.json", PROCESSORS[0])
        if (folder / name).is_file()
    )
    return has_template and any(str(name).endswith("ForConditionalGeneration") for name in names)


def load_object(path: Path, description: str) -> Mapping[str, Any]:
    """Return the JSON object in a file; `description` describes it in errors."""
    try:
        value = read_json(path)
    except FileNotFoundError as error:
        raise ModelFailed(
            f"'{path.name}' not found in '{path.parent.name}', {description}; copy it from the model"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelFailed(
            f"{path.name} in '{path.parent.name}' cannot be read ({error}); copy it from the model again"
        ) from error
    if not isinstance(value, dict):
        raise ModelFailed(f"{path.name} in '{path.parent.name}' is not a JSON object; copy it from the model again")
    return value
