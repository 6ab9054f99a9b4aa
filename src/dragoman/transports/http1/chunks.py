"""Decode the chunked transfer coding (RFC 9112, 7.1)."""

import re
from collections.abc import Callable

from dragoman.transports.http1.headers import not_http

# The size of a chunk, with extensions, and a field of the trailer; extensions and trailer are ignored.
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
_MAX_LINE = 4096
_MAX_TRAILER = 16 << 10
# Limit on the bytes of sizes and extensions: a constant, and a multiple of the size of the body.
_OVERHEAD, _OVERHEAD_FACTOR = 64 << 10, 16


class ChunkedDecoder:
    """Passes the decoded bytes to `put`; `done` once the trailer has ended."""

    __slots__ = ("_ended", "_last", "_left", "_overhead", "_put", "_size", "_trailer", "done")

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self.done = False
        self._put = put
        self._left = 0  # bytes missing of the current chunk
        self._ended = True  # the line break after the chunk has arrived
        self._last = False  # only the trailer is missing
        self._trailer = self._overhead = self._size = 0

    def take(self, data: bytes, at: int) -> int:
        """Decode `data` from `at` on; return where it stopped. Raises HttpError 400, and the errors of `put`."""
        while not self.done:
            if self._left:
                chunk = data[at : at + self._left]
                if not chunk:
                    return at
                self._put(chunk)
                self._size += len(chunk)
                self._left -= len(chunk)
                at += len(chunk)
                continue
            end = data.find(b"\r\n", at)
            if end < 0 or end - at > _MAX_LINE:
                if len(data) - at > _MAX_LINE:
                    raise not_http("a line of the chunked coding is too long")
                _check_open(data[at:])
                return at
            self._line(data[at:end])
            at = end + 2
        return at

    def _line(self, line: bytes) -> None:
        self._overhead += len(line) + 2
        if self._overhead > _OVERHEAD + _OVERHEAD_FACTOR * self._size:
            raise not_http("its chunks are mostly overhead")
        if self._last:
            self._field(line)
        elif not self._ended:
            if line:
                raise not_http("a chunk is longer than its size")
            self._ended = True
        else:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise not_http("the size of a chunk")
            self._left = int(match[1], 16)
            self._ended = False
            self._last = not self._left

    def _field(self, line: bytes) -> None:
        self._trailer += len(line) + 2
        if not line:
            self.done = True
        elif self._trailer > _MAX_TRAILER or _FIELD.fullmatch(line) is None:
            raise not_http("the trailer of the chunked coding")


def _check_open(line: bytes) -> None:
    if b"\n" in line or b"\r" in line[:-1]:
        raise not_http("a line break of the chunked coding")
