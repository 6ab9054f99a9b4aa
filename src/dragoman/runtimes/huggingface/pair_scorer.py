"""Cross-encoders: scores of pairs of texts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dragoman.core.scoring import Score, Scored
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.huggingface.layers import activation_function
from dragoman.runtimes.huggingface.sentence_transformers import EncoderFiles
from dragoman.runtimes.huggingface.text_tokenizer import TextTokenizer

_BATCH_SIZE = 16
_DEFAULTS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    1: torch.sigmoid,
    2: lambda logits: torch.softmax(logits, 1),
}


class PairScorer:
    """A cross-encoder of one or two labels with its tokenizer; answers Score.

    The score is the last label's, after the activation function that sentence-transformers wrote into a file; by
    default the sigmoid of the only label, or the softmax of two. The default prompt is put before the first text of a
    pair.
    """

    def __init__(self, model: Any, tokenizer: Any, files: EncoderFiles, spec: ModelSpec) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._prompt = files.prompts.get(files.default_prompt, "")
        self._texts = TextTokenizer(tokenizer, truncates=spec.parameters.get("truncate") is True)
        settings = model.config.to_dict()
        name = files.activation or (settings.get("sentence_transformers") or {}).get("activation_fn")
        name = name or settings.get("sbert_ce_default_activation_function")
        default = _DEFAULTS[model.config.num_labels]
        self._activation = activation_function("config.json", name) if isinstance(name, str) else default

    def __call__(self, call: Score) -> Scored:
        """Return the scores in the order of the pairs. Raises InvalidInput for a pair that is too long."""
        pairs = [(self._prompt + first, second) for first, second in call.pairs]
        encoded = [self._texts.encode(pair, call, f"pair {i}") for i, pair in enumerate(pairs)]
        result = np.zeros(len(encoded))
        size = _BATCH_SIZE if self._tokenizer.pad_token_id is not None else 1
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            result[rows] = self._score([encoded[i] for i in rows], raw=call.raw)
        return Scored(tuple(result.tolist()), sum(len(each["input_ids"]) for each in encoded))

    def _score(self, rows: Sequence[Any], *, raw: bool) -> Any:
        batch = self._tokenizer.pad(rows, padding=len(rows) > 1, return_tensors="pt", verbose=False)
        with torch.inference_mode():
            logits = self._model(**batch.to(self._model.device)).logits.float()
            values = logits if raw else self._activation(logits)
        return values[:, -1].cpu().numpy()
