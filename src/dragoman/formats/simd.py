"""Flat JSON arrays of numbers parsed by simdjson, if it is installed.

It is several times as fast as a parser that makes a Python object of each number. Arrays that it rejects, or would take
differently from the general parser, are left to that one.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array, Datatype

_TYPES = {"float": ("d", np.float64), "int": ("i", np.int64), "uint": ("u", np.uint64)}
_KEPT_BYTES = 1 << 19  # performance only: a parser holds several times the memory of its longest text

# The parser that was used last: a new one has to get its memory from the system. One thread at a time has it.
_PARSERS: list[Any] = []


def parse_numbers(text: bytes, datatype: Datatype) -> Array | None:
    """Parse a flat array: integers to their own dtype, floats to FP64. None if a general parser has to decide."""
    make = _parser_class()
    if make is None or datatype.kind not in _TYPES or text.find(b"[", 1) >= 0:  # simdjson flattens nested lists
        return None
    try:
        parser = _PARSERS.pop()
    except IndexError:
        parser = make()
    code, dtype = _TYPES[datatype.kind]
    try:
        numbers: Array = np.frombuffer(parser.parse(text).as_buffer(of_type=code), dtype)
    except (ValueError, TypeError, AttributeError, RuntimeError):  # not JSON, or not an array of such numbers
        return None
    if len(text) <= _KEPT_BYTES and not _PARSERS:
        _PARSERS.append(parser)
    return numbers if datatype.kind == "float" else _narrowed(numbers, datatype)


def _narrowed(wide: Array, datatype: Datatype) -> Array | None:
    """Integers in their own dtype; None if one does not fit."""
    narrow: Array = wide.astype(datatype.dtype, copy=False)
    return narrow if (narrow == wide).all() else None


@functools.cache
def _parser_class() -> Callable[[], Any] | None:
    try:
        from simdjson import Parser
    except (ImportError, RuntimeError):  # not installed, or not for this machine
        return None
    made: Callable[[], Any] = Parser
    return made
