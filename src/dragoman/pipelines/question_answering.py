"""Extractive question answering."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput

_MAX_TOKENS = 384  # of question and context together; a longer context is split into overlapping chunks
_STRIDE = 128
_MAX_ANSWER_TOKENS = 15

Answer = dict[str, Any]
Options = Mapping[str, Any]


class AnswerExtractor:
    """A model of extractive question answering with its fast tokenizer.

    The rule is that of transformers' pipeline up to version 4, which version 5 no longer has: the probability of a span
    is that of its first token times that of its last, each a softmax over the context's tokens.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._model, self._tokenizer = model, tokenizer

    def __call__(self, question: str, context: str, options: Options) -> Answer | list[Answer]:
        """Return the best answer, {score, start, end, answer}, or a list of them if `top_k` is above 1."""
        encoded = self._encode(question, context)
        found: dict[tuple[int, int], float] = {}  # chunks overlap: a span may be found twice
        blank = 1.0
        for i, (start, end) in enumerate(self._scores(encoded)):
            tokens = np.array([part == 1 for part in encoded.sequence_ids(i)])
            is_cls = np.array([token == self._tokenizer.cls_token_id for token in encoded["input_ids"][i]])
            begin, finish = (_softmax(np.where(tokens | is_cls, logits, -np.inf)) for logits in (start, end))
            blank = min(blank, float(begin[is_cls].sum() * finish[is_cls].sum()))
            for first, last, score in _spans(begin, finish, tokens, options):
                span = self._characters(encoded, i, first, last, options)
                found[span] = max(score, found.get(span, 0.0))
        if options.get("handle_impossible_answer", False):
            found[0, 0] = blank
        best = sorted(found.items(), key=lambda item: -item[1])[: options.get("top_k", 1)]
        answers = [{"score": score, "start": a, "end": b, "answer": context[a:b]} for (a, b), score in best]
        return answers if options.get("top_k", 1) > 1 else answers[0]

    def _encode(self, question: str, context: str) -> Any:
        limit = min(self._tokenizer.model_max_length, _MAX_TOKENS)
        count = len(self._tokenizer(question)["input_ids"])
        room = limit - count - 1
        if room < 1:
            raise InvalidInput(f"input 'question': {count} tokens leave no room for the context; the limit is {limit}")
        encoded = self._tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=limit,
            stride=min(_STRIDE, room // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        if 1 not in encoded.sequence_ids(0):
            raise InvalidInput(f"input 'context': expected some text, got {context!r}")
        return encoded

    def _scores(self, encoded: Any) -> Iterator[tuple[Array, Array]]:
        """Yield the logits of each token as start and as end of the answer, for each chunk of the context."""
        for i in range(len(encoded["input_ids"])):
            names = [name for name in self._tokenizer.model_input_names if name in encoded]
            feed = {n: self._torch.tensor([encoded[n][i]], device=self._model.device) for n in names}
            with self._torch.inference_mode():
                output = self._model(**feed)
            yield output.start_logits[0].float().cpu().numpy(), output.end_logits[0].float().cpu().numpy()

    def _characters(self, encoded: Any, chunk: int, first: int, last: int, options: Options) -> tuple[int, int]:
        """Return the characters of a span, extended to whole words."""
        offsets = encoded["offset_mapping"][chunk]
        words = encoded.word_ids(chunk)
        if not options.get("align_to_words", True) or words[first] is None or words[last] is None:
            return int(offsets[first][0]), int(offsets[last][1])
        left = encoded.word_to_chars(chunk, words[first], sequence_index=1)
        right = encoded.word_to_chars(chunk, words[last], sequence_index=1)
        return int(left[0]), int(right[1])


def _softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max())
    result: Array = shifted / shifted.sum()
    return result


def _spans(begin: Array, finish: Array, context: Array, options: Options) -> list[tuple[int, int, float]]:
    """Return the best spans of one chunk: within the context, and at most `max_answer_len` tokens long."""
    longest = options.get("max_answer_len", _MAX_ANSWER_TOKENS)
    allowed = np.tril(np.triu(np.outer(context, context)), longest - 1)
    scores = np.where(allowed, np.outer(begin, finish), -1.0)
    best = np.argsort(-scores, axis=None, kind="stable")[: options.get("top_k", 1)]
    pairs = zip(*np.unravel_index(best, scores.shape), strict=True)
    return [(int(a), int(b), float(scores[a, b])) for a, b in pairs if allowed[a, b]]
