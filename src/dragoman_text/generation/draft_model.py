"""Drafts of a small model for speculative decoding."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from dragoman_text.generation.cache import KeyValueCache
from dragoman_text.generation.job import BatchRow
from dragoman_text.generation.runner import Runner


@dataclass(slots=True)
class _DraftState:
    """A sequence in the draft model's cache: its slot, and the number of tokens whose keys and values are computed."""

    slot: int
    computed: int = 0


class DraftModel:
    """Drafts the most likely tokens under a model with the same vocabulary, for at most `slots` sequences.

    chunk: tokens of prompts that it computes per step; a sequence gets drafts when its prompt is computed.
    """

    def __init__(self, runner: Runner, slots: int, budget: int, chunk: int) -> None:
        self._runner, self._chunk = runner, chunk
        self._cache = KeyValueCache(runner.shape, budget, runner.dtype, runner.device)
        self._states: dict[Hashable, _DraftState] = {}
        self._free = list(range(slots - 1, -1, -1))

    def propose(self, sequences: Sequence[tuple[Hashable, Sequence[int], int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        ready = [i for i in range(len(sequences)) if self._has_room(sequences, i)]
        rows, chunk = [], self._chunk
        for i in list(ready):
            sequence, tokens, _ = sequences[i]
            state = self._states[sequence]
            # The last token is new; before it, accepted drafts have been computed and rejected ones are overwritten.
            state.computed = min(state.computed, len(tokens) - 1)
            count = min(len(tokens) - state.computed, chunk)
            if count:
                rows.append(BatchRow(state.slot, state.computed, tokens[state.computed : state.computed + count]))
                state.computed += count
                chunk -= count
            if state.computed < len(tokens):
                ready.remove(i)
        rows.sort(key=_is_chunk)
        chosen = self._most_likely(rows)
        while ready:
            going = []
            for i in ready:
                sequence, tokens, count = sequences[i]
                state = self._states[sequence]
                drafts[i].append(chosen[state.slot])
                if len(drafts[i]) < count:
                    going.append(i)
            rows = []
            for i in going:
                sequence, tokens, _ = sequences[i]
                state = self._states[sequence]
                rows.append(BatchRow(state.slot, state.computed, drafts[i][-1:]))
                state.computed += 1
            chosen, ready = self._most_likely(rows), going
        return drafts

    def keep(self, sequences: Collection[Hashable]) -> None:
        for each in [each for each in self._states if each not in sequences]:
            state = self._states.pop(each)
            self._cache.clear(state.slot, self._cache.length)
            self._free.append(state.slot)
        if self._cache.slots and not self._states:
            self._cache.release()

    def _has_room(self, sequences: Sequence[tuple[Hashable, Sequence[int], int]], index: int) -> bool:
        """Return whether a sequence has a slot and memory for its tokens and drafts."""
        sequence, tokens, count = sequences[index]
        if sequence not in self._states:
            if not self._free:
                return False
            self._states[sequence] = _DraftState(self._free.pop())
        slots = 1 + max(state.slot for state in self._states.values())
        length = max(len(tokens) + count, self._cache.length)
        if not self._cache.fits(slots, length):
            return False
        self._cache.reserve(slots, length)
        return True

    def _most_likely(self, rows: list[BatchRow]) -> dict[int, int]:
        """Compute rows; return the most likely next token by slot."""
        if not rows:
            return {}
        tokens = self._runner.run(self._cache, rows).argmax(-1).tolist()
        return {row.slot: token for row, token in zip(rows, tokens, strict=True)}


def _is_chunk(row: BatchRow) -> bool:
    return len(row.tokens) > 1
