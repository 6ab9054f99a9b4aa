"""Header blocks: put together from their frames, and read once for all equal ones."""

from typing import Final

from dragoman.protocols.wire import HttpError
from dragoman.transports.http2 import frames
from dragoman.transports.http2.fields import Decoder, Field
from dragoman.transports.http2.frames import Http2ConnectionError
from dragoman.transports.http2.request import Http2Headers, parse_headers

# CONTINUATION frames of one block; the largest block that we take fits into far fewer.
_MAX_PIECES: Final = 64
# Blocks that are remembered, and the largest such.
_MAX_KEPT: Final = 32
_MAX_KEPT_BYTES: Final = 1024


class HeaderBlocks:
    """The blocks of one connection. `is_open` while one is incomplete."""

    __slots__ = (
        "_block",
        "_decoder",
        "_ended",
        "_heads",
        "_max_bytes",
        "_max_fields",
        "_number",
        "_pieces",
        "is_open",
        "max_block",
    )

    def __init__(self, max_header_bytes: int, max_fields: int) -> None:
        self._max_fields = max_fields
        self._max_bytes = max_header_bytes
        self._decoder = Decoder(max_header_bytes)
        # Somewhat larger ones are read, so that their stream alone is refused.
        self.max_block = max(frames.SMALLEST_FRAME, 4 * max_header_bytes)
        self._heads: dict[bytes, Http2Headers] = {}
        self.is_open = False
        self._block = bytearray()
        self._number = 0
        self._ended = False
        self._pieces = 0

    def begin(self, number: int, ended: bool, piece: bytes) -> None:
        """A block begins that further frames will go on with."""
        self.is_open, self._number, self._ended, self._pieces = True, number, ended, 0
        self._block = bytearray(piece)

    def append(self, number: int, flags: int, piece: bytes) -> tuple[bool, bytes] | None:
        """A CONTINUATION frame; gives whether the stream ends with it, and the block, once that is whole."""
        if not self.is_open or number != self._number:
            raise Http2ConnectionError(frames.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._pieces += 1
        self._block += piece
        if self._pieces > _MAX_PIECES or len(self._block) > self.max_block:
            raise Http2ConnectionError(frames.ENHANCE_YOUR_CALM, "a header block is too long")
        if not flags & frames.END_HEADERS:
            return None
        block, self._block, self.is_open = bytes(self._block), bytearray(), False
        return self._ended, block

    def decode(self, block: bytes) -> tuple[list[Field], HttpError | None]:
        """Return the fields of a block, as far as they are allowed, and an error where they were more.

        Raises Http2ConnectionError.
        """
        decoder = self._decoder
        version = decoder.version
        found = decoder.decode(block)
        if decoder.version != version:
            self._heads.clear()
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
        head = self._heads.get(block)
        if head is not None:
            return head
        version = self._decoder.version
        head = parse_headers(*self.decode(block))
        if self._decoder.version == version and len(block) <= _MAX_KEPT_BYTES:
            if len(self._heads) >= _MAX_KEPT:
                self._heads.clear()
            self._heads[block] = head
        return head


def strip_padding(flags: int, payload: bytes) -> bytes:
    """The block within a HEADERS frame, without its padding and its priority, which is ignored."""
    begin, end = 0, len(payload)
    if flags & frames.PADDED:
        if not payload:
            raise Http2ConnectionError(frames.FRAME_SIZE_ERROR, "HEADERS without the length of its padding")
        begin, end = 1, end - payload[0]
    if flags & frames.HAS_PRIORITY:
        begin += 5
    if begin > end:
        raise Http2ConnectionError(frames.PROTOCOL_ERROR, "there is more padding than frame")
    return payload[begin:end]
