"""Serialize JSON with long arrays in chunks: no other thread runs while orjson serializes or copies one of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.formats import fast_json
from dragoman.formats.policy import Buffer

_CHUNK_ELEMENTS = 1 << 14  # performance only: serialized at a time
_MARK = b"\0"  # never in JSON text, in which control characters are escaped


class LongText:
    """Serialized JSON in several buffers, which `json_chunks` inserts into a document without copying."""

    __slots__ = ("chunks",)

    def __init__(self, chunks: Sequence[Buffer]) -> None:
        self.chunks = chunks


def json_chunks(value: Any) -> tuple[Buffer, ...]:
    """Serialize a value that may contain LongText and NumPy arrays; return consecutive buffers."""
    texts: list[LongText] = []

    def mark(each: Any) -> fast_json.Fragment:
        if not isinstance(each, LongText):
            raise TypeError(f"not serializable to JSON: {type(each).__name__}")
        texts.append(each)
        return fast_json.Fragment(_MARK)

    document = fast_json.dumps(value, default=mark)
    if not texts:
        return (document,)
    first, *others = document.split(_MARK)
    chunks: list[Buffer] = [first]
    for text, following in zip(texts, others, strict=True):
        chunks += (*text.chunks, following)
    return tuple(chunks)


def format_nested(array: Array) -> LongText:
    """Serialize an array of numbers as nested lists for `json_chunks`, with NaN and infinities as null.

    Floats are serialized as the equal float64, as Python does.
    """
    return LongText(_nested_chunks(array))


def _nested_chunks(array: Array) -> list[Buffer]:
    if array.size <= _CHUNK_ELEMENTS or array.ndim == 0:
        wide = array.astype(np.float64) if array.dtype.kind == "f" else array
        return [fast_json.dumps(np.ascontiguousarray(wide) if wide.ndim else wide[()])]
    chunks: list[Buffer] = [b"["]
    rows = _CHUNK_ELEMENTS * len(array) // array.size
    if rows:
        for at in range(0, len(array), rows):
            (text,) = _nested_chunks(array[at : at + rows])
            chunks += (memoryview(text)[1:-1], b",")
    else:
        for row in array:
            chunks += (*_nested_chunks(row), b",")
    chunks[-1] = b"]"
    return chunks


def format_numbers(flat: Array, at_once: bool = False) -> Any:
    """Return a flat array as a value for `json_chunks`: floats in the fewest digits that identify them, NaN and
    infinities as null.

    A long array is serialized here, in chunks; `at_once` lets orjson serialize it in one call, which avoids a copy.
    """
    if at_once or flat.size <= _CHUNK_ELEMENTS:
        return flat
    chunks: list[Buffer] = [b"["]
    for at in range(0, flat.size, _CHUNK_ELEMENTS):
        text = fast_json.dumps(flat[at : at + _CHUNK_ELEMENTS])
        chunks += (memoryview(text)[1:-1], b",")
    chunks[-1] = b"]"
    return LongText(chunks)
