"""Calls that score pairs of texts."""

import msgspec

from dragoman.core.calls import ModelCall


class Scored(msgspec.Struct, frozen=True):
    """The answer to `Score`: one score for each pair, and the number of tokens of all pairs."""

    scores: tuple[float, ...]
    tokens: int


class Score(msgspec.Struct, ModelCall[Scored], frozen=True):
    """Score how well the second text of each pair fits the first.

    `raw`: without the activation function. `truncate`: tokens that longer pairs are cut to, 0: the model's maximum.
    `truncation_side`: where tokens are removed, "left" or "right", or "" for the side of the tokenizer.
    """

    pairs: tuple[tuple[str, str], ...]
    raw: bool = False
    truncate: int | None = None
    truncation_side: str = ""
