"""Very long vectors in JSON, cut out of a message and read piece by piece: no other thread runs while a parser does."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from dragoman.core.datatypes import FP64, Array
from dragoman.formats.digits.machine import digits
from dragoman.formats.json_data import PARSER_FAULTS
from dragoman.formats.simd import LONG, numbers

_PIECE = 1 << 18  # performance only: bytes read at a time
_MOST = 1024  # vectors
_SPACE = re.compile(rb"[ \t\r\n]*")
_ESCAPED = b"\\u"  # the key may be written so elsewhere, and be the one that counts
_FLOATS = msgspec.json.Decoder(list[float])


@dataclass(frozen=True, slots=True)
class Cut:
    """A message with `[]` for each vector in one list of vectors, and where those are in the text."""

    rest: bytes
    spans: Sequence[tuple[int, int]]


def cut(text: bytes, key: bytes) -> Cut | None:
    """The message without the numbers of the list of vectors under a key, e.g. `"input"`.

    None where it is not plain to see which they are. What is in the vectors shows only when they are read.
    """
    at = text.find(key)
    opening = re.compile(rb"\s*:\s*\[").match(text, at + len(key)) if at >= 0 else None
    if opening is None:
        return None
    spans: list[tuple[int, int]] = []
    place = opening.end()
    while len(spans) <= _MOST:
        start = _past_space(text, place)
        if text[start : start + 1] != b"[":
            return None
        end = text.find(b"]", start) + 1
        if not end:
            return None
        spans.append((start, end))
        place = _past_space(text, end)
        if text[place : place + 1] == b"]":
            rest = _without(text, spans)
            # What was cut out is not looked at: where a key stands in it, it is no vector of numbers.
            return None if rest.count(key) != 1 or _ESCAPED in rest else Cut(rest, spans)
        if text[place : place + 1] != b",":
            return None
        place += 1
    return None


def cut_flat(text: bytes, key: bytes) -> Cut | None:
    """The message without the numbers of the one vector under a key, e.g. `"sens"`; None as for `cut`."""
    at = text.find(key)
    opening = re.compile(rb"\s*:\s*(?=\[)").match(text, at + len(key)) if at >= 0 else None
    end = text.find(b"]", opening.end()) + 1 if opening is not None else 0
    if opening is None or not end or end - opening.end() < LONG:
        return None
    spans = [(opening.end(), end)]
    rest = _without(text, spans)
    return None if rest.count(key) != 1 or _ESCAPED in rest else Cut(rest, spans)


def vector(text: bytes, span: tuple[int, int]) -> Array | None:
    """The numbers in a part of the text, `[...]`; None where there is anything but numbers in it."""
    at, end = span[0] + 1, span[1] - 1
    found = _by_machine(memoryview(text)[at:end])
    if found is not None:
        return found
    if end - at <= _PIECE:
        return _read(text[span[0] : span[1]])
    pieces: list[Array] = []
    while at <= end:
        comma = text.find(b",", at + _PIECE, end)
        stop = end if comma < 0 else comma
        piece = _read(b"".join((b"[", memoryview(text)[at:stop], b"]")))
        if piece is None or not piece.size:  # between two commas there has to be a number
            return None
        pieces.append(piece)
        at = stop + 1
    return np.concatenate(pieces)


def _by_machine(text: memoryview) -> Array | None:
    machine = digits(FP64.dtype) if len(text) >= LONG else None
    if machine is None:
        return None
    array = np.empty(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(",")) + 1, np.float64)
    return array if machine.read(text, array) == array.size else None


def _read(piece: bytes) -> Array | None:
    found = numbers(piece, FP64, None)
    if found is not None:
        return found
    try:
        return np.array(_FLOATS.decode(piece), np.float64)
    except PARSER_FAULTS:
        return _with_literals(piece)


def _with_literals(piece: bytes) -> Array | None:
    """The numbers as Python's own parser reads them, which knows NaN, Infinity and 1e999."""
    try:
        values = json.loads(piece)
        if all(type(value) is float or type(value) is int for value in values):
            return np.array(values, np.float64)
    except (ValueError, OverflowError, RecursionError):
        pass
    return None


def _past_space(text: bytes, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _without(text: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
    parts: list[bytes] = []
    done = 0
    for start, end in spans:
        parts += (text[done:start], b"[]")
        done = end
    return b"".join((*parts, text[done:]))
