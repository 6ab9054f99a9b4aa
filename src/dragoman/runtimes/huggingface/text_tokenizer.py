"""Texts and pairs of texts as tokens, within the maximum of a model and cut as a call requests."""

import copy
from collections.abc import Sequence
from typing import Any

from dragoman.core.calls import Embed
from dragoman.core.errors import InvalidInput
from dragoman.core.scoring import Score
from dragoman.pipelines.limits import UNLIMITED


class TextTokenizer:
    """A tokenizer that cuts texts on either side, and keeps its special tokens.

    max_tokens: of a text or a pair. truncates: longer ones are cut unless the call says otherwise.
    """

    def __init__(self, tokenizer: Any, *, truncates: bool = False) -> None:
        self.max_tokens: int = tokenizer.model_max_length
        self._truncates = truncates
        self._by_side = {tokenizer.truncation_side: tokenizer, "": tokenizer}

    def encode(self, texts: Sequence[str], call: Embed | Score, name: str) -> Any:
        """Return the tokens of a text or a pair, cut as the call requests. `name` names it in errors.

        Raises InvalidInput if it is too long, or if no token of the text would remain.
        """
        truncate = self.truncation(call)
        if truncate is None:
            encoded = _encode(self._by_side[""], texts)
            count = len(encoded["input_ids"])
            if count > self.max_tokens:
                raise InvalidInput(f"{name} has {count} tokens; the model takes at most {self.max_tokens}")
            return encoded
        tokenizer = self._side(call.truncation_side)
        limit = min(self.max_tokens, truncate or self.max_tokens)
        least = tokenizer.num_special_tokens_to_add(len(texts) > 1) + 1
        if limit < least:
            raise InvalidInput(f"truncate: expected at least {least}, as special tokens count too; got {limit}")
        # A limit above 2^32 overflows in the tokenizer.
        limited = {"truncation": "longest_first", "max_length": limit} if limit < UNLIMITED else {}
        return _encode(tokenizer, texts, **limited)

    def cut(self, ids: Sequence[int], call: Embed) -> Sequence[int]:
        """Return token ids, cut as the call requests."""
        truncate = self.truncation(call)
        if truncate is None:
            return ids
        count = min(self.max_tokens, truncate or self.max_tokens)
        side = call.truncation_side or self._by_side[""].truncation_side
        return ids[-count:] if side == "left" else ids[:count]

    def truncation(self, call: Embed | Score) -> int | None:
        return 0 if call.truncate is None and self._truncates else call.truncate

    def _side(self, side: str) -> Any:
        if side not in self._by_side:
            other = copy.deepcopy(self._by_side[""])
            other.truncation_side = side
            self._by_side[side] = other
        return self._by_side[side]


def _encode(tokenizer: Any, texts: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return the tokens of a text or a pair. In lists, because a tokenizer takes an empty second text for none."""
    encoded = tokenizer(*([text] for text in texts), verbose=False, **options)
    return {name: values[0] for name, values in encoded.items()}
