"""Nested arrays as JSON text, printed in portions: no other thread runs while a printer does."""

import numpy as np
import orjson

from dragoman.core.datatypes import Array
from dragoman.payload.policy import Buffer

_PORTION = 1 << 14  # elements


def nested_text(array: Array) -> orjson.Fragment:
    """An array of numbers as nested lists, for orjson to put into what it prints; NaN and infinities as null.

    Floats are printed as the float64 that they are equal to, as Python prints them.
    """
    return orjson.Fragment(b"".join(_parts(array)))


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
