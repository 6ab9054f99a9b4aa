"""Cuts the client's bytes into frames."""

import time
from typing import Protocol

from dragoman.transports.http2 import frames
from dragoman.transports.http2.body_receiver import BodyReceiver
from dragoman.transports.http2.frames import Http2ConnectionError, Http2StreamError

# Requests that arrived together are worked on for so long before other connections have a turn.
_SLICE_S = 0.002

_unpack = frames.head.unpack_from


class FrameHandler(Protocol):
    """Handles the frames of a connection; nothing more once it is `over`."""

    over: bool

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
        at = 0 if self._has_preface else self._read_preface(data)
        if self._has_preface:
            at = self._read_frames(data, at, len(data))
        if at == len(data):
            return False
        self.unparsed += memoryview(data)[at:]
        return True

    def _read_preface(self, data: bytes) -> int:
        if not frames.PREFACE.startswith(data[: len(frames.PREFACE)]):
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, "expected the preface of HTTP/2")
        self._has_preface = len(data) >= len(frames.PREFACE)
        return len(frames.PREFACE) if self._has_preface else 0

    def _read_frames(self, data: bytes, at: int, end: int) -> int:
        """Handle what has arrived; return where the first frame begins that is incomplete."""
        handler = self._handler
        if self._body.left or self._body.padding:
            at = self._body.receive(data, at, end)
        until_s = self.stopwatch() + _SLICE_S
        while end - at >= 9:
            high, low, kind, flags, number = _unpack(data, at)
            length = high << 8 | low
            number &= frames.NUMBER
            if kind == 0 and (end - at > 9 or not flags & frames.PADDED or not length):
                at = handler.handle_data(flags, number, length, data, at + 9, end)
                continue
            stop = at + 9 + length
            if stop > end:
                self.check_length(kind, length)
                self._needed = frames.HEAD_BYTES + (1 if kind == frames.DATA else length)
                return at
            at = stop
            try:
                handler.handle_frame(kind, flags, number, data[stop - length : stop])
            except Http2StreamError as error:
                handler.fail_stream(number, error)
            if handler.over:
                return end
            if kind == frames.HEADERS and self.stopwatch() > until_s:
                self.more = at < end
                break
        self._needed = frames.HEAD_BYTES
        return at

    def check_length(self, kind: int, length: int) -> None:
        """Raise Http2ConnectionError if a frame is too long to be held until it is complete."""
        most = self._max_held
        if length > most and kind != frames.DATA:
            code = frames.FRAME_SIZE_ERROR if length > self._max_frame else frames.ENHANCE_YOUR_CALM
            raise Http2ConnectionError(code, f"expected at most {most} bytes in a frame of type {kind}, got {length}")
