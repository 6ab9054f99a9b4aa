"""Embeddings: one vector per text, pooled from the states of an encoder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dragoman.core.calls import Embed, Embedded
from dragoman.core.datatypes import FP32
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.tensor import Tensor

Pooling = Literal["mean", "cls", "max", "last"]
# The names in the configuration of sentence-transformers.
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """Pooling of token states into one vector; `normalized`: the vector has length 1."""

    pooling: Pooling = "mean"
    normalized: bool = True

    @classmethod
    def of(cls, folder: Path) -> "PoolingOptions":
        """Read the pooling of sentence-transformers from a folder; without one, the normalized mean."""
        path = folder / "1_Pooling" / "config.json"
        if not path.is_file():
            return cls()
        try:
            value, modules = json.loads(path.read_text()), folder / "modules.json"
            types = [m["type"] for m in json.loads(modules.read_text())] if modules.is_file() else []
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFailed(f"{path} cannot be read: {error}") from error
        modes = [mode for name, mode in _MODES.items() if value.get(name)]
        if len(modes) != 1:
            raise ModelFailed(f"{path}: expected one of {', '.join(_MODES)}; got {len(modes)} of them")
        return cls(modes[0], any(kind.endswith(".Normalize") for kind in types))


class Embedder:
    """An encoder with its tokenizer; answers Embed."""

    def __init__(self, torch: Any, model: Any, tokenizer: Any, options: PoolingOptions) -> None:
        self._torch, self._model, self._tokenizer, self._options = torch, model, tokenizer, options

    def __call__(self, call: Embed) -> Embedded:
        """Return the vectors in the order of the inputs. Raises InvalidInput if a text is longer than the model
        allows."""
        ids = [self._token_ids(each, i) for i, each in enumerate(call.inputs)]
        vectors = np.zeros((len(ids), self._model.config.hidden_size), np.float32)
        padded = self._tokenizer.pad_token_id is not None
        size = _BATCH_SIZE if padded else 1
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # similar lengths need little padding
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            vectors[rows] = self._encode_batch([ids[i] for i in rows])
        return Embedded(Tensor(vectors, FP32), sum(map(len, ids)))

    def _token_ids(self, each: str | tuple[int, ...], index: int) -> list[int]:
        if isinstance(each, str):
            ids: list[int] = self._tokenizer(each, verbose=False)["input_ids"]
        else:
            ids = list(each)
            unknown = next((i for i in ids if i >= self._model.config.vocab_size), None)
            if unknown is not None:
                raise InvalidInput(
                    f"input {index}: expected token ids below {self._model.config.vocab_size}, got {unknown}"
                )
        limit = self._tokenizer.model_max_length
        if not 0 < len(ids) <= limit:
            raise InvalidInput(f"input {index} has {len(ids)} tokens; the model takes 1 to {limit}")
        return ids

    def _encode_batch(self, rows: Sequence[list[int]]) -> Any:
        torch, device = self._torch, self._model.device
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self._tokenizer.pad_token_id or 0, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        with torch.inference_mode():
            states = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state.float()
            vectors = self._pool(states, mask.to(device))
            if self._options.normalized:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.cpu().numpy()

    def _pool(self, states: Any, mask: Any) -> Any:
        torch, weights = self._torch, mask.unsqueeze(-1)
        match self._options.pooling:
            case "cls":
                return states[:, 0]
            case "last":
                return states[torch.arange(len(states)), mask.sum(1) - 1]
            case "max":
                return states.masked_fill(weights == 0, float("-inf")).amax(1)
        return (states * weights).sum(1) / weights.sum(1)
