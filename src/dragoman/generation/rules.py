"""Rules that change the logits of the next token of one sequence, on NumPy arrays.

Each is equal to the logits processor of that name in transformers. They run in this order: repetition_penalty, presence
and frequency penalties, logit_bias, allowed_token_ids, bad_words, min_new_tokens, grammar; and when sampling:
temperature, top_k, top_p, min_p, typical_p.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

_NEVER = np.float32(-np.inf)
# Tokens are distributed to _BINS bins, _PER_UNIT for each unit of logits, so that only one bin must be sorted.
_BINS, _PER_UNIT = 2048, 64


def repetition_penalty(logits: Logits, seen: Tokens, penalty: float) -> None:
    """Divide the logits > 0, and multiply those < 0, of tokens in prompt and completion (Keskar et al. 2019)."""
    found = logits[seen]
    logits[seen] = np.where(found < 0, found * np.float32(penalty), found / np.float32(penalty))


def count_penalties(logits: Logits, counts: Mapping[int, int], presence: float, frequency: float) -> None:
    """Subtract `presence` once and `frequency` per occurrence from the logits of generated tokens (OpenAI API)."""
    if not counts:
        return
    tokens = np.fromiter(counts.keys(), np.int64, len(counts))
    logits[tokens] -= np.float32(presence) + np.float32(frequency) * np.fromiter(counts.values(), np.float32)


def only(logits: Logits, tokens: Tokens) -> None:
    """Forbid all tokens but these."""
    kept = logits[tokens]
    logits.fill(_NEVER)
    logits[tokens] = kept


def bad_words(logits: Logits, tokens: Sequence[int], words: Sequence[tuple[int, ...]]) -> None:
    """Forbid the last token of each word whose other tokens were just generated."""
    for word in words:
        begun = len(word) - 1
        if not begun or tuple(tokens[-begun:]) == word[:-1]:
            logits[word[-1]] = _NEVER


def temperature(logits: Logits, value: float) -> None:
    """Divide by the temperature."""
    logits /= np.float32(value)


def top_k(logits: Logits, count: int) -> None:
    """Keep the `count` largest logits, and those equal to the smallest of them."""
    if count < len(logits):
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        logits[logits < least] = _NEVER


def top_p(logits: Logits, mass: float) -> None:
    """Keep the most probable tokens up to a total probability, at least one, and ties (Holtzman et al. 2020)."""
    powers = np.exp(logits - logits.max())
    logits[logits < logits[_edge(-logits, powers, mass)]] = _NEVER


def min_p(logits: Logits, share: float) -> None:
    """Forbid tokens with less than this share of the highest probability."""
    highest = logits.max()
    logits[logits < highest + np.float32(np.log(share))] = _NEVER


def typical_p(logits: Logits, mass: float) -> None:
    """Keep tokens with information content nearest to the entropy, up to a total probability (Meister et al. 2022)."""
    possible = np.flatnonzero(logits > _NEVER)
    left = logits[possible]
    powers = np.exp(left - left.max(), dtype=np.float64)
    shares = powers / powers.sum()
    surprise = np.log(powers.sum()) - (left - left.max())
    distance = np.abs(surprise - (shares * surprise).sum())
    logits[possible[distance > distance[_edge(distance, shares, mass)]]] = _NEVER


def _edge(keys: npt.NDArray[Any], weights: npt.NDArray[Any], mass: float) -> int:
    """Return the index of the element at which the weights, in order of keys, reach a share of their sum."""
    bins = np.minimum((keys - keys.min()) * _PER_UNIT, _BINS - 1).astype(np.intp)
    sums = np.bincount(bins, weights).cumsum()
    goal = mass * sums[-1]
    found = int(np.searchsorted(sums, goal))
    inside = np.flatnonzero(bins == found)
    inside = inside[np.argsort(keys[inside])]
    reached = np.cumsum(weights[inside], dtype=np.float64) + (sums[found - 1] if found else 0.0)
    return int(inside[min(int(np.searchsorted(reached, goal)), len(inside) - 1)])


def draw(logits: Logits, uniform: float) -> int:
    """Return the token at a quantile of the distribution; `uniform` is in [0, 1)."""
    sums = np.exp(logits - logits.max()).astype(np.float64).cumsum()
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(place, len(logits) - 1)
