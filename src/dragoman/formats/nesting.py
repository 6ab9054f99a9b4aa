"""How the lists of a JSON array nest, compared with a shape while the array is read in portions."""

import itertools
from collections.abc import Sequence

import numpy as np

from dragoman.formats.json_scan import structure
from dragoman.formats.policy import Buffer

_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_SPACE = b" \t\r\n"
_OPEN, _CLOSE, _COMMA = b"[],"


class Nesting:
    """The brackets and commas of an array of some shape, compared with text portion by portion.

    A portion is what stands between two commas, so there is a comma after each but the last. The array has as many
    lists and elements as the shape, as `mismatch` tells: what is made here is no longer than the text.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self._unit = _brackets(shape[1:]) + b","
        self._at = 0

    def next_fits(self, portion: bytes) -> bool:
        """Whether the next portion, in which strings are 0 bytes, has its brackets where the shape has them."""
        found = portion.translate(None, _NO_STRUCTURE) + b","
        size, start = len(self._unit), self._at % len(self._unit)
        expected = self._unit[start : start + len(found)]
        if len(expected) < len(found):
            rest = len(found) - len(expected)
            expected += self._unit * (rest // size) + self._unit[: rest % size]
        self._at += len(found)
        return found == expected and _separated(portion)


def mismatch(array: Buffer, shape: Sequence[int]) -> str:
    """How an array in JSON differs from a shape by the number of its lists and elements; "" if it does not."""
    lists, commas = structure(array)
    expected = _lists(shape)
    empty = 0 in shape
    if lists == expected and (empty or commas + 1 == _count(shape)):
        return (
            "" if not empty or _is_bare(array, shape, expected) else "'data' has elements, expected none by its shape"
        )
    found = regular_shape(lists, commas)
    if found is None:
        return "'data' is ragged, expected rows of equal lengths"
    return f"'data' nests as {found}, expected its shape {list(shape)}"


def regular_shape(lists: Sequence[int], commas: int) -> list[int] | None:
    """The shape of an array with so many lists at each depth and so many commas; None where it cannot be regular."""
    counts = [*lists, commas + 1]
    if any(inner % outer for outer, inner in itertools.pairwise(counts)):
        return None
    return [inner // outer for outer, inner in itertools.pairwise(counts)]


def _lists(shape: Sequence[int]) -> list[int]:
    """How many lists an array of a shape has at each depth."""
    found = [1]
    for size in shape[:-1]:
        found.append(found[-1] * size)
    return [count for count in found if count]


def _count(shape: Sequence[int]) -> int:
    return _lists([*shape, 1])[-1]


def _is_bare(array: Buffer, shape: Sequence[int], lists: Sequence[int]) -> bool:
    """Whether an array without elements is nothing but its brackets."""
    if sum(lists) * 2 > len(memoryview(array)):
        return False
    return bytes(array).translate(None, _SPACE) == _brackets(shape)


def _brackets(shape: Sequence[int]) -> bytes:
    """An array of a shape without its elements."""
    found = b""
    for size in reversed(shape):
        found = b"[" + b",".join([found] * size) + b"]"
    return found


def _separated(portion: bytes) -> bool:
    """Whether no element touches a bracket from outside, as in `1[2]`, which brackets alone do not show."""
    codes = np.frombuffer(b",".join((b"", portion.translate(None, _SPACE), b"")), np.uint8)
    before, after = codes[:-1], codes[1:]
    opens = (after == _OPEN) & (before != _OPEN) & (before != _COMMA)
    closes = (before == _CLOSE) & (after != _CLOSE) & (after != _COMMA)
    return not (opens.any() or closes.any())
