"""How one text's next token is chosen: its rules, its random numbers and what they remember."""

from collections.abc import Sequence
from copy import copy, deepcopy

import numpy as np

from dragoman.core.text import Sampling
from dragoman.generation import rules
from dragoman.generation.grammar import Guide

# Colder, logits would be divided by what FP32 cannot tell from 0.
_COLD = 1e-30


class Chooser:
    """Chooses the tokens of one text, on its own logits and random numbers alone: whatever runs beside it changes
    nothing.

    `prompt` are the prompt's tokens, `ends` those that end a text, `bad` the forbidden words as tokens. Rules work on
    NumPy arrays [vocabulary] of FP32, which they change.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        prompt: Sequence[int],
        ends: frozenset[int],
        bad: Sequence[tuple[int, ...]],
        guide: Guide | None = None,
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
        self._ruled = bool(self._seen is not None or penalties or tokens or bad or guide is not None)

    def copy(self) -> "Chooser":
        """One that goes its own way from here, with the same random numbers before it."""
        twin = copy(self)
        twin._random = deepcopy(self._random)
        twin._text, twin._counts = list(self._text), dict(self._counts)
        twin._guide = None if self._guide is None else self._guide.copy()
        return twin

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the likeliest one."""
        return self._random is None and not self.ruled

    @property
    def ruled(self) -> bool:
        """Whether any rule but those of drawing may change the logits now."""
        return self._ruled or len(self._text) < self.sampling.min_new_tokens

    def choose(self, logits: rules.Logits) -> int:
        """The next token. Raises ValueError where the rules leave none."""
        self.rule(logits)
        if not np.isfinite(logits.max()):
            raise ValueError("no token is left that the parameters allow")
        if self._random is None:
            return int(logits.argmax())
        return self._drawn(logits, self._random.random())

    def rule(self, logits: rules.Logits) -> None:
        """The rules that hold whether or not tokens are drawn."""
        given = self.sampling
        if self._seen is not None:
            rules.repetition_penalty(logits, self._seen, given.repetition_penalty)
        if given.presence_penalty or given.frequency_penalty:
            rules.count_penalties(logits, self._counts, given.presence_penalty, given.frequency_penalty)
        logits[self._bias] += self._biases
        if len(self._allowed):
            rules.only(logits, self._allowed)
        if self._bad:
            rules.bad_words(logits, [*self._prompt[-16:], *self._text], self._bad)
        if len(self._text) < given.min_new_tokens:
            logits[self._ends] = -np.inf
        if self._guide is not None:
            logits[~self._guide.allowed()] = -np.inf

    def _drawn(self, logits: rules.Logits, uniform: float) -> int:
        """A token drawn from what is left of the distribution; after top_k only that much of it is looked at."""
        given = self.sampling
        if given.temperature < _COLD:
            return int(logits.argmax())
        if given.temperature != 1:
            rules.temperature(logits, given.temperature)
        tokens = None
        if 0 < given.top_k < len(logits):
            rules.top_k(logits, given.top_k)
            tokens = np.flatnonzero(logits > -np.inf)
            logits = logits[tokens]
        if given.top_p < 1:
            rules.top_p(logits, given.top_p)
        if given.min_p > 0:
            rules.min_p(logits, given.min_p)
        if given.typical_p < 1:
            rules.typical_p(logits, given.typical_p)
        left = np.flatnonzero(logits > -np.inf)
        drawn = left[rules.draw(logits[left], uniform)]
        return int(drawn if tokens is None else tokens[drawn])

    def begin(self, token: int) -> None:
        """Begin, in another thread, what takes time of `took` for a token that was chosen."""
        if self._guide is not None and token not in self._ends:
            self._guide.begin(token)

    def wait(self, until_s: float) -> bool:
        """Wait for what was begun, at most until then on the monotonic clock; gives whether it is done."""
        return self._guide is None or self._guide.wait(until_s)

    def took(self, token: int) -> None:
        """The token that was chosen."""
        self._text.append(token)
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._seen is not None and token not in self._seen:
            self._seen = np.append(self._seen, token)
        if self._guide is not None and token not in self._ends:
            self._guide.took(token)

    @property
    def ended(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self._guide is not None and self._guide.ended
