"""The frames of HTTP/2 as bytes: their types, flags and error codes (RFC 9113, sections 4, 6 and 7)."""

import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9

# A frame's head: its length in 16 bits and 8 bits, type, flags, and its stream with a reserved bit.
head = struct.Struct(">HBBBI")

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

# What holds before any SETTINGS, and the bounds of what they may say.
DEFAULT_WINDOW: Final = 65_535
LARGEST_WINDOW: Final = (1 << 31) - 1
SMALLEST_FRAME: Final = 16_384
LARGEST_FRAME: Final = (1 << 24) - 1
NUMBER: Final = (1 << 31) - 1

_setting = struct.Struct(">HI")
_word = struct.Struct(">I")
_goaway = struct.Struct(">II")


class Http2ConnectionError(Exception):
    """What ends a connection, by the error code of its GOAWAY."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Http2StreamError(Exception):
    """What ends one stream, by the error code of its RST_STREAM."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return head.pack(size >> 8, size & 0xFF, kind, flags, number) + payload


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


def word(payload: bytes) -> int:
    """The one number of a RST_STREAM or WINDOW_UPDATE. Raises Http2ConnectionError where its size is another."""
    if len(payload) != 4:
        raise Http2ConnectionError(FRAME_SIZE_ERROR, f"expected 4 bytes, got {len(payload)}")
    found: int = _word.unpack(payload)[0]
    return found


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """The pairs of a SETTINGS frame, in order, each within its bounds. Raises Http2ConnectionError."""
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
