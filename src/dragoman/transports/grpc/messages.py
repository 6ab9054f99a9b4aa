"""Parse gRPC messages: a compression flag, a length, and the message."""

import struct
from collections import deque
from typing import Final

from dragoman.protocols.wire import Buffer
from dragoman.transports.grpc.handlers import GrpcError
from dragoman.transports.receive_buffer import ReceiveBuffer

PREFIX_BYTES: Final = 5
prefix = struct.Struct(">BI")
# A message up to this size is put together from its pieces; a larger one is written to its place.
_SMALL: Final = 1 << 14


class MessageReader:
    """The messages of one call. `ready` holds those that are whole, each with whether it is packed.

    `awaited` is how many bytes of the one under way are still to come.
    """

    __slots__ = ("_flag", "_large", "_limit", "_prefix", "_small", "awaited", "ready")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prefix = b""
        self._flag = 0
        self._small = bytearray()
        self._large: ReceiveBuffer | None = None
        self.awaited = 0
        self.ready: deque[tuple[int, Buffer]] = deque()

    @property
    def begun(self) -> bool:
        """Whether a message has begun that is not whole."""
        return bool(self.awaited or self._prefix)

    def feed(self, data: bytes | memoryview, at: int, stop: int) -> None:
        """Take what lies in `data` from `at` to `stop`. Raises GrpcError."""
        while at < stop:
            if self.awaited:
                at = self._more(data, at, stop)
                continue
            if not self._prefix and stop - at >= PREFIX_BYTES:
                head, at = bytes(data[at : at + PREFIX_BYTES]), at + PREFIX_BYTES
            else:
                take = min(stop - at, PREFIX_BYTES - len(self._prefix))
                self._prefix += bytes(data[at : at + take])
                at += take
                if len(self._prefix) < PREFIX_BYTES:
                    return
                head, self._prefix = self._prefix, b""
            self._begin(*prefix.unpack(head))

    def _begin(self, flag: int, length: int) -> None:
        if flag > 1:
            raise GrpcError("INTERNAL", f"expected a message, whose flag is 0 or 1, got {flag}")
        if length > self._limit:
            raise GrpcError(
                "RESOURCE_EXHAUSTED", f"the message of {length} bytes is larger than the limit of {self._limit} bytes"
            )
        if not length:
            self.ready.append((flag, b""))
            return
        self._flag, self.awaited = flag, length
        if length > _SMALL:
            self._large = ReceiveBuffer(length)

    def _more(self, data: bytes | memoryview, at: int, stop: int) -> int:
        size = min(self.awaited, stop - at)
        if self._large is not None:
            self._large.put(memoryview(data)[at : at + size])
            self._received(self._large, size)
            return at + size
        piece = data[at : at + size]
        self.awaited -= size
        if self.awaited:
            self._small += piece
        else:
            whole: Buffer = bytes(self._small) + piece if self._small else bytes(piece)
            self._small.clear()
            self._done(whole)
        return at + size

    def room(self, size: int) -> memoryview | None:
        """Where the next bytes, at most `size` of them, belong; None where `feed` takes them."""
        return None if self._large is None else self._large.room()[:size]

    def filled(self, size: int) -> None:
        """So many bytes were written there."""
        assert self._large is not None
        self._large.advance(size)
        self._received(self._large, size)

    def _received(self, buffer: ReceiveBuffer, size: int) -> None:
        self.awaited -= size
        if not self.awaited:
            self._large = None
            self._done(buffer.whole())

    def _done(self, message: Buffer) -> None:
        self.ready.append((self._flag, message))
