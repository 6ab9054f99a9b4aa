"""Sampling of the next token of one sequence: rules, random numbers and their state.

The rules change logits in NumPy arrays. Each is equal to the logits processor of that name in transformers. They run in
this order: repetition_penalty, presence and frequency penalties, logit_bias, allowed_token_ids, bad_words,
min_new_tokens, grammar; and when sampling: temperature, top_k, top_p, min_p, typical_p.
"""

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from dragoman.core.text import Sampling
from dragoman_text.generation.grammar import GrammarGuide

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

_NEVER = np.float32(-np.inf)
# Tokens are distributed to _BINS bins, _PER_UNIT for each unit of logits, so that only one bin must be sorted.
_BINS, _PER_UNIT = 2048, 64


def repetition_penalty(logits: Logits, tokens: Tokens, penalty: float) -> None:
    """Divide the logits > 0, and multiply those < 0, of tokens in prompt and completion (Keskar et al. 2019)."""
    values = logits[tokens]
    logits[tokens] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))


def count_penalties(logits: Logits, counts: Mapping[int, int], presence: float, frequency: float) -> None:
    """Subtract `presence` once and `frequency` per occurrence from the logits of generated tokens (OpenAI API)."""
    if not counts:
        return
    tokens = np.fromiter(counts.keys(), np.int64, len(counts))
    logits[tokens] -= np.float32(presence) + np.float32(frequency) * np.fromiter(counts.values(), np.float32)


def only(logits: Logits, tokens: Tokens) -> None:
    """Forbid all tokens but these."""
    values = logits[tokens]
    logits.fill(_NEVER)
    logits[tokens] = values


def bad_words(logits: Logits, tokens: Sequence[int], words: Sequence[tuple[int, ...]]) -> None:
    """Forbid the last token of each word whose other tokens were just generated."""
    for word in words:
        prefix_length = len(word) - 1
        if not prefix_length or tuple(tokens[-prefix_length:]) == word[:-1]:
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
    values = logits[possible]
    powers = np.exp(values - values.max(), dtype=np.float64)
    shares = powers / powers.sum()
    surprise = np.log(powers.sum()) - (values - values.max())
    distance = np.abs(surprise - (shares * surprise).sum())
    logits[possible[distance > distance[_edge(distance, shares, mass)]]] = _NEVER


def _edge(keys: npt.NDArray[Any], weights: npt.NDArray[Any], mass: float) -> int:
    """Return the index of the element at which the weights, in order of keys, reach a share of their sum."""
    bins = np.minimum((keys - keys.min()) * _PER_UNIT, _BINS - 1).astype(np.intp)
    sums = np.bincount(bins, weights).cumsum()
    goal = mass * sums[-1]
    edge_bin = int(np.searchsorted(sums, goal))
    inside = np.flatnonzero(bins == edge_bin)
    inside = inside[np.argsort(keys[inside])]
    reached = np.cumsum(weights[inside], dtype=np.float64) + (sums[edge_bin - 1] if edge_bin else 0.0)
    return int(inside[min(int(np.searchsorted(reached, goal)), len(inside) - 1)])


def draw(logits: Logits, uniform: float) -> int:
    """Return the token at a quantile of the distribution; `uniform` is in [0, 1)."""
    sums = np.exp(logits - logits.max()).astype(np.float64).cumsum()
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(index, len(logits) - 1)


