"""HTTP/2 frames as bytes (RFC 9113, 4, 6 and 7): types, flags, error codes, and the writer of a connection."""

import struct
from collections.abc import Callable, Sequence
from typing import Final

from dragoman.core.sizes import INLINE

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES: Final = 9

# A frame header: its length in 16 bits and 8 bits, type, flags, and its stream with a reserved bit.
frame_header = struct.Struct(">HBBBI")

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
SETTINGS_TIMEOUT: Final = 0x4
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB

HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

# Defaults before SETTINGS, and bounds of settings.
DEFAULT_WINDOW: Final = 65_535
LARGEST_WINDOW: Final = (1 << 31) - 1
SMALLEST_FRAME: Final = 16_384
LARGEST_FRAME: Final = (1 << 24) - 1
NUMBER: Final = (1 << 31) - 1

_setting = struct.Struct(">HI")
_word = struct.Struct(">I")
_goaway = struct.Struct(">II")


class Http2ConnectionError(Exception):
    """Ends a connection with a GOAWAY of this error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Http2StreamError(Exception):
    """Ends one stream with a RST_STREAM of this error code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """Return a complete frame."""
    size = len(payload)
    return frame_header.pack(size >> 8, size & 0xFF, kind, flags, number) + payload


def settings(pairs: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_setting.pack(*pair) for pair in pairs.items()))


def rst_stream(number: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, number, _word.pack(code))


def window_update(number: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, number, _word.pack(increment))


def goaway(last: int, code: int, message: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, _goaway.pack(last, code) + message.encode())


def check_priority(number: int, payload: bytes) -> None:
    """Raise Http2ConnectionError if a PRIORITY frame is malformed; its content is ignored."""
    if not number or len(payload) != 5:
        code = FRAME_SIZE_ERROR if number else PROTOCOL_ERROR
        raise Http2ConnectionError(code, "PRIORITY: expected a stream and 5 bytes")


def strip_padding(flags: int, payload: bytes) -> bytes:
    """Return the header block of a HEADERS frame, without padding and priority."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise Http2ConnectionError(FRAME_SIZE_ERROR, "HEADERS without the length of its padding")
        begin, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        begin += 5
    if begin > end:
        raise Http2ConnectionError(PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[begin:end]


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the pairs of a SETTINGS frame in order. Raises Http2ConnectionError if a value is out of bounds."""
    if len(payload) % 6:
        raise Http2ConnectionError(FRAME_SIZE_ERROR, f"SETTINGS: expected pairs of 6 bytes, got {len(payload)} bytes")
    pairs = list(_setting.iter_unpack(payload))
    for name, value in pairs:
        least, most, code = _BOUNDS.get(name, _ANY)
        if not least <= value <= most:
            raise Http2ConnectionError(code, f"SETTINGS: expected {least} to {most} for parameter {name}, got {value}")
    return pairs


_ANY = 0, (1 << 32) - 1, NO_ERROR
_BOUNDS = {
    ENABLE_PUSH: (0, 1, PROTOCOL_ERROR),
    INITIAL_WINDOW_SIZE: (0, LARGEST_WINDOW, FLOW_CONTROL_ERROR),
    MAX_FRAME_SIZE: (SMALLEST_FRAME, LARGEST_FRAME, PROTOCOL_ERROR),
}


Buffer = bytes | bytearray | memoryview

# Announces that our encoder has no dynamic table (RFC 7541); sent once to a client that allows less than the default.
_NO_TABLE: Final = b"\x20"
_FRAME_OVERHEAD = 256


class FrameWriter:
    """Sends frames to `sink`, which takes buffers in order.

    While `is_batching`, frames are collected until `flush`. `response_frames` and `body_bytes` count what was sent of
    responses. `max_frame` is the largest payload that the client accepts. A header block up to `max_whole_block` bytes
    is one frame; while a change of the dynamic table is to be announced none is.
    """

    __slots__ = (
        "_buffers",
        "_prefix",
        "_sink",
        "body_bytes",
        "is_batching",
        "max_frame",
        "max_whole_block",
        "response_frames",
        "size",
    )

    def __init__(self, sink: Callable[[list[Buffer]], None]) -> None:
        self._sink = sink
        self._buffers: list[Buffer] = []
        self._prefix = b""
        self.size = 0  # about how many bytes wait for `flush`
        self.is_batching = False
        self.max_frame = SMALLEST_FRAME
        self.max_whole_block = SMALLEST_FRAME
        self.response_frames = self.body_bytes = 0

    def send(self, frame: bytes) -> None:
        """Send a frame that flow control does not apply to."""
        self._buffers.append(frame)
        self.size += len(frame)
        if not self.is_batching:
            self.flush()

    def send_headers(self, number: int, block: bytes, *, ended: bool) -> None:
        """Send a header block: one HEADERS frame and, if it is long, CONTINUATION frames."""
        if self._prefix:
            block, self._prefix = self._prefix + block, b""
            self.max_whole_block = SMALLEST_FRAME
        most = self.max_frame
        flags = END_STREAM if ended else 0
        first, rest = block[:most], block[most:]
        kind = HEADERS
        self.response_frames += 1
        before = b""
        while rest:
            before += frame(kind, flags, number, first)
            kind, flags = CONTINUATION, 0
            first, rest = rest[:most], rest[most:]
        self.send(before + frame(kind, flags | END_HEADERS, number, first))

    def add(self, buffers: Sequence[Buffer], size: int) -> None:
        """Add a DATA frame, or all frames of a response, with `size` bytes of its body; they wait for `flush`."""
        self._buffers += buffers
        self.size += size + _FRAME_OVERHEAD
        self.response_frames += 1
        self.body_bytes += size

    def flush(self) -> None:
        """Pass everything collected to the sink."""
        if self._buffers:
            buffers, self._buffers = self._buffers, []
            is_small, self.size = self.size <= INLINE, 0
            self._sink([b"".join(buffers)] if is_small and len(buffers) > 1 else buffers)

    def discard(self) -> None:
        """Drop what has not been flushed."""
        self._buffers.clear()
        self.size = 0

    def disable_dynamic_table(self) -> None:
        """Announce with the next header block that our encoder uses no dynamic table."""
        self._prefix, self.max_whole_block = _NO_TABLE, 0
