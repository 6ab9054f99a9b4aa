"""Parse JSON documents of protocols without typed tensors, with limits and with long arrays of numbers kept as text.

A general parser makes a Python object for each number. So long arrays are cut out of the text, each replaced by a
marker while the rest is parsed, and are parsed in chunks once their datatype is known.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from dragoman.core.datatypes import BOOL, FP64, INT64, UINT64, Array, Datatype
from dragoman.core.errors import InvalidInput
from dragoman.formats.json_numbers import parse_numbers
from dragoman.formats.json_scan import BLOCK, check_json, count_lists, find_array_end, find_string_end
from dragoman.formats.nesting import Nesting, regular_shape
from dragoman.formats.policy import Buffer, Policy

_LONG = 1 << 16  # performance only: bytes; longer arrays are parsed separately
_MARKER = secrets.token_hex(16)


class NumberArray:
    """A long array of numbers in a document, parsed on request."""

    __slots__ = ("_text", "shape")

    def __init__(self, text: memoryview) -> None:
        """Raise InvalidInput if its lists have unequal lengths."""
        self._text = text
        shape = regular_shape(*count_lists(text))
        if shape is None:
            raise InvalidInput("a list of lists is ragged, expected rows of equal lengths")
        self.shape: Sequence[int] = shape

    def array(self, where: str, datatype: Datatype | None = None) -> Array:
        """Return the numbers as a datatype, by default as NumPy infers it from a list: INT64, UINT64, FP64 or BOOL.

        Raises InvalidInput naming `where` if it contains anything else.
        """
        if _has_any(self._text, b"n"):
            raise InvalidInput(f"{where}: expected numbers, got null")
        kinds = [datatype] if datatype is not None else _infer_datatypes(self._text)
        for kind in kinds[:-1]:
            try:
                return self._parse(where, kind)
            except InvalidInput:
                pass
        return self._parse(where, kinds[-1])

    def _parse(self, where: str, datatype: Datatype) -> Array:
        count = 1
        for size in self.shape:
            count *= size
        nesting = Nesting(self.shape) if len(self.shape) > 1 else None
        array = parse_numbers(where, datatype, self._text, count, nesting)
        if array.size != count:
            raise InvalidInput(f"{where}: expected numbers between the commas of a list")
        return array.reshape(self.shape)


def _infer_datatypes(text: memoryview) -> list[Datatype]:
    """Return the datatypes to try in turn for an array of numbers in JSON."""
    if _has_any(text, b"tf"):
        return [BOOL]
    return [FP64] if _has_any(text, b".eE") else [INT64, UINT64]


def _has_any(text: memoryview, characters: bytes) -> bool:
    """Return whether a text contains one of these; search in blocks, without a copy of the whole."""
    blocks = (bytes(text[at : at + BLOCK]) for at in range(0, len(text), BLOCK))
    return any(each.encode() in block for block in blocks for each in characters.decode())


def parse_json(text: Buffer, policy: Policy) -> Any:
    """Parse JSON within the limits of `check_json`. Raises InvalidInput."""
    text = bytes(text)
    check_json(text, policy)
    return _decode(text)


def parse_document(text: Buffer, policy: Policy) -> Any:
    """As `parse_json`, with each long array of numbers as a NumberArray, to which those limits do not apply."""
    text = bytes(text)
    rest, arrays = cut_number_arrays(text, policy)
    check_json(rest, policy)
    value = _decode(rest)
    return _insert_arrays(value, [NumberArray(array) for array in arrays]) if arrays else value


def cut_number_arrays(text: bytes, policy: Policy) -> tuple[bytes, list[memoryview]]:
    """Return JSON with a string in place of each long array of numbers, and these arrays."""
    arrays: list[memoryview] = []
    if len(text) < _LONG or _has_marker(text):
        return text, arrays
    parts: list[bytes] = []
    done = at = 0
    for _ in range(policy.max_json_values):
        quote = text.find(b'"', at)
        stop = len(text) if quote < 0 else quote
        while stop - at >= _LONG:
            start, end = _find_numbers(text, at, stop)
            if end <= start:
                break
            parts += (text[done:start], f'"{_MARKER}:{len(arrays)}"'.encode())
            arrays.append(memoryview(text)[start:end])
            done = at = end
        if quote < 0:
            break
        at = find_string_end(text, quote, policy.max_json_values)
        if at < 0:
            break
    return (b"".join((*parts, text[done:])), arrays) if arrays else (text, arrays)


def _has_marker(text: bytes) -> bool:
    """Return whether a text contains the marker; search in blocks, so that other threads run in between."""
    marker = _MARKER.encode()
    return any(text.find(marker, at, at + BLOCK + len(marker)) >= 0 for at in range(0, len(text), BLOCK))


def _find_numbers(text: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return the span of the next long array in a range without quotes; (0, 0) if there is none."""
    while stop - at >= _LONG:
        start = text.find(b"[", at, stop)
        if start < 0:
            break
        brace = text.find(b"{", start, stop)
        limit = stop if brace < 0 else brace
        end = find_array_end(memoryview(text)[:limit], start) if limit - start >= _LONG else None
        if end is not None and end - start >= _LONG:
            return start, end
        at = end if end is not None else limit + 1
    return 0, 0


def _insert_arrays(value: Any, arrays: Sequence[NumberArray]) -> Any:
    """Replace the markers in a parsed document by their arrays."""
    if type(value) is str:
        return arrays[int(value.partition(":")[2])] if value.startswith(_MARKER) else value
    if type(value) is list:
        return [_insert_arrays(each, arrays) for each in value]
    if type(value) is dict:
        return {key: _insert_arrays(each, arrays) for key, each in value.items()}
    return value


def _decode(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the request body is not valid JSON: {error}") from error
