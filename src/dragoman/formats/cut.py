"""Cut long arrays out of a JSON message, so that each byte of them is parsed once, and in chunks.

Fields that are needed to parse an array may come after it, so a parser of the whole message would have to skip the
array first. Here arrays are found by their keys and by characters that they cannot contain (braces), and replaced by
`[]`. The parser of the rest checks the guess: each `[]` must be the value of a field that expects an array. Otherwise
the message is parsed as a whole.
"""

import re
from collections.abc import Container, Mapping

import msgspec
import numpy as np

from dragoman.formats.json_scan import find_array_end, find_string_end

_OPENING = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*(?=\[)")
_MAX_STRINGS = 1 << 14  # of a message that are compared with keys, without those in arrays


class CutMessage(msgspec.Struct, frozen=True):
    """A message with `[]` for each of its long arrays.

    rest: the message without its arrays. text: the message with them. spans: where each array begins and ends in
    `text`, by the position of its `[]` in `rest`.
    """

    rest: bytes
    text: bytes
    spans: Mapping[int, tuple[int, int]]

    def span(self, value: object) -> tuple[int, int] | None:
        """Return where the array of a field lies in `text`; None if its value in `rest` does not stand for one."""
        if not self.spans or not isinstance(value, msgspec.Raw):
            return None
        view = memoryview(value)
        return self.spans.get(_address(view) - _address(self.rest)) if len(view) == 2 else None

    def array(self, value: object) -> memoryview | None:
        """Return the text of that array."""
        span = self.span(value)
        return None if span is None else memoryview(self.text)[span[0] : span[1]]


def cut_arrays(text: bytes, keys: Container[bytes], min_bytes: int) -> CutMessage:
    """Cut out the arrays of at least `min_bytes` that follow one of the keys, which include their quotes."""
    spans: dict[int, tuple[int, int]] = {}
    parts: list[bytes] = []
    size = done = at = strings = 0
    while (quote := text.find(b'"', at)) >= 0 and strings < _MAX_STRINGS:
        strings += 1
        at = find_string_end(text, quote, _MAX_STRINGS)
        if at < 0:
            break
        opening = _OPENING.match(text, at) if text[quote:at] in keys else None
        if opening is None:
            continue
        start = opening.end()
        end = _array_end(text, start)
        if end is None:
            break
        at = max(end, start)
        if end - start >= min_bytes:
            parts += (text[done:start], b"[]")
            spans[size + start - done] = start, end
            size += start - done + 2
            done = end
    return CutMessage(b"".join([*parts, text[done:]]) if spans else text, text, spans)


def _array_end(text: bytes, start: int) -> int | None:
    """Return the index after the array that begins at `start`; 0 if it contains objects, None if it does not end.

    An array of numbers ends at the last bracket before a quote or brace.
    """
    quote = text.find(b'"', start)
    stop = len(text) if quote < 0 else quote
    brace = text.find(b"}", start, stop)
    end = text.rfind(b"]", start, stop if brace < 0 else brace) + 1
    if end or brace >= 0 or quote < 0:
        return end
    return find_array_end(text, start)  # of strings


def _address(view: bytes | memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
