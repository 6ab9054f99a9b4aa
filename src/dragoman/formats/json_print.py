"""JSON text of long arrays, written in chunks: no other thread runs while orjson writes, or copies, one of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from dragoman.core.datatypes import Array
from dragoman.formats.policy import Buffer

_PORTION = 1 << 14  # performance only: elements written at a time
_MARK = b"\0"  # stands in no JSON text, since control characters in strings are escaped


class LongText:
    """JSON text in several buffers, which `json_chunks` puts into a document without a copy."""

    __slots__ = ("chunks",)

    def __init__(self, chunks: Sequence[Buffer]) -> None:
        self.chunks = chunks


def json_chunks(value: Any) -> tuple[Buffer, ...]:
    """The JSON text of a value, with each LongText and NumPy array in it, as buffers that follow one another."""
    texts: list[LongText] = []

    def mark(each: Any) -> orjson.Fragment:
        if not isinstance(each, LongText):
            raise TypeError(f"not serializable to JSON: {type(each).__name__}")
        texts.append(each)
        return orjson.Fragment(_MARK)

    document = orjson.dumps(value, default=mark, option=orjson.OPT_SERIALIZE_NUMPY)
    if not texts:
        return (document,)
    first, *others = document.split(_MARK)
    chunks: list[Buffer] = [first]
    for text, following in zip(texts, others, strict=True):
        chunks += (*text.chunks, following)
    return tuple(chunks)


def nested_text(array: Array) -> LongText:
    """An array of numbers as nested lists, for `json_chunks`; NaN and infinities as null.

    Floats are printed as the float64 that they are equal to, as Python prints them.
    """
    return LongText(_parts(array))


def _parts(array: Array) -> list[Buffer]:
    if array.size <= _PORTION or array.ndim == 0:
        wide = array.astype(np.float64) if array.dtype.kind == "f" else array
        return [orjson.dumps(np.ascontiguousarray(wide) if wide.ndim else wide[()], option=orjson.OPT_SERIALIZE_NUMPY)]
    parts: list[Buffer] = [b"["]
    rows = _PORTION * len(array) // array.size
    if rows:
        for at in range(0, len(array), rows):
            (text,) = _parts(array[at : at + rows])
            parts += (memoryview(text)[1:-1], b",")
    else:
        for row in array:
            parts += (*_parts(row), b",")
    parts[-1] = b"]"
    return parts
