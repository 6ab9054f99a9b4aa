"""Sampling defaults and end tokens of a model, from its `generation_config.json`."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dragoman.core.documents import read_json
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.sampling import GREEDY_BELOW, KINDS, MODEL_DEFAULTS, check_value
from dragoman.core.text import Sampling
from dragoman_text.generation.vocabulary import Vocabulary

log = logging.getLogger("dragoman.generation")

_FILE = "generation_config.json"
# A GGUF file has no defaults: these are those of llama.cpp, for which such files are made. With a temperature of 1
# alone, answers of small quantized models do not end.
_OF_GGUF: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_KINDS = {name: KINDS[name] for name in MODEL_DEFAULTS}
# Rules of transformers that are not applied: they are named in the log.
_NOT_APPLIED: Mapping[str, Any] = {
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "typical_p": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "penalty_alpha": None,
    "watermarking_config": None,
    "stop_strings": None,
    "min_length": 0,
    "min_new_tokens": None,
}


def end_tokens(folder: Path, vocabulary: Vocabulary) -> frozenset[int]:
    """Return the end tokens of generation_config.json, else config.json, and that of the tokenizer."""
    ids = _load(folder / _FILE).get("eos_token_id")
    if ids is None:
        config = _load(folder / "config.json")
        ids = config.get("eos_token_id")
        if ids is None and isinstance(config.get("text_config"), dict):
            ids = config["text_config"].get("eos_token_id")
    named = ids if isinstance(ids, list) else [ids]
    return frozenset(int(each) for each in (*named, vocabulary.tokenizer.eos_token_id) if each is not None)


def default_sampling(folder: Path) -> dict[str, Any]:
    """Return the fields of Sampling that generation_config.json sets, as vLLM reads them; log what is not applied.

    folder: the model's, or its GGUF file, which has the defaults of llama.cpp.
    """
    if folder.is_file():
        return dict(_OF_GGUF)
    config = _load(folder / _FILE)
    values: dict[str, Any] = {}
    for name in sorted(MODEL_DEFAULTS):
        if config.get(name) is None:
            continue
        try:
            values[name] = check_value(name, config[name], KINDS[name])
        except InvalidInput as error:
            log.warning("%s of '%s' is not applied: %s", _FILE, folder.name, error.message)
    rest = [name for name, neutral in _NOT_APPLIED.items() if config.get(name) not in (None, neutral)]
    if rest:
        log.warning("%s of '%s': not applied: %s", _FILE, folder.name, ", ".join(rest))
    return values


def stated_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults in the settings of a model. Raises ModelFailed for an unknown or invalid one."""
    try:
        return {name: check_value(name, value, _KINDS[name]) for name, value in values.items()}
    except KeyError as error:
        names = ", ".join(sorted(_KINDS))
        raise ModelFailed(f"parameter 'sampling': expected {names}, got {error}") from None
    except InvalidInput as error:
        raise ModelFailed(f"parameter 'sampling': {error.message}") from None


def apply_defaults(sampling: Sampling, defaults: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters with the model's defaults where the request leaves the choice to the model."""
    names = sampling.model_defaults & defaults.keys()
    if sampling.max_new_tokens is not None:
        names -= {"max_new_tokens"}
    if sampling.num_beams > 1:
        names &= {"max_new_tokens"}
    values = {name: defaults[name] for name in names}
    if values.get("temperature", 1.0) < GREEDY_BELOW or values.get("top_p") == 0:
        values = {name: value for name, value in values.items() if name not in ("temperature", "top_p")}
        values["do_sample"] = False
    if "max_new_tokens" in values:
        values["shorten"] = True
    return replace(sampling, **values) if values else sampling


def _load(path: Path) -> Mapping[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
