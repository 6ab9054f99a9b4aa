"""Sampling of the next token of one sequence: rules, random numbers and their state."""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass

import numpy as np

from dragoman.core.text import Sampling
from dragoman.generation import rules
from dragoman.generation.grammar import GrammarGuide


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token, its log-probability under the model and the top tokens with theirs; or `error` instead of a token."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None


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
        self._always_has_rules = bool(self._seen is not None or penalties or tokens or bad or guide is not None)

    def copy(self) -> "TokenSampler":
        """Return an independent copy with the same state of random numbers."""
        twin = copy(self)
        twin._random = deepcopy(self._random)
        twin._text, twin._counts = list(self._text), dict(self._counts)
        twin._guide = None if self._guide is None else self._guide.copy()
        return twin

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self._random is None and not self.has_rules

    @property
    def has_rules(self) -> bool:
        """Whether a rule other than those of sampling may change the logits now."""
        return self._always_has_rules or len(self._text) < self.sampling.min_new_tokens

    def choose(self, logits: rules.Logits) -> int:
        """Return the next token. Raises ValueError if the rules allow none."""
        self.apply_rules(logits)
        if not np.isfinite(logits.max()):
            raise ValueError("no token is left that the parameters allow")
        if self._random is None:
            return int(logits.argmax())
        return self._draw_token(logits, self._random.random())

    def apply_rules(self, logits: rules.Logits) -> None:
        """Apply the rules that are independent of sampling."""
        sampling = self.sampling
        if self._seen is not None:
            rules.repetition_penalty(logits, self._seen, sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            rules.count_penalties(logits, self._counts, sampling.presence_penalty, sampling.frequency_penalty)
        logits[self._bias] += self._biases
        if len(self._allowed):
            rules.only(logits, self._allowed)
        if self._bad:
            rules.bad_words(logits, [*self._prompt[-16:], *self._text], self._bad)
        if len(self._text) < sampling.min_new_tokens:
            logits[self._ends] = -np.inf
        if self._guide is not None:
            logits[~self._guide.allowed()] = -np.inf

    def _draw_token(self, logits: rules.Logits, uniform: float) -> int:
        """Draw a token; after top_k only the remaining tokens are considered."""
        sampling = self.sampling
        if sampling.temperature < _COLD:
            return int(logits.argmax())
        if sampling.temperature != 1:
            rules.temperature(logits, sampling.temperature)
        tokens = None
        if 0 < sampling.top_k < len(logits):
            rules.top_k(logits, sampling.top_k)
            tokens = np.flatnonzero(logits > -np.inf)
            logits = logits[tokens]
        if sampling.top_p < 1:
            rules.top_p(logits, sampling.top_p)
        if sampling.min_p > 0:
            rules.min_p(logits, sampling.min_p)
        if sampling.typical_p < 1:
            rules.typical_p(logits, sampling.typical_p)
        left = np.flatnonzero(logits > -np.inf)
        drawn = left[rules.draw(logits[left], uniform)]
        return int(drawn if tokens is None else tokens[drawn])

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
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)
        if self._guide is not None and token not in self._ends:
            self._guide.accept(token)

    @property
    def ended(self) -> bool:
        """Whether the grammar is complete and allows no further token."""
        return self._guide is not None and self._guide.ended
