"""Heads over an encoder or a decoder: embeddings, pooled from its states, and extractive question answering."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dragoman.core.calls import Embed, Embedded
from dragoman.core.datatypes import FP32, Array
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.scoring import Score, Scored
from dragoman.core.tensor import Tensor
from dragoman.runtimes.recognise import POOLING_FILE, has_pooling

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

    def __init__(self, torch: Any, model: Any, tokenizer: Any) -> None:
        self._torch, self._model, self._tokenizer = torch, model, tokenizer

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


class _TokenizerBySide:
    """A tokenizer that truncates on either side; its special tokens are kept."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizers = {tokenizer.truncation_side: tokenizer, "": tokenizer}

    def truncate_texts(self, texts: Sequence[str], call: Embed | Score) -> Any:
        """Return the tokens of a text or a pair, cut as the call requests.

        Raises InvalidInput if no token of the text would remain.
        """
        tokenizer = self._tokenizers.get(call.truncation_side)
        if tokenizer is None:
            tokenizer = copy.deepcopy(self._tokenizers[""])
            tokenizer.truncation_side = call.truncation_side
            self._tokenizers[call.truncation_side] = tokenizer
        limit = min(tokenizer.model_max_length, call.truncate or tokenizer.model_max_length)
        least = tokenizer.num_special_tokens_to_add(len(texts) > 1) + 1
        if limit < least:
            raise InvalidInput(f"truncate: expected at least {least}, as special tokens count too; got {limit}")
        return tokenizer(*texts, truncation="longest_first", max_length=limit, verbose=False)


class PairScorer:
    """A cross-encoder with its tokenizer; answers Score.

    The activation function is the one that sentence-transformers wrote into the model's configuration; by default the
    sigmoid of the only label, or the softmax of the second of two.
    """

    def __init__(self, torch: Any, model: Any, tokenizer: Any) -> None:
        self._torch, self._model, self._tokenizer = torch, model, tokenizer
        self._tokenizers = _TokenizerBySide(tokenizer)
        settings = model.config.to_dict()
        name = (settings.get("sentence_transformers") or {}).get("activation_fn")
        name = name or settings.get("sbert_ce_default_activation_function")
        self._is_identity = isinstance(name, str) and name.endswith(".Identity")

    def __call__(self, call: Score) -> Scored:
        """Return the scores in the order of the pairs. Raises InvalidInput for a pair that is too long."""
        encoded = [self._encode(pair, i, call) for i, pair in enumerate(call.pairs)]
        result = np.zeros(len(encoded))
        size = _BATCH_SIZE if self._tokenizer.pad_token_id is not None else 1
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            result[rows] = self._score([encoded[i] for i in rows], raw=call.raw)
        return Scored(tuple(result.tolist()), sum(len(each["input_ids"]) for each in encoded))

    def _encode(self, pair: tuple[str, str], index: int, call: Score) -> Any:
        limit = self._tokenizer.model_max_length
        if call.truncate is not None:
            return self._tokenizers.truncate_texts(pair, call)
        encoded = self._tokenizer(*pair, verbose=False)
        count = len(encoded["input_ids"])
        if count > limit:
            raise InvalidInput(f"pair {index} has {count} tokens; the model takes at most {limit}")
        return encoded

    def _score(self, rows: Sequence[Any], *, raw: bool) -> Any:
        torch = self._torch
        batch = self._tokenizer.pad(rows, padding=len(rows) > 1, return_tensors="pt", verbose=False)
        with torch.inference_mode():
            logits = self._model(**batch.to(self._model.device)).logits.float()
            if logits.shape[1] == 1:
                values = logits[:, 0] if raw or self._is_identity else torch.sigmoid(logits[:, 0])
            else:
                values = logits[:, 1] if raw or self._is_identity else torch.softmax(logits, 1)[:, 1]
        return values.cpu().numpy()


