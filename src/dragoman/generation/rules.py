"""Rules that change the logits of one text's next token, on NumPy arrays, one text at a time.

Each gives what the processor of that name in transformers gives. They run in this order: repetition_penalty, presence
and frequency penalties, logit_bias, bad_words, min_new_tokens, grammar; and where a token is drawn: temperature, top_k,
top_p, min_p, typical_p.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

_NEVER = np.float32(-np.inf)
# So many likeliest tokens are looked at before all are sorted.
_LIKELY = 512


def repetition_penalty(logits: Logits, seen: Tokens, penalty: float) -> None:
    """Divide the logits > 0, and multiply those < 0, of tokens in prompt and text (Keskar et al. 2019)."""
    found = logits[seen]
    logits[seen] = np.where(found < 0, found * np.float32(penalty), found / np.float32(penalty))


def count_penalties(logits: Logits, counts: Mapping[int, int], presence: float, frequency: float) -> None:
    """Take `presence` once and `frequency` per occurrence off the logits of the text's tokens, as OpenAI's API."""
    if not counts:
        return
    tokens = np.fromiter(counts.keys(), np.int64, len(counts))
    logits[tokens] -= np.float32(presence) + np.float32(frequency) * np.fromiter(counts.values(), np.float32)


def bad_words(logits: Logits, tokens: Sequence[int], words: Sequence[tuple[int, ...]]) -> None:
    """Forbid the last token of each word whose other tokens have just been written."""
    for word in words:
        begun = len(word) - 1
        if not begun or tuple(tokens[-begun:]) == word[:-1]:
            logits[word[-1]] = _NEVER


def temperature(logits: Logits, value: float) -> None:
    """Divide by the temperature."""
    logits /= np.float32(value)


def top_k(logits: Logits, count: int) -> None:
    """Leave the `count` largest, and those equal to the least of them."""
    if count < len(logits):
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        logits[logits < least] = _NEVER


def top_p(logits: Logits, mass: float) -> None:
    """Leave the likeliest tokens that make up the mass, at least one (Holtzman et al. 2020)."""
    shares = probabilities(logits)
    order = _likeliest(shares, mass)
    before = np.cumsum(shares[order]) - shares[order]
    kept = order[before < mass]
    _leave(logits, kept if len(kept) else order[:1])


def min_p(logits: Logits, share: float) -> None:
    """Forbid tokens less likely than that share of the likeliest one's probability."""
    highest = logits.max()
    logits[logits < highest + np.float32(np.log(share))] = _NEVER


def typical_p(logits: Logits, mass: float) -> None:
    """Leave the tokens whose surprise is nearest to the expected one and make up the mass (Meister et al. 2022)."""
    shares = probabilities(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(shares)
    possible = shares > 0
    expected = (shares[possible] * surprise[possible]).sum()
    order = np.argsort(np.abs(surprise - expected), kind="stable")
    last = int((np.cumsum(shares[order]) < mass).sum())
    _leave(logits, order[: last + 1])


def probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    """Their softmax."""
    powers = np.exp(logits - logits.max(), dtype=np.float64)
    found: npt.NDArray[np.float64] = powers / powers.sum()
    return found


def draw(logits: Logits, uniform: float) -> int:
    """The token at that place of the distribution: `uniform` is from 0 to less than 1."""
    sums = np.cumsum(np.exp(logits - logits.max()), dtype=np.float64)
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(place, len(logits) - 1)


def _likeliest(shares: npt.NDArray[np.float64], mass: float) -> npt.NDArray[np.intp]:
    """Tokens by falling probability: all, or so many of the first as make up the mass."""
    if len(shares) > 4 * _LIKELY:
        some = np.argpartition(shares, len(shares) - _LIKELY)[-_LIKELY:]
        if shares[some].sum() > mass:
            return some[np.argsort(-shares[some], kind="stable")]
    return np.argsort(-shares, kind="stable")


def _leave(logits: Logits, kept: npt.NDArray[np.intp]) -> None:
    left = logits[kept]
    logits[:] = _NEVER
    logits[kept] = left
