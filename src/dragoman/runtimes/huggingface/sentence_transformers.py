"""The files of sentence-transformers in a model's folder: modules, limits, prompts and activation functions.

The format is that of sentence-transformers 6.2 and its older spellings. A key is either obeyed or rejected by its name,
because a file that is read in part gives vectors that look right and are not.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.core.documents import read_json
from dragoman.core.errors import ModelFailed
from dragoman.runtimes.pretrained import MODULES_FILE, POOLING_FILE

log = logging.getLogger("dragoman.runtimes")

Fields = Mapping[str, Any]
_MODEL_FILE = "config_sentence_transformers.json"
# Settings of the transformer; the older names are those of its class.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# What the transformer computes, by `transformer_task`: the name of its output.
_TASKS: Mapping[str, str] = {
    "feature-extraction": "last_hidden_state",
    "fill-mask": "logits",
    "sequence-classification": "logits",
}
# Keys of a transformer that change nothing here: versions, speed, and the name under which the next module reads.
_WITHOUT_EFFECT = frozenset({"unpad_inputs", "module_output_name"})
_ARGUMENTS: Mapping[str, str] = {
    "model_args": "model_kwargs",
    "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}
# Keys that are supported only without a value: those of multi-vector models, and the tokenizer of another folder.
_UNSUPPORTED = ("query_length", "document_length", "query_expansion", "tokenizer_name_or_path")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True, slots=True)
class Module:
    """A module after the transformer: the name of its class, its settings, and its folder."""

    kind: str
    fields: Fields
    folder: Path


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """What the files say.

    folder: that of the transformer. task: a key of `_TASKS`. max_length: tokens of a text, None for the tokenizer's.
    prompts: texts by name that are put before a text; `default_prompt` is the name of the one that is used by default.
    dimensions: how many numbers of a vector are kept, None for all. similarity: one of `SIMILARITIES`.
    activation: the full name of the class of a cross-encoder's activation function, "" for the default.
    """

    folder: Path
    modules: tuple[Module, ...] = ()
    task: str = "feature-extraction"
    max_length: int | None = None
    lowercase: bool = False
    model_kwargs: Fields = field(default_factory=dict)
    tokenizer_kwargs: Fields = field(default_factory=dict)
    config_kwargs: Fields = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dimensions: int | None = None
    similarity: str = "cosine"
    activation: str = ""


def read_encoder_files(folder: Path) -> EncoderFiles:
    """Return what the files say. Raises ModelFailed naming the file and the key that cannot be obeyed."""
    listed = _listed_modules(folder)
    if listed[0][0] not in ("Transformer", "MLMTransformer"):
        raise ModelFailed(
            f"{folder / MODULES_FILE}: module '{listed[0][0]}' of sentence-transformers is not supported as the first "
            "one; expected Transformer"
        )
    transformer = folder / listed[0][1]
    values = _transformer_values(transformer)
    if listed[0][0] == "MLMTransformer":
        values.setdefault("task", "fill-mask")
    modules = []
    for kind, path in listed[1:]:
        modules.append(Module(kind, _read(folder / path / "config.json", required=False), folder / path))
    return EncoderFiles(transformer, tuple(modules), **values, **_model_values(folder))


def apply_parameters(files: EncoderFiles, parameters: Fields) -> dict[str, Any]:
    """Return the fields that parameters of the model replace. Raises ModelFailed naming an invalid parameter."""
    where = "parameter"
    values: dict[str, Any] = {}
    if (length := parameters.get("max_seq_length")) is not None:
        values["max_length"] = _count(where, "max_seq_length", length)
    if (size := parameters.get("truncate_dim")) is not None:
        values["dimensions"] = _count(where, "truncate_dim", size)
    if (prompts := parameters.get("prompts")) is not None:
        values["prompts"] = {**files.prompts, **_texts(where, "prompts", prompts)}
    if (name := parameters.get("default_prompt_name")) is not None:
        values["default_prompt"] = name
    known = values.get("prompts", files.prompts)
    if values.get("default_prompt") and values["default_prompt"] not in known:
        raise _wrong(where, "default_prompt_name", f"one of {', '.join(known) or 'the prompts'}", name)
    return values


# --- modules.json ----------------------------------------------------------------------------------------------


def _listed_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class and the sub-folder of each module."""
    path = folder / MODULES_FILE
    if not path.is_file():  # the first versions had only these two
        return [("Transformer", ""), ("Pooling", POOLING_FILE.partition("/")[0])]
    listed = _load(path)
    if not isinstance(listed, list) or not listed:
        raise ModelFailed(f"{path}: expected a list of modules")
    modules = []
    for module in listed:
        if not isinstance(module, dict) or not all(isinstance(module.get(name), str) for name in ("type", "path")):
            raise ModelFailed(f"{path}: expected modules with 'type' and 'path', got {str(module)[:200]}")
        kind, below = module["type"], module["path"]
        if not kind.startswith("sentence_transformers."):
            raise ModelFailed(f"{path}: module '{kind}' is code of the model's own, and no code of a model is run")
        if module.get("kwargs"):
            raise _wrong(path, f"kwargs of {kind}", "none", module["kwargs"])
        if not (folder / below).resolve().is_relative_to(folder.resolve()):
            raise _wrong(path, f"path of {kind}", "a folder in the model's folder", below)
        modules.append((kind.rpartition(".")[2], below))
    return modules


