"""Parse received bytes into frames, and join the fragments of header blocks."""

import time
from typing import Final, Protocol

from dragoman.formats.http2 import frames
from dragoman.formats.http2.fields import Decoder, Field
from dragoman.formats.http2.frames import HEADERS, NUMBER, Http2ConnectionError, Http2StreamError
from dragoman.protocols.wire import HttpError
from dragoman.transports.http2.bodies import BodyReceiver
from dragoman.transports.http2.request import Http2Headers, parse_headers
from dragoman.transports.http2.stream import CLOSED

# CONTINUATION frames of one block; the largest accepted block needs far fewer.
_MAX_FRAGMENTS: Final = 64
# Header blocks that are cached, and the size of the largest one.
_MAX_CACHED_BLOCKS: Final = 32
_MAX_CACHED_BYTES: Final = 1024


class HeaderBlocks:
    """Joins and decodes the header blocks of one connection. `is_open` while a block is incomplete."""

    __slots__ = (
        "_block",
        "_decoder",
        "_ended",
        "_fragments",
        "_max_bytes",
        "_max_fields",
        "_number",
        "_parsed_headers",
        "is_open",
        "max_block",
    )

    def __init__(self, max_header_bytes: int, max_fields: int) -> None:
        self._max_fields = max_fields
        self._max_bytes = max_header_bytes
        self._decoder = Decoder(max_header_bytes)
        # Somewhat larger blocks are decoded, so that only their stream is rejected.
        self.max_block = max(frames.SMALLEST_FRAME, 4 * max_header_bytes)
        self._parsed_headers: dict[bytes, Http2Headers] = {}
        self.is_open = False
        self._block = bytearray()
        self._number = 0
        self._ended = False
        self._fragments = 0

    def begin(self, number: int, ended: bool, fragment: bytes) -> None:
        """Begin a block that CONTINUATION frames will complete."""
        self.is_open, self._number, self._ended, self._fragments = True, number, ended, 0
        self._block = bytearray(fragment)

    def append(self, number: int, flags: int, fragment: bytes) -> tuple[bool, bytes] | None:
        """Add a CONTINUATION frame; once the block is complete, return whether the stream ends, and the block."""
        if not self.is_open or number != self._number:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._fragments += 1
        self._block += fragment
        if self._fragments > _MAX_FRAGMENTS or len(self._block) > self.max_block:
            raise Http2ConnectionError(frames.ENHANCE_YOUR_CALM, "a header block is too long")
        if not flags & frames.END_HEADERS:
            return None
        block, self._block, self.is_open = bytes(self._block), bytearray(), False
        return self._ended, block

    def decode(self, block: bytes) -> tuple[list[Field], HttpError | None]:
        """Return the fields of a block up to the limits, and an error if there were more.

        Raises Http2ConnectionError.
        """
        decoder = self._decoder
        version = decoder.version
        found = decoder.decode(block)
        if decoder.version != version:
            self._parsed_headers.clear()
        if decoder.too_large:
            return found, HttpError(431, f"headers: expected at most {self._max_bytes} bytes, got more")
        if len(found) > self._max_fields:
            text = f"headers: expected at most {self._max_fields} fields, got {len(found)}"
            return found[: self._max_fields], HttpError(431, text)
        return found, None

    def parse_request(self, block: bytes) -> Http2Headers:
        """Return the headers of a request; its `error` says if it has too many fields.

        Raises Http2ConnectionError and Http2StreamError.
        """
        headers = self._parsed_headers.get(block)
        if headers is not None:
            return headers
        version = self._decoder.version
        headers = parse_headers(*self.decode(block))
        if self._decoder.version == version and len(block) <= _MAX_CACHED_BYTES:
            if len(self._parsed_headers) >= _MAX_CACHED_BLOCKS:
                self._parsed_headers.clear()
            self._parsed_headers[block] = headers
        return headers


