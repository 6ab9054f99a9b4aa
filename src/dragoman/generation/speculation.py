"""Speculative decoding: drafts of the next tokens, which the model verifies in one step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dragoman.core.metrics import Family, Sample

# A step computes at most this number of rows with drafts: so many take little more time than one.
_MAX_ROWS = 8
# N-grams of fewer tokens are not searched; only the last tokens of a long text are.
_MIN_NGRAM, _WINDOW = 2, 8192
# After this number of drafted tokens, a sequence of which fewer than this share were accepted gets none for some steps.
_ENOUGH, _WORTHWHILE, _PAUSE_STEPS = 16, 0.3, 32
_DRAFTED = "dragoman_text_draft_tokens_total"
_ACCEPTED = "dragoman_text_accepted_draft_tokens_total"


@dataclass(slots=True)
class PromptLookup:
    """Drafts of one sequence: the tokens that followed the last occurrence of its last tokens.

    ngram: maximum number of tokens to search for; longer matches are preferred.
    """

    ngram: int
    _positions: dict[tuple[int, ...], int] = field(default_factory=dict)  # of the token after an n-gram
    _indexed: int = 0
    _drafted: int = 0
    _accepted: int = 0
    _pause: int = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens."""
        if self._pause:
            self._pause -= 1
            return []
        self._index(tokens)
        for size in range(self.ngram, _MIN_NGRAM - 1, -1):
            position = self._positions.get(tuple(tokens[-size:]))
            if position is not None:
                text = list(tokens[position : position + count])
                while len(text) < count:  # the text repeats itself
                    text.append(text[len(text) - (len(tokens) - position)])
                return text
        return []

    def record(self, drafted: int, accepted: int) -> None:
        """Record how many drafted tokens were accepted."""
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted >= _ENOUGH:
            self._pause = _PAUSE_STEPS if self._accepted < _WORTHWHILE * self._drafted else 0
            self._drafted = self._accepted = 0

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams before the last token."""
        first = max(self._indexed, len(tokens) - _WINDOW, _MIN_NGRAM)
        for end in range(first, len(tokens)):
            for size in range(_MIN_NGRAM, min(self.ngram, end) + 1):
                self._positions[tuple(tokens[end - size : end])] = end
        self._indexed = max(first, len(tokens))


class Speculation:
    """Drafts for the sequences of a step, at most `tokens` for each, and their metrics."""

    def __init__(self, tokens: int, ngram: int) -> None:
        self._tokens, self._ngram = tokens, ngram
        self._drafted = self._accepted = 0

    def count(self, decoding: int, remaining: int) -> int:
        """Return how many tokens may be drafted for a sequence.

        decoding: rows of the step so far. remaining: tokens that the sequence may still get.
        """
        return max(0, min(self._tokens, _MAX_ROWS - decoding, remaining - 1))

    def lookup(self) -> PromptLookup:
        return PromptLookup(self._ngram)

    def record(self, lookup: PromptLookup, drafted: int, accepted: int) -> None:
        lookup.record(drafted, accepted)
        self._drafted += drafted
        self._accepted += accepted

    def families(self) -> Iterable[Family]:
        for name, line, value in (  # the engine's thread counts drafts first
            (_ACCEPTED, "Drafted tokens that the model accepted.", self._accepted),
            (_DRAFTED, "Tokens drafted by speculative decoding.", self._drafted),
        ):
            yield Family(name, "counter", line, (Sample(name, {}, value),))
