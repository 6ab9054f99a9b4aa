"""Prefix cache: computed beginnings of prompts in blocks, evicted least recently used first."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Tokens per block; only complete blocks are cached.
BLOCK = 16


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    content: Any


class PrefixCache:
    """At most `capacity` blocks of keys and values, identified by their tokens and the previous block.

    The content of a block is opaque. Prefixes of different adapters are separate.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[int | str, tuple[int, ...]], _Block] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: Sequence[int], adapter: str) -> list[Any]:
        """Return the cached blocks of a prefix; never of all tokens, because the last one must be computed."""
        keys, contents = [], []
        before: int | str = adapter
        for start in range(0, len(tokens) - BLOCK, BLOCK):
            key = (before, tuple(tokens[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                break
            before = block.number
            keys.append(key)
            contents.append(block.content)
        for key in reversed(keys):  # a block is evicted after those that follow it
            self._blocks.move_to_end(key)
        return contents

    def add(self, tokens: Sequence[int], adapter: str, read: Any) -> None:
        """Cache the complete blocks of the tokens; `read(start, stop)` returns the content of a new block."""
        before: int | str = adapter
        keys = []
        for start in range(0, min(len(tokens), self._capacity * BLOCK) - BLOCK + 1, BLOCK):
            key = (before, tuple(tokens[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                self._next += 1
                block = self._blocks[key] = _Block(self._next, read(start, start + BLOCK))
            before = block.number
            keys.append(key)
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