# Seconds for handling requests that arrived together, before other connections have a turn.
_SLICE_S = 0.002

_unpack = frames.frame_header.unpack_from


class FrameHandler(Protocol):
    """Handles the frames of a connection; nothing more once its phase is CLOSED."""

    phase: int

    def handle_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Handle a complete frame. Raises Http2ConnectionError and Http2StreamError."""

    def handle_data(self, flags: int, number: int, length: int, data: bytes, at: int, end: int) -> int:
        """Handle a DATA frame, whose payload begins at `at`, as far as it has arrived; return where that ends."""

    def fail_stream(self, number: int, error: Http2StreamError) -> None:
        """Reset a stream."""


class FrameReader:
    """Passes complete frames to `handler`, and DATA frames as far as they have arrived.

    `max_frame` and `max_held` limit a frame by SETTINGS and by what is held until it is complete. `more`: complete
    frames wait, and `read(b"")` works on them. `stopwatch` is a clock that goes on during a turn of the event loop.
    """

    __slots__ = (
        "_body", "_handler", "_has_preface", "_max_frame", "_max_held", "_needed", "more", "stopwatch", "unparsed",
    )  # fmt: skip

    def __init__(self, handler: FrameHandler, body: BodyReceiver, max_frame: int, max_held: int) -> None:
        self._handler = handler
        self._body = body
        self._max_frame = max_frame
        self._max_held = max_held
        self.unparsed = bytearray()  # the beginning of a frame
        self._needed = len(frames.PREFACE)  # bytes until that frame can be parsed
        self._has_preface = False
        self.more = False
        self.stopwatch = time.perf_counter

    def read(self, data: bytes) -> bool:
        """Take bytes of the client; return whether a frame has begun that is incomplete.

        Raises Http2ConnectionError.
        """
        self.more = False
        if self.unparsed:
            self.unparsed += data
            if len(self.unparsed) < self._needed and self._has_preface:
                return False
            data = bytes(self.unparsed)
            self.unparsed.clear()
        at, end, handler = 0, len(data), self._handler
        if not self._has_preface:
            if not frames.PREFACE.startswith(data[: len(frames.PREFACE)]):
                raise Http2ConnectionError(frames.PROTOCOL_ERROR, "expected the preface of HTTP/2")
            if end < len(frames.PREFACE):
                self.unparsed += data
                return end > 0
            self._has_preface, at = True, len(frames.PREFACE)
        if self._body.left or self._body.padding:
            at = self._body.receive(data, at, end)
        until_s = self.stopwatch() + _SLICE_S
        needed = frames.FRAME_HEADER_BYTES
        while end - at >= 9:
            high, low, kind, flags, number = _unpack(data, at)
            length = high << 8 | low
            number &= NUMBER
            if not kind and (end - at > 9 or not flags & frames.PADDED or not length):
                at = handler.handle_data(flags, number, length, data, at + 9, end)
                continue
            begin = at + 9
            stop = begin + length
            if stop > end:
                self.check_length(kind, length)
                needed += 1 if kind == frames.DATA else length
                break
            at = stop
            try:
                handler.handle_frame(kind, flags, number, data[begin:stop])
            except Http2StreamError as error:
                handler.fail_stream(number, error)
            if handler.phase == CLOSED:
                return False
            if kind == HEADERS and self.stopwatch() > until_s:
                self.more = at < end
                break
        self._needed = needed
        if at == end:
            return False
        self.unparsed += memoryview(data)[at:]
        return True

    def check_length(self, kind: int, length: int) -> None:
        """Raise Http2ConnectionError if a frame is too long to be held until it is complete."""
        most = self._max_held
        if length > most and kind != frames.DATA:
            code = frames.FRAME_SIZE_ERROR if length > self._max_frame else frames.ENHANCE_YOUR_CALM
            raise Http2ConnectionError(code, f"expected at most {most} bytes in a frame of type {kind}, got {length}")
