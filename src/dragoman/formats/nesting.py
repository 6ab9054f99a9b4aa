"""Compare the nesting of a JSON array with a shape, while the array is parsed in chunks."""

import itertools
from collections.abc import Sequence

import numpy as np

from dragoman.formats.json_scan import count_lists
from dragoman.formats.policy import Buffer

_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_SPACE = b" \t\r\n"
_OPEN, _CLOSE, _COMMA = b"[],"


class Nesting:
    """The brackets and commas of an array of a shape, compared with its text chunk by chunk.

    Chunks are split at commas. `find_mismatch` has to be called before, so that the array has as many lists and
    elements as the shape, and nothing longer than the text is created here.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self._unit = _brackets(shape[1:]) + b","
        self._at = 0

    def next_fits(self, chunk: bytes) -> bool:
        """Return whether the brackets of the next chunk, which has 0 in strings, agree with the shape."""
        structure = chunk.translate(None, _NO_STRUCTURE) + b","
        size, start = len(self._unit), self._at % len(self._unit)
        expected = self._unit[start : start + len(structure)]
        if len(expected) < len(structure):
            rest = len(structure) - len(expected)
            expected += self._unit * (rest // size) + self._unit[: rest % size]
        self._at += len(structure)
        return structure == expected and _has_separated_elements(chunk)


def find_mismatch(array: Buffer, shape: Sequence[int]) -> str:
    """Describe how a JSON array differs from a shape in the number of lists and elements; "" if it does not."""
    lists, commas = count_lists(array)
    expected = _list_counts(shape)
    empty = 0 in shape
    if lists == expected and (empty or commas + 1 == _count(shape)):
        if not empty or _is_only_brackets(array, shape, expected):
            return ""
        return "'data' has elements, expected none by its shape"
    nested_shape = regular_shape(lists, commas)
    if nested_shape is None:
        return "'data' is ragged, expected rows of equal lengths"
    return f"'data' nests as {nested_shape}, expected its shape {list(shape)}"


def regular_shape(lists: Sequence[int], commas: int) -> list[int] | None:
    """Return the shape of an array with these numbers of lists at each depth and of commas; None if it is ragged."""
    counts = [*lists, commas + 1]
    if any(inner % outer for outer, inner in itertools.pairwise(counts)):
        return None
    return [inner // outer for outer, inner in itertools.pairwise(counts)]


def _list_counts(shape: Sequence[int]) -> list[int]:
    """Return the number of lists at each depth of an array of a shape."""
    counts = [1]
    for size in shape[:-1]:
        counts.append(counts[-1] * size)
    return [count for count in counts if count]


def _count(shape: Sequence[int]) -> int:
    return _list_counts([*shape, 1])[-1]


def _is_only_brackets(array: Buffer, shape: Sequence[int], lists: Sequence[int]) -> bool:
    """Return whether an array without elements consists of brackets and commas only."""
    if sum(lists) * 2 > len(memoryview(array)):
        return False
    return bytes(array).translate(None, _SPACE) == _brackets(shape)


def _brackets(shape: Sequence[int]) -> bytes:
    """Return an array of a shape in JSON without its elements."""
    text = b""
    for size in reversed(shape):
        text = b"[" + b",".join([text] * size) + b"]"
    return text


def _has_separated_elements(chunk: bytes) -> bool:
    """Return whether commas separate elements from brackets; the brackets alone do not reveal `1[2]`."""
    codes = np.frombuffer(b",".join((b"", chunk.translate(None, _SPACE), b"")), np.uint8)
    before, after = codes[:-1], codes[1:]
    opens = (after == _OPEN) & (before != _OPEN) & (before != _COMMA)
    closes = (before == _CLOSE) & (after != _CLOSE) & (after != _COMMA)
    return not (opens.any() or closes.any())