class TokenChoice(Struct, frozen=True):
    """A token, its log-probability under the model and the top tokens with theirs; or `error` instead of a token."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    error: BaseException | None = None


# Below this temperature logits would be divided by a number that FP32 rounds to 0.
_COLD = 1e-30


class TokenSampler:
    """Samples the tokens of one completion from its own logits and random numbers, independent of the batch.

    prompt: tokens of the prompt. ends: end tokens. bad: forbidden words as tokens. Rules change NumPy arrays
    [vocabulary] of FP32 in place.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        prompt: Sequence[int],
        ends: frozenset[int],
        bad: Sequence[tuple[int, ...]],
        guide: GrammarGuide | None = None,
    ) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(seed) if sampling.do_sample else None
        self._ends = np.array(sorted(ends), np.int64)
        self._bad = bad
        self._guide = guide
        self._prompt = prompt
        self._text: list[int] = []
        self._counts: dict[int, int] = {}
        self._seen = np.array(sorted(set(prompt)), np.int64) if sampling.repetition_penalty != 1 else None
        self._bias = np.array(list(sampling.logit_bias), np.int64)
        self._biases = np.array(list(sampling.logit_bias.values()), np.float32)
        self._allowed = np.array(sampling.allowed_token_ids, np.int64)
        penalties = sampling.presence_penalty or sampling.frequency_penalty
        tokens = len(self._bias) or len(self._allowed)
        self._depends_on_text = bool(self._seen is not None or penalties or guide is not None)
        self._is_greedy_later = self._random is None and not (self._depends_on_text or tokens or bad)

    def copy(self) -> "TokenSampler":
        """Return an independent copy with the same state of random numbers."""
        twin = copy(self)
        twin._random = deepcopy(self._random)
        twin._text, twin._counts = list(self._text), dict(self._counts)
        twin._guide = None if self._guide is None else self._guide.copy()
        return twin

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax: there is no sampling, and no rule may change the logits now."""
        return self._is_greedy_later and len(self._text) >= self.sampling.min_new_tokens

    def choose(self, logits: Logits) -> int:
        """Return the next token. Raises ValueError if the rules allow none."""
        self.apply_rules(logits)
        if not np.isfinite(logits.max()):
            raise ValueError("no token is left that the parameters allow")
        if self._random is None:
            return int(logits.argmax())
        return self._draw_token(logits, self._random.random())

    def apply_rules(self, logits: Logits) -> None:
        """Apply the rules that are independent of sampling."""
        sampling = self.sampling
        if self._seen is not None:
            repetition_penalty(logits, self._seen, sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            count_penalties(logits, self._counts, sampling.presence_penalty, sampling.frequency_penalty)
        logits[self._bias] += self._biases
        if len(self._allowed):
            only(logits, self._allowed)
        if self._bad:
            bad_words(logits, [*self._prompt[-16:], *self._text], self._bad)
        if len(self._text) < sampling.min_new_tokens:
            logits[self._ends] = -np.inf
        if self._guide is not None:
            logits[~self._guide.next_mask()] = -np.inf

    def _draw_token(self, logits: Logits, uniform: float) -> int:
        """Draw a token; after top_k only the remaining tokens are considered."""
        sampling = self.sampling
        if sampling.temperature < _COLD:
            return int(logits.argmax())
        if sampling.temperature != 1:
            temperature(logits, sampling.temperature)
        tokens = None
        if 0 < sampling.top_k < len(logits):
            top_k(logits, sampling.top_k)
            tokens = np.flatnonzero(logits > -np.inf)
            logits = logits[tokens]
        if sampling.top_p < 1:
            top_p(logits, sampling.top_p)
        if sampling.min_p > 0:
            min_p(logits, sampling.min_p)
        if sampling.typical_p < 1:
            typical_p(logits, sampling.typical_p)
        possible = np.flatnonzero(logits > -np.inf)
        index = possible[draw(logits[possible], uniform)]
        return int(index if tokens is None else tokens[index])

    def begin(self, token: int) -> None:
        """Start the slow part of `accept` for a chosen token in another thread."""
        if self._guide is not None and token not in self._ends:
            self._guide.begin(token)

    def wait(self, until_s: float) -> bool:
        """Wait for `begin` until a time on the monotonic clock; return whether it is done."""
        return self._guide is None or self._guide.wait(until_s)

    def accept(self, token: int) -> None:
        """Append a chosen token."""
        self._text.append(token)
        if not self._depends_on_text:
            return
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)
        if self._guide is not None and token not in self._ends:
            self._guide.accept(token)

    @property
    def is_ended(self) -> bool:
        """Whether the grammar is complete and allows no further token."""
        return self._guide is not None and self._guide.is_ended
