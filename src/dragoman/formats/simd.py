"""Long arrays of numbers in JSON, read by simdjson where it is installed.

It reads several times as fast as a parser that makes a Python object of each number. Whatever it refuses, and
whatever it would take otherwise than the parser that everything else goes through, is left to that one.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dragoman.core.datatypes import Array, Datatype

T = TypeVar("T")

LONG = 2048  # performance only: bytes of JSON from which on simdjson is faster

_TYPES = {"float": ("d", np.float64), "int": ("i", np.int64), "uint": ("u", np.uint64)}
_COUNTED = 0xFFFFFF  # simdjson counts no further
_ROW = 16  # performance only: rows that are shorter on average cost more to check than simdjson gains
_KEPT = 1 << 19  # performance only: bytes; a parser holds several times the memory of the longest text that it has read

# The parser that was used last: a new one has to be given its memory by the system. One thread at a time has it.
_PARSERS: list[Any] = []


def numbers(text: bytes, datatype: Datatype, shape: Sequence[int] | None) -> Array | None:
    """The numbers, flat, in a JSON array that is nested as `shape`, or that is flat where it is None.

    None where there is anything else to be said of it.
    """
    if datatype.kind not in _TYPES or not (shape is None or _worth_it(shape)):
        return None
    found = read(text, lambda document, whole: _array(document, whole, datatype, shape))
    if found is None:
        return None
    return _narrowed(found if shape is None else found.reshape(shape), datatype)


def read(text: bytes, made: Callable[[Any, bytes], T | None]) -> T | None:
    """What `made` makes of a parsed text; None where that is None, or where there is anything else to be said of it.

    What it makes must not hold on to any part of the document.
    """
    make = _parser()
    if make is None:
        return None
    try:
        parser = _PARSERS.pop()
    except IndexError:
        parser = make()
    found = _made(parser, text, made)
    if found is not None and len(text) <= _KEPT and not _PARSERS:
        _PARSERS.append(parser)
    return found


def _worth_it(shape: Sequence[int]) -> bool:
    return 0 < _lists(shape) * _ROW <= math.prod(shape) and max(shape) < _COUNTED


def _lists(shape: Sequence[int]) -> int:
    return sum(math.prod(shape[:axis]) for axis in range(len(shape)))


def _made(parser: Any, text: bytes, made: Callable[[Any, bytes], T | None]) -> T | None:
    try:
        return made(parser.parse(text), text)
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError):  # how simdjson says that it is not so
        return None


def _array(document: Any, text: bytes, datatype: Datatype, shape: Sequence[int] | None) -> Array | None:
    code, dtype = _TYPES[datatype.kind]
    found: Array = np.frombuffer(document.as_buffer(of_type=code), dtype)
    # simdjson flattens: only if there are no more lists than there have to be, none is in the place of a number.
    if shape is None:
        return found if text.find(b"[", 1) < 0 else None
    lists = np.count_nonzero(np.frombuffer(text, np.uint8) == ord("["))
    return found if lists == _lists(shape) and _has_shape(document, shape) else None


def _has_shape(rows: Any, shape: Sequence[int]) -> bool:
    """Return whether nested lists have the lengths of a shape. Raises TypeError for a number in place of a list."""
    return len(rows) == shape[0] and (len(shape) == 1 or all(_has_shape(row, shape[1:]) for row in rows))


def _narrowed(wide: Array, datatype: Datatype) -> Array | None:
    """Integers in their own dtype, floats as they are; None where an integer does not fit."""
    if datatype.kind == "float" or datatype.dtype == wide.dtype:
        return wide
    narrow: Array = wide.astype(datatype.dtype)
    return narrow if (narrow == wide).all() else None


@functools.cache
def _parser() -> Callable[[], Any] | None:
    try:
        from simdjson import Parser
    except (ImportError, RuntimeError):  # not installed, or not for this machine
        return None
    made: Callable[[], Any] = Parser
    return made
