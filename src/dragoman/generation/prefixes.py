"""Beginnings of prompts that have been computed already, in blocks, the least used of which is dropped first."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# How many tokens a block has: only whole blocks are kept.
BLOCK = 16


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    content: Any


class Prefixes:
    """Blocks of keys and values, each known by the tokens in it and the block before it; at most `capacity` of them.

    A block's content is whatever the cache reads and writes. Different adapters have different beginnings.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[int | str, tuple[int, ...]], _Block] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: Sequence[int], adapter: str) -> list[Any]:
        """The contents of the blocks that the tokens begin with; never of all tokens, as one is needed to go on."""
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
        for key in reversed(keys):  # a block is dropped after those that follow it
            self._blocks.move_to_end(key)
        return contents

    def add(self, tokens: Sequence[int], adapter: str, read: Any) -> None:
        """Keep the whole blocks of the tokens; `read(start, stop)` gives the content of one that is not there yet."""
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
