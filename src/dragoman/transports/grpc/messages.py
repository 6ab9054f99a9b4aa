"""Parse gRPC messages: a compression flag, a length, and the message."""

import struct
from collections import deque
from typing import Final

from dragoman.protocols.wire import Buffer
from dragoman.transports.bodies import ReceiveBuffer
from dragoman.transports.grpc.handlers import GrpcError

PREFIX_BYTES: Final = 5
prefix = struct.Struct(">BI")
# A message up to this size is joined from its parts; a larger one is received into one buffer.
_SMALL: Final = 1 << 14


class MessageReader:
    """Parses the messages of one call. `ready`: complete ones, each with its compression flag.

    `missing`: bytes of the incomplete one that have not arrived.
    """

    __slots__ = ("_flag", "_large", "_limit", "_prefix", "_small", "missing", "ready")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._prefix = b""
        self._flag = 0
        self._small = bytearray()
        self._large: ReceiveBuffer | None = None
        self.missing = 0
        self.ready: deque[tuple[int, Buffer]] = deque()

    @property
    def is_incomplete(self) -> bool:
        return bool(self.missing or self._prefix)

    def feed(self, data: bytes | memoryview, at: int, stop: int) -> None:
        """Parse `data[at:stop]`. Raises GrpcError."""
        while at < stop:
            if self.missing:
                at = self._more(data, at, stop)
                continue
            if not self._prefix and stop - at >= PREFIX_BYTES:
                prefix_bytes, at = bytes(data[at : at + PREFIX_BYTES]), at + PREFIX_BYTES
            else:
                take = min(stop - at, PREFIX_BYTES - len(self._prefix))
                self._prefix += bytes(data[at : at + take])
                at += take
                if len(self._prefix) < PREFIX_BYTES:
                    return
                prefix_bytes, self._prefix = self._prefix, b""
            self._begin(*prefix.unpack(prefix_bytes))

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
        self._flag, self.missing = flag, length
        if length > _SMALL:
            self._large = ReceiveBuffer(length)

    def _more(self, data: bytes | memoryview, at: int, stop: int) -> int:
        size = min(self.missing, stop - at)
        if self._large is not None:
            self._large.append(memoryview(data)[at : at + size])
            self._received(self._large, size)
            return at + size
        part = data[at : at + size]
        self.missing -= size
        if self.missing:
            self._small += part
        else:
            whole: Buffer = bytes(self._small) + part if self._small else bytes(part)
            self._small.clear()
            self._done(whole)
        return at + size

    def buffer(self, size: int) -> memoryview | None:
        """Return where up to `size` further bytes are to be written to; None to use `feed`."""
        return None if self._large is None else self._large.free_space()[:size]

    def filled(self, size: int) -> None:
        """Count bytes that were written to `buffer`."""
        assert self._large is not None
        self._large.advance(size)
        self._received(self._large, size)

    def _received(self, buffer: ReceiveBuffer, size: int) -> None:
        self.missing -= size
        if not self.missing:
            self._large = None
            self._done(buffer.take())

    def _done(self, message: Buffer) -> None:
        self.ready.append((self._flag, message))
