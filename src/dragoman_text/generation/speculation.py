"""Speculative decoding: drafts of the next tokens, which the model verifies in one step."""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dragoman.core.metrics import Family, Sample

# Maximum number of rows, drafts included, of a step with drafts: this many take little more time than one row.
_MAX_ROWS = 8
# N-grams of fewer tokens are not searched; only the last tokens of a long text are.
_MIN_NGRAM, _WINDOW = 2, 8192
# After this number of drafted tokens, a sequence of which fewer than this share were accepted gets none for some steps.
_ENOUGH, _WORTHWHILE, _PAUSE_STEPS = 16, 0.3, 32
_DRAFTED = "dragoman_text_draft_tokens_total"
_ACCEPTED = "dragoman_text_accepted_draft_tokens_total"


@dataclass(slots=True)
class DraftRate:
    """How many drafts of one sequence are accepted. A sequence with too few gets none for some steps."""

    _drafted: int = 0
    _accepted: int = 0
    _pause: int = 0

    def is_paused(self) -> bool:
        """Return whether the sequence gets no drafts in this step."""
        self._pause, paused = max(0, self._pause - 1), self._pause > 0
        return paused

    def record(self, drafted: int, accepted: int) -> None:
        """Record how many drafted tokens were accepted."""
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted >= _ENOUGH:
            self._pause = _PAUSE_STEPS if self._accepted < _WORTHWHILE * self._drafted else 0
            self._drafted = self._accepted = 0


@dataclass(slots=True)
class PromptLookup:
    """Drafts of one sequence: the tokens that followed the last occurrence of its last tokens.

    ngram: maximum number of tokens to search for; longer matches are preferred.
    """

    ngram: int
    _positions: dict[tuple[int, ...], int] = field(default_factory=dict)  # of the token after an n-gram
    _indexed: int = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens."""
        self._index(tokens)
        for size in range(self.ngram, _MIN_NGRAM - 1, -1):
            position = self._positions.get(tuple(tokens[-size:]))
            if position is not None:
                text = list(tokens[position : position + count])
                while len(text) < count:  # the text repeats itself
                    text.append(text[len(text) - (len(tokens) - position)])
                return text
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams before the last token."""
        first = max(self._indexed, len(tokens) - _WINDOW, _MIN_NGRAM)
        for end in range(first, len(tokens)):
            for size in range(_MIN_NGRAM, min(self.ngram, end) + 1):
                self._positions[tuple(tokens[end - size : end])] = end
        self._indexed = max(first, len(tokens))


class DraftSource(Protocol):
    """Proposes drafts. Sequences are identified by objects, and their tokens only grow."""

    def propose(self, sequences: Sequence[tuple[Hashable, Sequence[int], int]]) -> list[list[int]]:
        """Return drafts for sequences, given with their tokens and the maximum number of drafts."""

    def keep(self, sequences: Collection[Hashable]) -> None:
        """Forget all other sequences."""


class PromptLookups:
    """Drafts by prompt look-up."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._lookups: dict[Hashable, PromptLookup] = {}

    def propose(self, sequences: Sequence[tuple[Hashable, Sequence[int], int]]) -> list[list[int]]:
        return [
            self._lookups.setdefault(sequence, PromptLookup(self._ngram)).propose(tokens, count)
            for sequence, tokens, count in sequences
        ]

    def keep(self, sequences: Collection[Hashable]) -> None:
        if len(self._lookups) > len(sequences):
            self._lookups = {each: lookup for each, lookup in self._lookups.items() if each in sequences}


class Speculation:
    """Drafts for the sequences of a step, at most `tokens` for each, and their metrics."""

    def __init__(self, tokens: int, source: DraftSource) -> None:
        self._tokens, self._source = tokens, source
        self._drafted = self._accepted = 0

    def propose(
        self, sequences: Sequence[tuple[Hashable, Sequence[int], DraftRate, int]], rows: int
    ) -> list[list[int]]:
        """Return drafts for sequences, given with their tokens, rates and the number of tokens that they may still get.

        rows: rows of the step without drafts.
        """
        wanted, indices = [], []
        for i, (sequence, tokens, rate, remaining) in enumerate(sequences):
            count = min(self._tokens, _MAX_ROWS - rows, remaining - 1)
            if count > 0 and not rate.is_paused():
                wanted.append((sequence, tokens, count))
                indices.append(i)
                rows += count
        drafts: list[list[int]] = [[] for _ in sequences]
        for i, each in zip(indices, self._source.propose(wanted) if wanted else (), strict=True):
            drafts[i] = each
        return drafts

    def keep(self, sequences: Collection[Hashable]) -> None:
        """Forget all other sequences."""
        self._source.keep(sequences)

    def record(self, rate: DraftRate, drafted: int, accepted: int) -> None:
        rate.record(drafted, accepted)
        self._drafted += drafted
        self._accepted += accepted

    def families(self) -> Iterable[Family]:
        for name, line, value in (  # the engine's thread counts drafts first
            (_ACCEPTED, "Drafted tokens that the model accepted.", self._accepted),
            (_DRAFTED, "Tokens drafted by speculative decoding.", self._drafted),
        ):
            yield Family(name, "counter", line, (Sample(name, {}, value),))
