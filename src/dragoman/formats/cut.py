"""Long arrays of numbers or texts cut out of a message, so that each byte of them is read once, and in portions.

What describes a tensor may stand behind its data, so that a parser of the whole has to go through the data before
anybody knows how to read it. Here the data is found by what it cannot hold (braces) and `[]` is put in its place.
That this was right shows only when the rest is parsed: an array was data if, and only if, its `[]` stands where data
is expected. Where one does not, or anything else is wrong, a short message is read as a whole.
"""

import re
from collections.abc import Mapping

import msgspec
import numpy as np

from dragoman.formats.json_scan import array_end

_OPENING = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*(?=\[)")
_KEY = b'"data"'
_MOST_KEYS = 4096  # beyond, no more arrays are looked for


class Message(msgspec.Struct, frozen=True):
    """A message with `[]` for each of the arrays, which are known by where it stands."""

    rest: bytes
    arrays: Mapping[int, memoryview]

    def array(self, data: object) -> memoryview | None:
        """The array for which this piece of the rest stands; None where it is no such piece."""
        if not self.arrays or not isinstance(data, msgspec.Raw):
            return None
        view = memoryview(data)
        return self.arrays.get(_address(view) - _address(self.rest)) if len(view) == 2 else None


def divided(text: bytes, least: int) -> Message:
    """The message without those arrays in it that are `least` bytes long."""
    arrays: dict[int, memoryview] = {}
    pieces: list[bytes] = []
    size = done = at = keys = 0
    while (at := text.find(_KEY, at)) >= 0 and keys < _MOST_KEYS:
        at += len(_KEY)
        keys += 1
        opening = _OPENING.match(text, at)
        if opening is None:
            continue
        start = at = opening.end()
        stop = _next(text, start)
        end: int | None = text.rfind(b"]", start, stop) + 1
        if not end and text[stop : stop + 1] == b'"':
            end = array_end(text, start)
            if end is None:
                break
            at = end
        assert end is not None
        if end - start >= least:
            pieces += (text[done:start], b"[]")
            arrays[size + start - done] = memoryview(text)[start:end]
            size += start - done + 2
            at = done = end
    return Message(b"".join([*pieces, text[done:]]) if arrays else text, arrays)


def _next(text: bytes, start: int) -> int:
    """Where the next quote or brace is. Each byte is looked at a few times at most, whatever the text."""
    quote = text.find(b'"', start)
    stop = len(text) if quote < 0 else quote
    for brace in (b"}", b"{"):
        found = text.find(brace, start, stop)
        stop = stop if found < 0 else found
    return stop


def _address(view: bytes | memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
