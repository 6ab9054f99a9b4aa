"""Calls that score pairs of texts."""

import msgspec

from dragoman.core.calls import ModelCall


class Scored(msgspec.Struct, frozen=True):
    """The answer to `Score`: one score for each pair, and the number of tokens of all pairs."""

    scores: tuple[float, ...]
    tokens: int


class Score(msgspec.Struct, ModelCall[Scored], frozen=True):
    """Score how well the second text of each pair fits the first.

    raw: do not apply the activation function.
    truncate: number of tokens to which longer pairs are cut; 0 for the model's maximum, None to reject them.
    truncation_side: where tokens are removed, "left" or "right"; "" for the side of the tokenizer.
    """

    pairs: tuple[tuple[str, str], ...]
    raw: bool = False
    truncate: int | None = None
    truncation_side: str = ""
