"""The maximum number of tokens of a model, found by trying."""

import importlib
from bisect import bisect_left
from typing import Any

import torch

from dragoman.core.errors import ModelFailed

# Tokenizers without a maximum have one of 1e30.
UNLIMITED = 1 << 30
# Without a maximum in the configuration so many positions are tried. Models with a table of positions have fewer than
# `_MAX_TRIED`; the masks of those with rotary embeddings would take gigabytes.
_UNNAMED, _MAX_TRIED = 4096, 8200


def limit_tokenizer(tokenizer: Any, model: Any, max_length: int | None = None, *, lowercase: bool = False) -> None:
    """Set the maximum length of a tokenizer: `max_length`, else its own, but no more than the model takes.

    lowercase: it is to ignore case. Raises ModelFailed if it cannot.
    """
    named = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = max_length or tokenizer.model_max_length
    if isinstance(named, int) and named > 0:
        limit = min(limit, named)
    tokenizer.model_max_length = find_max_tokens(model, limit, tokenizer.pad_token_id)
    if lowercase:
        _lowercase(tokenizer)


def _lowercase(tokenizer: Any) -> None:
    if not tokenizer.is_fast:
        raise ModelFailed("'do_lower_case': expected a fast tokenizer, a tokenizer.json in the model's folder")
    normalizers = importlib.import_module("tokenizers.normalizers")
    backend = tokenizer.backend_tokenizer
    rest = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])


class _Reached(Exception):
    """The first layer is reached: every token has an embedding and a position."""


def find_max_tokens(model: Any, limit: int, pad_token: int | None) -> int:
    """Return the largest number of tokens, at most `limit`, that a model on the CPU has positions for.

    Configurations do not tell: a model of RoBERTa's family counts positions from the padding token's id plus 1. The
    model computes a text of this length up to its first layer, and shorter ones if it fails.
    """
    tried = min(limit, _MAX_TRIED) if limit < UNLIMITED else _UNNAMED
    if _MAX_TRIED < limit < UNLIMITED or _has_positions(model, tried, pad_token):
        return limit
    if not _has_positions(model, 1, pad_token):
        return limit  # it needs other inputs than tokens
    return bisect_left(range(1, tried + 1), True, key=lambda count: not _has_positions(model, count, pad_token))


def _has_positions(model: Any, count: int, pad_token: int | None) -> bool:
    padding = (pad_token, getattr(model.config, "pad_token_id", None), 1)  # whose positions are not counted
    token = next(each for each in range(4) if each not in padding)
    layers = max((each for each in model.modules() if isinstance(each, torch.nn.ModuleList)), key=len, default=None)
    hook = layers[0].register_forward_pre_hook(_stop) if layers else None
    try:
        with torch.inference_mode():
            model(input_ids=torch.full((1, count), token, device=model.device))
    except _Reached:
        return True
    except Exception:  # code of any model
        return False
    finally:
        if hook is not None:
            hook.remove()
    return True


def _stop(*_: Any) -> None:
    raise _Reached