Pooling = Literal["mean", "cls", "max", "last"]
# The names in the configuration of sentence-transformers.
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
# The names of `pooling_mode` in newer files.
_SHORT_MODES: dict[str, Pooling] = {"cls": "cls", "max": "max", "lasttoken": "last", "mean": "mean"}
_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """Pooling of token states into one vector; `normalized`: the vector has length 1.

    Without `pooling` it is "last" for decoders, whose last token alone sees the whole text, and "mean" for encoders.
    """

    pooling: Pooling | None = None
    normalized: bool = True

    @classmethod
    def of(cls, folder: Path, parameters: Options) -> "PoolingOptions":
        """Return the parameters `pooling` and `normalize`, else the options of sentence-transformers in a folder.

        Raises ModelFailed for an invalid value.
        """
        options = cls._of_folder(folder)
        name, normalize = parameters.get("pooling"), parameters.get("normalize", options.normalized)
        pooling = next((mode for mode in _MODES.values() if str(name).lower() == mode), options.pooling)
        if name is not None and str(name).lower() != pooling:
            raise ModelFailed(f"parameter 'pooling': expected one of last, mean, cls, max; got {name!r}")
        if not isinstance(normalize, bool):
            raise ModelFailed(f"parameter 'normalize': expected true or false, got {normalize!r}")
        return cls(pooling, normalize)

    @classmethod
    def _of_folder(cls, folder: Path) -> "PoolingOptions":
        if not has_pooling(folder):
            return cls()
        path = folder / POOLING_FILE
        try:
            value, modules = json.loads(path.read_text()), folder / "modules.json"
            types = [m["type"] for m in json.loads(modules.read_text())] if modules.is_file() else []
        except (ValueError, KeyError, TypeError) as error:
            raise ModelFailed(f"{path} cannot be read: {error}") from error
        unknown = [kind for kind in types if not kind.endswith((".Transformer", ".Pooling", ".Normalize"))]
        if unknown:
            raise ModelFailed(f"{modules}: module {unknown[0]} of sentence-transformers is not supported")
        modes = [mode for name, mode in _MODES.items() if value.get(name)]
        modes = modes or [mode for name, mode in _SHORT_MODES.items() if value.get("pooling_mode") == name]
        if len(modes) != 1:
            raise ModelFailed(f"{path}: expected one of {', '.join(_MODES)}; got {len(modes)} of them")
        return cls(modes[0], any(kind.endswith(".Normalize") for kind in types))


class Embedder:
    """An encoder or a decoder with its tokenizer; answers Embed."""

    def __init__(self, torch: Any, model: Any, tokenizer: Any, options: PoolingOptions) -> None:
        self._torch, self._model, self._tokenizer, self._options = torch, model, tokenizer, options
        self._tokenizers = _TokenizerBySide(tokenizer)
        self._is_causal = self._measure_causality()
        self._pooling: Pooling = options.pooling or ("last" if self._is_causal else "mean")
        if self._is_causal:
            model.config.use_cache = False

    def __call__(self, call: Embed) -> Embedded:
        """Return the vectors in the order of the inputs. Raises InvalidInput if a text is longer than the model
        allows."""
        ids = [self._token_ids(each, i, call) for i, each in enumerate(call.inputs)]
        # Padding follows the text, where a causal model does not see it, whatever the token.
        can_pad = self._is_causal or self._tokenizer.pad_token_id is not None
        size = _BATCH_SIZE if can_pad else 1
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # similar lengths need little padding
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        found = np.concatenate([self._encode_batch([ids[i] for i in rows]) for rows in batches])
        vectors = np.empty_like(found)
        vectors[order] = found
        return Embedded(Tensor(vectors, FP32), sum(map(len, ids)))

    def _token_ids(self, each: str | tuple[int, ...], index: int, call: Embed) -> list[int]:
        limit = self._tokenizer.model_max_length
        if isinstance(each, str):
            plain = call.truncate is None
            encoded = self._tokenizer(each, verbose=False) if plain else self._tokenizers.truncate_texts((each,), call)
            ids: list[int] = encoded["input_ids"]
        else:
            ids = list(each)
            if call.truncate is not None:
                count = min(limit, call.truncate or limit)
                side = call.truncation_side or self._tokenizer.truncation_side
                ids = ids[-count:] if side == "left" else ids[:count]
            size = self._model.config.get_text_config().vocab_size
            unknown = next((i for i in ids if i >= size), None)
            if unknown is not None:
                raise InvalidInput(f"input {index}: expected token ids below {size}, got {unknown}")
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
            vectors = self._pool(self._states(ids, mask), mask.to(device))
            if self._options.normalized:
                vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.cpu().numpy()

    def _states(self, ids: Any, mask: Any) -> Any:
        device = self._model.device
        return self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state.float()

    def _measure_causality(self) -> bool:
        """Return whether the state of a token does not depend on the next one.

        Configurations do not show it: a decoder may have been changed to attend to both sides.
        """
        torch = self._torch
        with torch.inference_mode():
            pairs = (torch.tensor([[0, following]]) for following in (1, 2))
            one, other = (self._states(pair, torch.ones_like(pair))[0] for pair in pairs)
            change = (one - other).abs().amax(1)
        return bool(change[0] <= 1e-5 * change[1])

    def _pool(self, states: Any, mask: Any) -> Any:
        torch, weights = self._torch, mask.unsqueeze(-1)
        match self._pooling:
            case "cls":
                return states[:, 0]
            case "last":
                return states[torch.arange(len(states), device=mask.device), mask.sum(1) - 1]
            case "max":
                return states.masked_fill(weights == 0, float("-inf")).amax(1)
        return (states * weights).sum(1) / weights.sum(1)