# --- the transformer -------------------------------------------------------------------------------------------


def _transformer_values(folder: Path) -> dict[str, Any]:
    path = next((folder / name for name in _TRANSFORMER_FILES if (folder / name).is_file()), None)
    if path is None:
        return {}
    fields = {_ARGUMENTS.get(name, name): value for name, value in _read(path).items() if value is not None}
    values: dict[str, Any] = {}
    for name, value in fields.items():
        match name:
            case "max_seq_length":
                values["max_length"] = _count(path, name, value)
            case "do_lower_case":
                values["lowercase"] = _flag(path, name, value)
            case "transformer_task":
                if value not in _TASKS:
                    raise _wrong(path, name, f"one of {', '.join(_TASKS)}", value)
                values["task"] = value
            case "model_kwargs" | "processor_kwargs" | "config_kwargs":
                arguments = {
                    key: each for key, each in _object(path, name, value).items() if key != "trust_remote_code"
                }
                values[name.replace("processor", "tokenizer")] = arguments
            case "modality_config":
                _check_modalities(path, value, fields.get("transformer_task", "feature-extraction"))
            case "processing_kwargs":
                values |= _processing_values(path, value)
            case _ if name in _UNSUPPORTED:
                raise ModelFailed(f"{path}: '{name}' is not supported; expected none, got {value!r}")
            case _ if name not in _WITHOUT_EFFECT:
                raise ModelFailed(f"{path}: unknown key '{name}', which may change the vectors")
    return values


def _check_modalities(path: Path, value: Any, task: str) -> None:
    """Raise ModelFailed unless texts are given to the model as they are."""
    modalities = _object(path, "modality_config", value)
    expected = {"method": "forward", "method_output_name": _TASKS.get(task)}
    if "message" in modalities or modalities.get("text") != expected:
        raise ModelFailed(
            f"{path}: 'modality_config' is supported only with texts as they are, "
            f"{json.dumps({'text': expected})}; got {json.dumps(value)[:200]}"
        )


def _processing_values(path: Path, value: Any) -> dict[str, Any]:
    """Return the maximum length in arguments of the tokenizer; of others only those without effect are allowed."""
    values: dict[str, Any] = {}
    for part, arguments in _object(path, "processing_kwargs", value).items():
        for name, each in _object(path, f"processing_kwargs.{part}", arguments).items():
            if part in ("text", "common") and name == "max_length":
                values["max_length"] = _count(path, f"processing_kwargs.{part}.{name}", each)
            elif part not in ("text", "common") or name not in ("padding", "truncation") or each is False:
                raise ModelFailed(f"{path}: 'processing_kwargs.{part}.{name}' is not supported")
    return values


# --- the model -------------------------------------------------------------------------------------------------


def _model_values(folder: Path) -> dict[str, Any]:
    path = folder / _MODEL_FILE
    if not path.is_file():
        return {}
    values: dict[str, Any] = {}
    for name, value in _read(path).items():
        match name:
            case _ if value is None or name in ("__version__", "requirements"):
                pass
            case "prompts":
                values["prompts"] = _texts(path, name, value)
            case "default_prompt_name":
                values["default_prompt"] = value
            case "truncate_dim":
                values["dimensions"] = _count(path, name, value)
            case "similarity_fn_name":
                if value not in SIMILARITIES:
                    raise _wrong(path, name, f"one of {', '.join(SIMILARITIES)}", value)
                values["similarity"] = value
            case "activation_fn":
                values["activation"] = str(value)
            case "model_type":
                if value not in ("SentenceTransformer", "SparseEncoder", "CrossEncoder"):
                    raise _wrong(path, name, "SentenceTransformer, SparseEncoder or CrossEncoder", value)
            case _:  # sentence-transformers ignores them, too
                log.warning("a key of sentence-transformers has no effect: file=%s key=%s", path, name)
    default = values.get("default_prompt")
    if default is not None and default not in values.get("prompts", {}):
        raise _wrong(
            path, "default_prompt_name", f"one of {', '.join(values.get('prompts', {})) or 'prompts'}", default
        )
    return values


# --- values ----------------------------------------------------------------------------------------------------


def _read(path: Path, *, required: bool = True) -> Fields:
    if not required and not path.is_file():
        return {}
    value = _load(path)
    if not isinstance(value, dict):
        raise ModelFailed(f"{path}: expected a JSON object")
    return value


def _load(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ModelFailed(f"{path} cannot be read: {error}") from error


def _wrong(where: Path | str, name: str, expected: str, value: Any) -> ModelFailed:
    """Return the error of an invalid value; `where` is a file, or "parameter"."""
    place = f"{where}:" if isinstance(where, Path) else where
    return ModelFailed(f"{place} '{name}': expected {expected}, got {value!r:.200}")


def _count(where: Path | str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(where, name, "an integer from 1", value)
    return value


def _flag(where: Path | str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, name, "true or false", value)
    return value


def _object(where: Path | str, name: str, value: Any) -> Fields:
    if not isinstance(value, Mapping):
        raise _wrong(where, name, "an object", value)
    return value


def _texts(where: Path | str, name: str, value: Any) -> dict[str, str]:
    texts = {key: "" if each is None else each for key, each in _object(where, name, value).items()}
    if not all(isinstance(each, str) for each in texts.values()):
        raise _wrong(where, name, "texts by name", value)
    return texts
